"""Shapes worked out from the inputs alone: what a foreign file says about its inner values is not believed.

A runtime enforces the static sizes of inputs, so those may be built on. Declared shapes of inner values are hints that
no runtime checks, and rules that fold shape arithmetic would turn a wrong hint into wrong numbers.

The library `onnx-shape-inference` works out the shapes of a node; shape_functions.py corrects what of it does not hold
in every run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from onnx_shape_inference import ShapeInferenceContext
from onnx_shape_inference import registry as library

from layerline.backends.base import SOURCE, TRACED
from layerline.graph.analysis.ir_queries import constant, graph_values, rank, subgraphs
from layerline.graph.analysis.shape_functions import FOLLOWED, corrected, from_library
from layerline.graph.analysis.symbolic_sizes import (
    NUMBER,
    IrDim,
    SymbolicShape,
    from_file,
    is_size,
    simplified,
    size_of,
    sizes,
)

DeclaredShapes = Mapping[str, ir.Shape]
UNKNOWN = "unk__"
"""Begins the name of a size that nothing is known of. onnx's own inference writes such names too."""
# Shape tensors are short; anything longer is data.
LONGEST = 64
_BITS = {ir.DataType.INT64: 64, ir.DataType.INT32: 32}
_LARGEST_SIZE = 2**31 - 1
_LATEST_OPSET = 99
# Written by our export stage and by torch's exporter on nodes that were traced; files from elsewhere have neither.
_TRACED = (SOURCE, TRACED, "pkg.torch.onnx.name_scopes")

logger = logging.getLogger(__name__)
library.collect()


class ShapeSymbols(ShapeInferenceContext):  # type: ignore[misc]  # the library ships no types
    """What integer tensors hold, element by element: numbers, or sizes by name.

    Works it out on demand and remembers it, which is good until the graph changes. Integers wrap around where a
    type ends, as they do in every runtime. Sizes of axes are taken to be below 2**31, so a name fits each type
    followed here; of an expression that is taken for granted in int64 alone. Names of sizes that nothing is known
    of begin with `unknown`; those in `reserved` are in use.
    """

    def __init__(
        self, opset_imports: Mapping[str, int] | None = None, reserved: Iterable[str] = (), unknown: str = UNKNOWN
    ) -> None:
        super().__init__(opset_imports or {"": _LATEST_OPSET}, policy="override")
        self._elements: dict[ir.Value, list[IrDim] | None] = {}
        self._taken = set(reserved)
        self._unknown = unknown
        # Whether shapes are written to the graph; off while elements are worked out on demand.
        self._writes = False

    def of(self, value: ir.Value | None) -> SymbolicShape | None:
        """Elements of a scalar or one-dimensional integer tensor; None where they aren't known."""
        elements = self.get_symbolic_value(value)
        return None if elements is None else tuple(map(size_of, elements))

    def infer(self, node: ir.Node) -> None:
        """Writes the shapes and types of a node's outputs."""
        self._writes = True
        self._run(node)
        self._writes = False

    def is_unknown(self, dim: IrDim) -> bool:
        """Whether a size is one that nothing is known of, by a name that was made up here."""
        return isinstance(dim, ir.SymbolicDim) and dim.value in self._taken and dim.value.startswith(self._unknown)

    def _run(self, node: ir.Node) -> None:
        for output in node.outputs:
            self._elements[output] = _stored_elements(output)
            if self._writes:
                output.shape = None
        # What the library says of other domains nobody has compared with a runtime yet.
        if node.domain not in ("", "ai.onnx.ml"):
            return
        # The corrections look at the version themselves, where it matters.
        function = corrected.get(node.domain, node.op_type, version=1) or from_library
        try:
            function(self, node)
        except Exception as error:  # noqa: BLE001  # the library may raise anything at a node that it can't read
            logger.debug("no shapes follow at %s: %s", node.name, error)
            if self._writes:
                for output in node.outputs:
                    output.shape = None

    # From here on what the library's functions call.

    def new_symbolic_dim(self) -> ir.SymbolicDim:
        return self._fresh(self._unknown)

    def new_number(self) -> ir.SymbolicDim:
        """An element that nothing is known of; it may be negative."""
        return self._fresh(NUMBER)

    def _fresh(self, prefix: str) -> ir.SymbolicDim:
        count = len(self._taken)
        while f"{prefix}{count}" in self._taken:
            count += 1
        self._taken.add(f"{prefix}{count}")
        return ir.SymbolicDim(f"{prefix}{count}")

    def record_error(self, node: ir.Node, message: str) -> None:  # noqa: ARG002
        raise ValueError(message)

    def set_shape(self, value: ir.Value, shape: ir.Shape | None) -> bool:
        if not self._writes:
            return False
        value.shape = None
        if shape is not None:
            value.shape = ir.Shape([self._settled(dim) for dim in shape])
        return True

    def _settled(self, dim: IrDim) -> IrDim:
        size = simplified(dim)
        # An element that may be negative is not the size of the axis: Reshape to -1 gives another.
        return self.new_symbolic_dim() if size is None or not is_size(size) else size

    def set_dtype(self, value: ir.Value, dtype: ir.DataType | None) -> bool:
        if self._writes and dtype is not None:
            value.dtype = dtype
        return self._writes

    def set_type(self, value: ir.Value, type_: ir.TypeProtocol) -> bool:
        if self._writes:
            value.type = type_
        return self._writes

    def get_symbolic_value(self, value: ir.Value | None) -> list[IrDim] | None:
        if value is None:
            return None
        if value not in self._elements:
            # An invalid graph may be cyclic: whoever asks again on the way gets None.
            self._elements[value] = _stored_elements(value)
            node = value.producer()
            if self._elements[value] is None and node is not None and node.domain == "" and node.op_type in FOLLOWED:
                writes = self._writes
                self._writes = False
                self._run(node)
                self._writes = writes
        return self._elements[value]

    def set_symbolic_value(self, value: ir.Value, data: Sequence[IrDim] | None) -> None:
        node = value.producer()
        if data is None or node is None or node.op_type not in FOLLOWED or not _may_be_followed(value):
            self._elements[value] = None
        elif len(data) <= LONGEST:
            self._elements[value] = [self._wrapped(item, value.dtype) for item in data]

    def _wrapped(self, item: IrDim, dtype: ir.DataType | None) -> IrDim:
        """What an integer type makes of an element."""
        size = simplified(item)
        if size is None:
            return self.new_number()
        if isinstance(size, int):
            if dtype not in _BITS:
                return int(size != 0)
            half: int = 2 ** (_BITS[dtype] - 1)
            wrapped: int = (size + half) % (2 * half) - half
            return wrapped
        is_name = len(size.free_symbols()) == 1 and size.value in size.free_symbols()
        largest_number = max(map(int, re.findall(r"\d+", str(size.value))), default=0)
        if dtype != ir.DataType.BOOL and is_name:
            return size
        if dtype == ir.DataType.INT64 and largest_number <= _LARGEST_SIZE:
            return size
        return self.new_number()


