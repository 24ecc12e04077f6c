"""The mean error of each channel of each layer in a quantised model, measured from layer to layer.

A layer reads what the quantised model computes once the layers before it are corrected, so that a correction also takes
off what their errors shifted: the empirical bias correction of M. Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction" (ICCV 2019). Both models run in pieces, each from one layer to the next, so that a
node runs once for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.range_candidates import Error
from layerline.graph.analysis.assembly import Assembly
from layerline.graph.analysis.ir_queries import first_output, names, reads

# Memory of the values that pieces pass on, in both models. Beyond it the layer and those that follow use fewer samples.
MOST_BYTES = 512 << 20


@dataclass(frozen=True)
class _Piece:
    """The nodes from the layers before up to one layer."""

    layer: str
    passed: tuple[str, ...]  # what later pieces read of it
    needed: frozenset[str]  # what later pieces read of it and of earlier ones


def measure(
    model: ir.Model, quantized: ir.Model, axes: Mapping[str, int], feeds: Sequence[Feed]
) -> dict[str, npt.NDArray[np.float64]]:
    """The amount to subtract from each channel of each layer.

    Args:
        quantized: has the values of the float model, under their names.
        axes: the layers by their first output, each with the axis of its channels.

    Returns:
        By layer. One whose error is not finite is left out.
    """
    exact, other = _Walk(model, feeds), _Walk(quantized, feeds)
    shifts: dict[str, npt.NDArray[np.float64]] = {}
    for piece in _pieces(model, axes):
        axis = axes[piece.layer]
        shift = _shift(_outputs(exact, other, piece), axis)
        if shift is not None:
            shifts[piece.layer] = shift
            other.subtract(piece.layer, shift, axis)
    return shifts


def _outputs(exact: _Walk, other: _Walk, piece: _Piece) -> Iterator[tuple[Array, Array]]:
    """A layer's outputs in both models. Samples that take too much memory are dropped from the end."""
    for pair in zip(exact.run(piece), other.run(piece), strict=True):
        yield pair
        # Within the loop: the values of all samples together may be many times what is allowed.
        while len(exact.values) > 1 and exact.size() + other.size() > MOST_BYTES:
            exact.values.pop()
            other.values.pop()


def _shift(pairs: Iterator[tuple[Array, Array]], axis: int) -> npt.NDArray[np.float64] | None:
    """The mean difference of each channel, shrunk by its uncertainty; None where there is no finite one."""
    sums, error, count = np.zeros(0), 0.0, 0
    for a, b in pairs:
        # Sizes that depend on numbers may differ.
        if a.shape != b.shape:
            continue
        difference = np.moveaxis(b.astype(np.float64) - a, axis, -1).reshape(-1, a.shape[axis])
        sums = difference.sum(axis=0) + (sums if count else 0.0)
        error += float(np.square(difference).sum())
        count += len(difference)
    if not count or not math.isfinite(error):
        return None
    return Error(signal=1.0, error=error, shift=sums / count, count=count).correction()


def _pieces(model: ir.Model, axes: Mapping[str, int]) -> list[_Piece]:
    """One piece for each layer, in the order of the graph."""
    layers = [node for node in model.graph if first_output(node) in axes]
    piece_of: dict[ir.Node, int] = {}
    last_read: dict[str, int] = {}
    for index, layer in enumerate(layers):
        stack = [layer]
        while stack:
            node = stack.pop()
            if node in piece_of:
                continue
            piece_of[node] = index
            for value in reads(node):
                last_read[value.name or ""] = index
                maker = value.producer()
                if maker is not None:
                    stack.append(maker)
    passed: list[list[str]] = [[] for _ in layers]
    for node, index in piece_of.items():
        # A constant is stored once, not passed on for each sample.
        if node.op_type != "Constant":
            passed[index] += [name for name in names(node.outputs) if last_read.get(name, index) > index]
    pieces: list[_Piece] = []
    for index, layer in enumerate(layers):
        needed = frozenset(name for name, last in last_read.items() if last > index)
        pieces.append(_Piece(first_output(layer), tuple(passed[index]), needed))
    return pieces


class _Walk:
    """Runs one model piece by piece.

    Attributes:
        values: for each feed, what later pieces read.
    """

    def __init__(self, model: ir.Model, feeds: Sequence[Feed]) -> None:
        self.values: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self._model = model
        self._order: dict[ir.Node, int] = {}
        self._made: dict[str, ir.Node] = {}
        for index, node in enumerate(model.graph):
            self._order[node] = index
            self._made.update(dict.fromkeys(names(node.outputs), node))

    def run(self, piece: _Piece) -> Iterator[Array]:
        """The layer's output for each feed; values that no later piece reads are dropped."""
        if not self.values:
            return
        outputs = list(dict.fromkeys((piece.layer, *piece.passed)))
        session = OnnxRuntime(few_runs=True).open(self._cut(outputs))
        for values in self.values:
            results = session.run({name: values[name] for name in session.inputs})
            values.update({name: results[name] for name in piece.passed})
            for name in values.keys() - piece.needed:
                del values[name]
            yield results[piece.layer]

    def subtract(self, layer: str, shift: npt.NDArray[np.float64], axis: int) -> None:
        """Corrects a layer's output where later pieces read it."""
        for values in self.values:
            if layer in values:
                array = values[layer]
                shape = [1] * array.ndim
                shape[axis] = -1
                values[layer] = (array - shift.reshape(shape)).astype(array.dtype)

    def size(self) -> int:
        """Bytes of all values."""
        total = 0
        for values in self.values:
            for value in values.values():
                total += sum(part.nbytes for part in _tensors(value))
        return total

    def _cut(self, outputs: Sequence[str]) -> ir.Model:
        """The model from the values at hand to the outputs. Q/DQ of a value are in each piece that reads them."""
        graph, source = Assembly(), self._model.graph
        inputs: dict[str, ir.Value] = {}
        nodes: set[ir.Node] = set()
        stack = [self._made[name] for name in outputs]
        while stack:
            node = stack.pop()
            if node in nodes:
                continue
            nodes.add(node)
            for value in reads(node):
                name = value.name or ""
                maker = value.producer()
                if name in self.values[0]:
                    inputs[name] = ir.Value(name=name, type=_type(self.values[0][name]))
                elif maker is not None:
                    stack.append(maker)
                elif value.const_value is not None:
                    graph.store(name, value.const_value)
        copies = [graph.copy(node) for node in sorted(nodes, key=self._order.__getitem__)]
        return graph.model(
            copies,
            list(inputs.values()),
            outputs,
            opsets=source.opset_imports,
            ir_version=self._model.ir_version,
            functions=self._model.functions.values(),
        )


def _tensors(value: Array | list[Array]) -> list[Array]:
    """The tensors of a value; onnxruntime gives a sequence as a list."""
    if isinstance(value, list):
        return value
    return [value]


def _type(value: Array | list[Array]) -> ir.TypeProtocol:
    """The type of a value."""
    tensor = ir.TensorType(ir.DataType.from_numpy(_tensors(value)[0].dtype))
    if isinstance(value, list):
        return ir.SequenceType(tensor)
    return tensor
