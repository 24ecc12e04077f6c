"""What an integer tensor holds, element by element, when it is computed from shapes: numbers, or names of sizes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant, rank
from layerline.graph.analysis.size_algebra import INTEGER_BITS, Size, Sizes, is_size, product, quotient, sizes, wrap

# Shape tensors are short; anything longer is data.
LONGEST = 64
_INTEGERS = frozenset({*INTEGER_BITS, ir.DataType.BOOL})


class Symbols:
    """What integer tensors hold, worked out on demand and remembered.

    A memory is good until the graph changes.
    """

    def __init__(self) -> None:
        self._elements: dict[ir.Value, Sizes | None] = {}

    def of(self, value: ir.Value | None) -> Sizes | None:
        """Elements of a scalar or one-dimensional integer tensor; None where they aren't known."""
        if value is None:
            return None
        if value not in self._elements:
            # An invalid graph may be cyclic: whoever asks again on the way gets None.
            self._elements[value] = None
            self._elements[value] = self._work_out(value)
        return self._elements[value]

    def _work_out(self, value: ir.Value) -> Sizes | None:
        if value.dtype not in _INTEGERS or rank(value) not in (0, 1):
            return None
        # Asked before `constant`, which would read a large weight.
        if value.const_value is not None and value.const_value.size > LONGEST:
            return None
        stored = constant(value)
        if stored is not None:
            if stored.size > LONGEST:
                return None
            return tuple(int(element) for element in stored.reshape(-1))
        elements = self._computed(value)
        if elements is None or len(elements) > LONGEST:
            return None
        return tuple(wrap(item, value.dtype, f"?{value.name}[{index}]") for index, item in enumerate(elements))

    def _computed(self, value: ir.Value) -> Sizes | None:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _STEPS:
            return None
        return _STEPS[node.op_type](node, self)


Step = Callable[[ir.Node, Symbols], Sizes | None]


def _same(node: ir.Node, symbols: Symbols) -> Sizes | None:
    return symbols.of(node.inputs[0])


def _shape(node: ir.Node, symbols: Symbols) -> Sizes | None:  # noqa: ARG001
    shape = sizes(node.inputs[0])
    if shape is None:
        return None
    # Opset 15 cuts a piece out of the shape; the bounds are those of a Python slice.
    start: int = node.attributes.get_int("start", 0)
    end: int = node.attributes.get_int("end", len(shape))
    return shape[start:end]


def _size(node: ir.Node, symbols: Symbols) -> Sizes | None:  # noqa: ARG001
    shape = sizes(node.inputs[0])
    if shape is None:
        return None
    return (product(shape),)


def _gather(node: ir.Node, symbols: Symbols) -> Sizes | None:
    data = symbols.of(node.inputs[0])
    indices = symbols.of(node.inputs[1])
    if (
        data is None
        or indices is None
        or rank(node.inputs[0]) != 1
        or node.attributes.get_int("axis", 0) not in (0, -1)
    ):
        return None
    picked: list[Size] = []
    for index in indices:
        if not isinstance(index, int) or not -len(data) <= index < len(data):
            return None
        picked.append(data[index])
    return tuple(picked)


def _slice(node: ir.Node, symbols: Symbols) -> Sizes | None:
    data = symbols.of(node.inputs[0])
    if data is None or rank(node.inputs[0]) != 1:
        return None
    bounds: list[Sizes | None]
    if len(node.inputs) < 3:
        # Up to opset 9 the bounds are attributes.
        bounds = [tuple(node.attributes.get_ints(name, ()) or ()) for name in ("starts", "ends")]
    else:
        bounds = [symbols.of(value) for value in (*node.inputs[1:3], *node.inputs[4:5])]
    numbers: list[int] = []
    for bound in bounds:
        if bound is None or len(bound) != 1 or not isinstance(bound[0], int):
            return None
        numbers.append(bound[0])
    if 0 in numbers[2:]:  # a step of 0 is invalid
        return None
    return data[slice(*numbers)]


def _concat(node: ir.Node, symbols: Symbols) -> Sizes | None:
    if node.attributes.get_int("axis", 0) not in (0, -1):
        return None
    joined: list[Size] = []
    for value in node.inputs:
        elements = symbols.of(value)
        if elements is None:
            return None
        joined += elements
    return tuple(joined)


def _cast(node: ir.Node, symbols: Symbols) -> Sizes | None:
    elements = symbols.of(node.inputs[0])
    target = ir.DataType(node.attributes.get_int("to", 0))
    if elements is None or target not in _INTEGERS:
        return None
    if target != ir.DataType.BOOL:
        return elements
    if not all(isinstance(element, int) for element in elements):
        return None
    return tuple(int(element != 0) for element in elements)