def _may_be_followed(value: ir.Value) -> bool:
    return (value.dtype in _BITS or value.dtype == ir.DataType.BOOL) and rank(value) in (0, 1)


def _stored_elements(value: ir.Value) -> list[IrDim] | None:
    # The size is asked first, or a large weight would be read.
    if value.const_value is not None and value.const_value.size > LONGEST:
        return None
    if value.dtype is not None and not _may_be_followed(value):
        return None
    stored = constant(value)
    if stored is None or stored.size > LONGEST or stored.ndim > 1 or stored.dtype.kind not in "iub":
        return None
    return [int(element) for element in stored.reshape(-1)]


# Whose outputs are sequences, or may be.
_SEQUENCES = frozenset(
    {
        "SequenceEmpty",
        "SequenceConstruct",
        "SequenceInsert",
        "SequenceErase",
        "SequenceMap",
        "SplitToSequence",
        "Identity",
    }
)


def infer_types(model: ir.Model) -> None:
    """Fills in the types and shapes that a file leaves out; what it declares stays, for the model is written again."""
    untyped: list[ir.Value] = []
    if any("Sequence" in node.op_type for node in model.graph.all_nodes()):
        values: list[ir.Value] = []
        for node in model.graph:
            if subgraphs(node) or node.op_type in _SEQUENCES:
                values += node.outputs
        for body in model.graph.subgraphs():
            values += graph_values(body)
        untyped = [value for value in values if value.type is None]
    # Data propagation would write out what a ConstantOfShape holds, however much that is.
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    # It takes sequences for tensors, and runtimes refuse a model that declares one as the other.
    for value in untyped:
        value.type = None


