"""Sizes as names: what an integer tensor holds, element by element, when it is computed from shapes.

An element is a number, or the name of a symbolic size ("batch"), or a product of them ("6*batch"). Two equal names are
the same number in every run. A name that starts with "?" is a number the graph computes in a way that isn't followed;
unlike a size it may be negative.

Integers wrap around where a type ends, as they do in every runtime. Sizes of axes are taken to be below 2**31, so a
name fits each type followed here; of a product of names that is taken for granted in int64 alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import onnx_ir as ir

from layerline.graph.analysis.ir_queries import constant, rank
from layerline.pipeline.inputs.untrusted import is_number

Size = int | str
Sizes = tuple[Size, ...]
# Shape tensors are short; anything longer is data.
LONGEST = 64
_BITS = {ir.DataType.INT64: 64, ir.DataType.INT32: 32}
_INTEGERS = frozenset({*_BITS, ir.DataType.BOOL})
_LARGEST_SIZE = 2**31 - 1
_SUMS = (" + ", " - ")


class Symbols:
    """What integer tensors hold, worked out on demand and remembered.

    A memory is good until the graph changes.
    """

    def __init__(self) -> None:
        self._known: dict[ir.Value, Sizes | None] = {}

    def of(self, value: ir.Value | None) -> Sizes | None:
        """Elements of a scalar or one-dimensional integer tensor; None where they aren't known."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = None  # cut off what an invalid, cyclic graph would do
            self._known[value] = self._work_out(value)
        return self._known[value]

    def _work_out(self, value: ir.Value) -> Sizes | None:
        if value.dtype not in _INTEGERS or rank(value) not in (0, 1):
            return None
        if value.const_value is not None and value.const_value.size > LONGEST:
            return None
        stored = constant(value)
        if stored is not None:
            return tuple(int(x) for x in stored.reshape(-1)) if stored.size <= LONGEST else None
        node = value.producer()
        step = _STEPS.get(node.op_type) if node is not None and node.domain == "" else None
        found = step(node, self) if step is not None and node is not None else None
        if found is None or len(found) > LONGEST:
            return None
        return tuple(_held(item, value.dtype, f"?{value.name}[{i}]") for i, item in enumerate(found))


def sizes(value: ir.Value | None) -> Sizes | None:
    """The shape of a value with a name for every size that has no number; None where not even the rank is known."""
    if value is None or value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value or f"{value.name}#{i}" for i, d in enumerate(value.shape))


def is_size(item: Size) -> bool:
    """Whether an element is certainly not negative."""
    return "?" not in item if isinstance(item, str) else item >= 0


def product(items: Iterable[Size]) -> Size:
    """The product of sizes: a number, or names in alphabetical order behind their factor; sums are in brackets."""
    others = [item for item in items if item != 1]
    if len(others) == 1 and isinstance(others[0], str) and len(_parts(others[0])) == 1:
        return others[0]
    factor, names = _factors(others)
    if factor == 0 or not names:
        return factor
    return "*".join(([str(factor)] if factor != 1 else []) + sorted(names))