def _spread(first: Sizes | None, second: Sizes | None) -> tuple[Sizes, Sizes] | None:
    """Both broadcast to one length; None where they are not known or do not fit."""
    if first is None or second is None:
        return None
    if len(first) == len(second):
        return first, second
    if len(first) == 1:
        return first * len(second), second
    if len(second) == 1:
        return first, second * len(first)
    return None


def _elementwise(combine: Callable[[Size, Size], Size | None]) -> Step:
    def step(node: ir.Node, symbols: Symbols) -> Sizes | None:
        both = _spread(symbols.of(node.inputs[0]), symbols.of(node.inputs[1]))
        if both is None:
            return None
        results: list[Size] = []
        for index, (a, b) in enumerate(zip(*both, strict=True)):
            combined = combine(a, b)
            if combined is None:
                combined = f"?{node.outputs[0].name}[{index}]"
            results.append(combined)
        return tuple(results)

    return step


def _add(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if b == 0:
        return a
    if a == 0:
        return b
    return None


def _sub(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if a == b:
        return 0
    if b == 0:
        return a
    return None


def _mul(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if is_size(a) and is_size(b):
        return product((a, b))
    if b == 1:
        return a
    if a == 1:
        return b
    return None


def _div(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        # Runtimes round negative quotients differently; sizes have none.
        if a >= 0 and b > 0:
            return a // b
        return None
    if is_size(a) and is_size(b) and b != 0:
        return quotient([a], [b])
    if b == 1:
        return a
    return None


def _equal(node: ir.Node, symbols: Symbols) -> Sizes | None:
    both = _spread(symbols.of(node.inputs[0]), symbols.of(node.inputs[1]))
    if both is None:
        return None
    answers: list[Size] = []
    for a, b in zip(*both, strict=True):
        answer = _is_equal(a, b)
        if answer is None:
            return None
        answers.append(int(answer))
    return tuple(answers)


def _is_equal(a: Size, b: Size) -> bool | None:
    """Whether two elements are the same number in every run; None where that depends on the run."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, str) and isinstance(b, str):
        if a == b:
            return True
        return None
    number, name = a, b
    if isinstance(a, str):
        number, name = b, a
    if isinstance(number, int) and number < 0 and is_size(name):
        return False
    return None


def _where(node: ir.Node, symbols: Symbols) -> Sizes | None:
    parts: list[Sizes] = []
    for value in node.inputs:
        elements = symbols.of(value)
        if elements is None:
            return None
        parts.append(elements)
    count = max(map(len, parts))
    spread: list[Sizes] = []
    for part in parts:
        if len(part) == 1:
            part = part * count
        if len(part) != count:
            return None
        spread.append(part)
    chosen: list[Size] = []
    for condition, when_true, when_false in zip(*spread, strict=True):
        if not isinstance(condition, int):
            return None
        if condition:
            chosen.append(when_true)
        else:
            chosen.append(when_false)
    return tuple(chosen)


def _constant_of_shape(node: ir.Node, symbols: Symbols) -> Sizes | None:
    shape = symbols.of(node.inputs[0])
    if shape is None or len(shape) != 1:
        return None
    count = shape[0]
    if not isinstance(count, int) or count > LONGEST:
        return None
    fill = 0
    value = node.attributes.get("value")
    if value is not None:
        fill = int(value.as_tensor().numpy().item())
    return (fill,) * count


def _reduce_prod(node: ir.Node, symbols: Symbols) -> Sizes | None:
    elements = symbols.of(node.inputs[0])
    axes: Sizes | None = ()
    if len(node.inputs) > 1:
        axes = symbols.of(node.inputs[1])
    if elements is None or axes is None:
        return None
    keeps_all: int = node.attributes.get_int("noop_with_empty_axes", 0)
    if keeps_all and not axes:
        return elements
    if not all(is_size(element) for element in elements):
        return None
    total = product(elements)
    # How a long product wraps is the runtime's own business.
    if isinstance(total, int) and wrap(total, node.outputs[0].dtype, "") != total:
        return None
    return (total,)


_STEPS: dict[str, Step] = {
    "Shape": _shape,
    "Size": _size,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Cast": _cast,
    "Add": _elementwise(_add),
    "Sub": _elementwise(_sub),
    "Mul": _elementwise(_mul),
    "Div": _elementwise(_div),
    "Equal": _equal,
    "Where": _where,
    "ConstantOfShape": _constant_of_shape,
    "ReduceProd": _reduce_prod,
} | dict.fromkeys(("Identity", "Squeeze", "Unsqueeze", "Reshape"), _same)