def declared(model: ir.Model) -> DeclaredShapes:
    """The shapes a model declares for its inner values, where torch's exporter wrote them from what it traced.

    It knows what no inference can, such as that [:, :seq] of a table of 512 positions has seq of them. Files from
    elsewhere declare nothing that may be built on.
    """
    if not any(key in node.metadata_props for node in model.graph for key in _TRACED):
        return {}
    shapes: dict[str, ir.Shape] = {}
    for node in model.graph:
        for output in node.outputs:
            if output.name and output.shape is not None:
                shapes[output.name] = output.shape
    return shapes


def infer(model: ir.Model, declared_shapes: DeclaredShapes | None = None) -> None:
    """Replaces the shape and type of every inner value by what follows from the model's inputs and constants.

    Afterwards every unknown size has a name of its own, so that equal names always mean equal sizes. Where nothing
    follows, `declared_shapes` are filled in; see `declared`.
    """
    declared_shapes = declared_shapes or {}
    names: set[str] = set()
    for shape in (*declared_shapes.values(), *(value.shape for value in model.graph.inputs)):
        names.update(str(dim) for dim in shape or ())
    # Names in use are not given out again: equal names mean equal sizes.
    symbols = ShapeSymbols(model.opset_imports, names)
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([from_file(dim) or symbols.new_symbolic_dim() for dim in value.shape])
    _infer_graph(model.graph, symbols, declared_shapes)


def _infer_graph(graph: ir.Graph, symbols: ShapeSymbols, declared_shapes: DeclaredShapes) -> None:
    for value in graph.initializers.values():
        assert value.const_value is not None
        value.shape = ir.Shape(value.const_value.shape.numpy())
        value.dtype = value.const_value.dtype
    for node in graph:
        for body in subgraphs(node):
            # What a Loop or Scan hands to its body may change shape from turn to turn, whatever the file declares.
            for index, value in enumerate(body.inputs):
                value.shape = None
                # The turn and the condition.
                if node.op_type == "Loop" and node.domain == "" and index < 2:
                    value.shape = ir.Shape(())
            _infer_graph(body, symbols, {})
        symbols.infer(node)
        for output in node.outputs:
            declared_shape = declared_shapes.get(output.name or "")
            if declared_shape is not None:
                output.shape = _refined(output.shape, declared_shape, symbols)


def _refined(inferred: ir.Shape | None, declared_shape: ir.Shape, symbols: ShapeSymbols) -> ir.Shape | None:
    """An inferred shape whose unknown sizes are those that the file declares."""
    dims: list[IrDim] = []
    if inferred is not None and len(inferred) != len(declared_shape):
        return inferred
    for axis, declared_dim in enumerate(declared_shape):
        dim: IrDim | None = None
        if inferred is not None and not symbols.is_unknown(inferred[axis]):
            dim = inferred[axis]
        # Powers are no sizes, and one of large numbers would take for ever to compute.
        elif "**" not in str(declared_dim):
            dim = simplified(declared_dim)
        if dim is None:
            dim = symbols.new_symbolic_dim()
        dims.append(dim)
    return ir.Shape(dims)


def clash(old: ir.Value, new: ir.Value, made: Sequence[ir.Node], model: ir.Model) -> str | None:
    """How the shape of `new`, computed by nodes just made that are still without names, differs from that of `old`.

    A constant of more axes than what it is joined with widens the result: a rule that leaves it out would change the
    shape. None where the two agree as far as both are known. The nodes are left as they were.
    """
    before: dict[ir.Value, tuple[ir.Shape | None, ir.TypeProtocol | None]] = {}
    for node in made:
        before.update((output, (output.shape, output.type)) for output in node.outputs)
    # The graph has names of unknown sizes already.
    symbols = ShapeSymbols(model.opset_imports, unknown="made__")
    for node in made:
        symbols.infer(node)
    old_shape = sizes(old)
    new_shape = sizes(new)
    for output, (shape, kind) in before.items():
        output.shape = shape
        output.type = kind
    if old_shape is None or new_shape is None:
        return None
    if len(old_shape) == len(new_shape):
        # Sizes that are names may differ and still be equal in every run.
        pairs = list(zip(old_shape, new_shape, strict=True))
        if all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int)):
            return None
    return f"{old.name} has shape {list(old_shape)}, what would replace it {list(new_shape)}"