def quotient(items: Iterable[Size], by: Iterable[Size]) -> Size | None:
    """The product of some sizes over the product of others, where it is certain; None where names don't cancel."""
    above, below = _factors(items), _factors(by)
    names = list(above[1])
    for name in below[1]:
        if name not in names:
            return None
        names.remove(name)
    if below[0] == 0 or above[0] % below[0]:
        return None
    return product([above[0] // below[0], *map(_bare, names)])


def _held(item: Size, kind: ir.DataType | None, otherwise: str) -> Size:
    """What an integer type makes of an element; `otherwise` where that depends on how large its sizes are."""
    bits = _BITS.get(kind) if kind is not None else None
    if isinstance(item, int):
        return item if bits is None else (item + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    factor, names = _factors([item])
    return item if (len(names), factor) == (1, 1) or (bits == 64 and factor <= _LARGEST_SIZE) else otherwise


def _factors(items: Iterable[Size]) -> tuple[int, list[str]]:
    factor, names = 1, []
    for item in items:
        for part in _parts(item) if isinstance(item, str) else [item]:
            if isinstance(part, int) or is_number(part):
                factor *= int(part)
            else:
                names.append(part)
    return factor, names


def _parts(size: str) -> list[str]:
    """The factors that a size is written as: asterisks inside brackets are not its own, and a sum is one factor."""
    outside = _outside(size)
    if any(sign in outside for sign in _SUMS) or "//" in outside:
        return [f"({size})"]
    cuts = [-1, *(i for i, c in enumerate(outside) if c == "*"), len(size)]
    return [size[start + 1 : end] for start, end in itertools.pairwise(cuts)]


def _bare(size: str) -> str:
    """A sum without the brackets that it had as a factor: alone it is written without."""
    inner = size[1:-1] if size.startswith("(") and size.endswith(")") else ""
    return inner if any(sign in _outside(inner) for sign in _SUMS) else size


def _outside(text: str) -> str:
    """The text with all that stands in brackets blanked out."""
    depth, found = 0, []
    for c in text:
        depth -= c == ")"
        found.append(" " if depth else c)
        depth += c == "("
    return "".join(found)


Step = Callable[[ir.Node, Symbols], "Sizes | None"]


def _same(node: ir.Node, known: Symbols) -> Sizes | None:
    return known.of(node.inputs[0])


def _shape(node: ir.Node, known: Symbols) -> Sizes | None:  # noqa: ARG001
    of = sizes(node.inputs[0])
    if of is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(of))
    return of[slice(start, end)]


def _size(node: ir.Node, known: Symbols) -> Sizes | None:  # noqa: ARG001
    of = sizes(node.inputs[0])
    return (product(of),) if of is not None else None


def _gather(node: ir.Node, known: Symbols) -> Sizes | None:
    data, index = known.of(node.inputs[0]), known.of(node.inputs[1])
    if data is None or index is None or rank(node.inputs[0]) != 1 or node.attributes.get_int("axis", 0) not in (0, -1):
        return None
    if not all(isinstance(i, int) and -len(data) <= i < len(data) for i in index):
        return None
    return tuple(data[i] for i in index if isinstance(i, int))


def _slice(node: ir.Node, known: Symbols) -> Sizes | None:
    data = known.of(node.inputs[0])
    if data is None or rank(node.inputs[0]) != 1:
        return None
    if len(node.inputs) < 3:
        bounds: list[Sizes | None] = [tuple(node.attributes.get_ints(k, ()) or ()) for k in ("starts", "ends")]
    else:
        bounds = [known.of(v) for v in (*node.inputs[1:3], *node.inputs[4:5])]
    picked = [b[0] for b in bounds if b is not None and len(b) == 1]
    numbers = [p for p in picked if isinstance(p, int)]
    return data[slice(*numbers)] if len(numbers) == len(bounds) and 0 not in numbers[2:] else None


def _concat(node: ir.Node, known: Symbols) -> Sizes | None:
    parts = [known.of(v) for v in node.inputs]
    if any(p is None for p in parts) or node.attributes.get_int("axis", 0) not in (0, -1):
        return None
    return tuple(item for part in parts if part is not None for item in part)


def _cast(node: ir.Node, known: Symbols) -> Sizes | None:
    of, to = known.of(node.inputs[0]), ir.DataType(node.attributes.get_int("to", 0))
    if to != ir.DataType.BOOL:
        return of if to in _INTEGERS else None
    return tuple(int(x != 0) for x in of) if of is not None and all(isinstance(x, int) for x in of) else None


def _elementwise(combine: Callable[[Size, Size], Size | None]) -> Step:
    def step(node: ir.Node, known: Symbols) -> Sizes | None:
        a, b = known.of(node.inputs[0]), known.of(node.inputs[1])
        if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
            return None
        count = max(len(a), len(b)) if a and b else 0
        a, b = (x * count if len(x) == 1 else x for x in (a, b))
        out = [combine(x, y) for x, y in zip(a, b, strict=True)]
        return tuple(f"?{node.outputs[0].name}[{i}]" if item is None else item for i, item in enumerate(out))

    return step


def _add(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else None


def _sub(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return 0 if a == b else a if b == 0 else None


def _mul(a: Size, b: Size) -> Size | None:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return product((a, b)) if is_size(a) and is_size(b) else a if b == 1 else b if a == 1 else None


def _div(a: Size, b: Size) -> Size | None:
    # Runtimes round negative quotients differently; sizes have none.
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a >= 0 and b > 0 else None
    return quotient([a], [b]) if is_size(a) and is_size(b) and b != 0 else a if b == 1 else None


def _equal(node: ir.Node, known: Symbols) -> Sizes | None:
    a, b = known.of(node.inputs[0]), known.of(node.inputs[1])
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = max(len(a), len(b))
    answers = [_is_equal(x, y) for x, y in zip(*(v * count if len(v) == 1 else v for v in (a, b)), strict=True)]
    return None if None in answers else tuple(int(bool(x)) for x in answers)


def _is_equal(a: Size, b: Size) -> bool | None:
    if type(a) is type(b):
        return a == b if isinstance(a, int) or a == b else None
    number, name = (a, b) if isinstance(a, int) else (b, a)
    return False if isinstance(number, int) and number < 0 and is_size(name) else None


def _where(node: ir.Node, known: Symbols) -> Sizes | None:
    parts = [known.of(v) for v in node.inputs]
    count = max((len(p) for p in parts if p is not None), default=0)
    spread = [p * count if p is not None and len(p) == 1 else p for p in parts]
    if any(p is None or len(p) != count for p in spread) or not all(isinstance(c, int) for c in spread[0] or ()):
        return None
    return tuple(x if c else y for c, x, y in zip(*(p for p in spread if p is not None), strict=True))


def _constant_of_shape(node: ir.Node, known: Symbols) -> Sizes | None:
    count, value = known.of(node.inputs[0]), node.attributes.get("value")
    if count is None or len(count) != 1 or not isinstance(count[0], int) or count[0] > LONGEST:
        return None
    return (int(value.as_tensor().numpy().item()) if value is not None else 0,) * count[0]


def _reduce_prod(node: ir.Node, known: Symbols) -> Sizes | None:
    of, axes = known.of(node.inputs[0]), known.of(node.inputs[1]) if len(node.inputs) > 1 else ()
    if of is None or axes is None:
        return None
    idle: int = node.attributes.get_int("noop_with_empty_axes", 0)
    if idle and not axes:
        return of
    whole = product(of)
    # How a long product wraps is the runtime's own business.
    beyond = isinstance(whole, int) and _held(whole, node.outputs[0].dtype, "") != whole
    return (whole,) if all(is_size(x) for x in of) and not beyond else None


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
