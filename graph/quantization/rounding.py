"""Chooses the range of each output channel of a weight, and for each weight whether to round up or down.

The objective of the rounding is that of AdaRound (M. Nagel et al., "Up or Down? Adaptive Rounding for Post-Training
Quantization", ICML 2020): the mean square of (W' - W) x over what calibration feeds a layer, with each weight on one of
its two neighbouring steps. It needs only the second moments of x, so memory does not grow with the samples, and it is
minimised weight by weight until no single change helps. Before that each output channel takes the range with the least
error of plain rounding, where x varies as its single elements do. `gptq` rounds weights in blocks, from the same second
moments.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.collect import packed
from layerline.calib.histogram import shortest
from layerline.calib.plan import QuantPlan, QuantValue
from layerline.calib.scales import LEVELS, Stored, in_blocks
from layerline.graph.analysis.ir_queries import constant, copied, first_output
from layerline.graph.fusion import affine_ops
from layerline.graph.quantization import gptq, qdq
from layerline.graph.quantization.weight_sources import weight_of

Numbers = npt.NDArray[np.float32]
# Memory for the second moments of one pass over the samples. Layers beyond it take further passes.
MOST_BYTES = 256 << 20
# Greatest number of rows (pixels or tokens) of one feed that a layer's moments use, and of elements in them. Both bound
# the time and memory that convolutions on large images take: their neighbouring windows are nearly alike.
MOST_ROWS, MOST_ELEMENTS = 2048, 4 << 20
# Greatest number of passes over the weights of a layer; few layers need more than four.
SWEEPS = 8
# Candidates for the end of a channel's range, as fractions of its greatest weight.
ENDS = np.linspace(1.0, 0.7, 31, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A layer whose weights are quantised, and the value that it reads."""

    node: ir.Node
    weight: QuantValue
    array: Array
    source: str  # what is tapped
    activation: QuantValue | None  # how that is quantised; None where it stays float.

    @property
    def groups(self) -> int:
        if self.node.op_type != "Conv":
            return 1
        return int(self.node.attributes.get_int("group", 1))

    @property
    def rows(self) -> Array:
        """The weights by group, output and input, (groups, outputs, inputs)."""
        rows = affine_ops.rows(self.node, self.array)
        return rows.reshape(self.groups, len(rows) // self.groups, -1)

    def stored(self, rows: Array) -> Array:
        """The opposite of `rows`: in the layout and type of the weight."""
        shape = self.array.shape
        if affine_ops.outputs_come_first(self.node):
            return np.asarray(rows.reshape(shape), self.array.dtype)
        return np.asarray(rows.reshape(shape[::-1]).T, self.array.dtype)


@dataclass(frozen=True)
class RoundedWeights:
    """The weights that were rounded, by name."""

    # each weight on its steps; one in blocks as it is stored.
    arrays: Mapping[str, Array | Stored] = field(default_factory=dict)
    # of the plan, with the ranges that the steps belong to
    entries: Mapping[str, QuantValue] = field(default_factory=dict)

    def with_others(self, other: RoundedWeights) -> RoundedWeights:
        """These weights and those of another repair."""
        return RoundedWeights({**self.arrays, **other.arrays}, {**self.entries, **other.entries})


def round_weights(
    model: ir.Model,
    plan: QuantPlan,
    feeds: Callable[[], Iterable[Feed]],
    held_out: Sequence[Feed] = (),
    *,
    blocks: bool = False,
) -> RoundedWeights:
    """Chooses ranges and steps in layers with a stored weight on their right side that nothing else reads.

    Those of a ConvTranspose stay as they are.

    Args:
        feeds: gives samples by input name, at each call from the first on.
        held_out: other samples: a weight keeps the plan's range and the nearest steps where these lose by the choice.
        blocks: round the weights in blocks, by GPTQ; else those in int8, by AdaRound.
    """
    arrays: dict[str, Array | Stored] = {}
    entries: dict[str, QuantValue] = {}
    # A layer whose moments alone are too large keeps its nearest steps.
    solvable = [layer for layer in layers_of(model, plan, blocks=blocks) if _moment_bytes(layer) <= MOST_BYTES]
    for layers in packed(solvable, _moment_bytes, MOST_BYTES):
        moments = _moments(model, layers, feeds())
        solved: dict[QuantizedLayer, tuple[Array | Stored, QuantValue, Numbers]] = {}
        for layer in layers:
            # Without samples there is nothing to choose by.
            total, count = moments.pop(layer.weight.name, (np.zeros(1, np.float32), 0))
            if not total.any() or not np.isfinite(total).all():
                continue
            if blocks:
                stored = gptq.round_weight(layer.rows[0], total[0], layer.weight.block, layer.weight.dtype)
                array = stored if affine_ops.outputs_come_first(layer.node) else stored.transposed()
                entry = dataclasses.replace(layer.weight, calibrator="gptq")
                solved[layer] = array, entry, stored.dequantized()[None]
            else:
                scales = _scales(layer, total)
                rows = _solved(layer, scales, total, count)
                numbers = tuple(shortest(scale) for scale in scales.reshape(-1))
                amax = LEVELS * float(scales.max())
                entry = dataclasses.replace(layer.weight, scales=numbers, amax=amax, calibrator="adaround")
                solved[layer] = layer.stored(rows), entry, rows
        # What is fitted to few samples may lose on others.
        worse = _worse(model, {layer: rows for layer, (_, _, rows) in solved.items()}, held_out)
        for layer, (weight, entry, _) in solved.items():
            if layer not in worse:
                arrays[layer.weight.name] = weight
                entries[layer.weight.name] = entry
    return RoundedWeights(arrays, entries)


def _worse(model: ir.Model, solved: Mapping[QuantizedLayer, Numbers], held_out: Sequence[Feed]) -> set[QuantizedLayer]:
    """The layers whose outputs on held-out samples are nearer to the float ones with the nearest steps."""
    differences: dict[QuantizedLayer, tuple[Numbers, Numbers]] = {}
    for layer, chosen in solved.items():
        exact = layer.rows.astype(np.float32)
        if layer.weight.block:
            nearest = in_blocks(layer.rows[0], 1, layer.weight.block, layer.weight.dtype).dequantized()[None]
        else:
            scale = np.array(layer.weight.scales, np.float32)
            if scale.size > 1:
                scale = scale.reshape(*exact.shape[:2], 1)
            nearest = np.clip(np.rint(exact / scale), -LEVELS, LEVELS) * scale
        differences[layer] = nearest - exact, chosen - exact
    errors = {layer: np.zeros(2) for layer in solved}
    for layer, rows in _inputs(model, list(solved), held_out):
        for index, difference in enumerate(differences[layer]):
            for group in range(rows.shape[1]):
                errors[layer][index] += np.square(rows[:, group] @ difference[group].T).sum()
    return {layer for layer, (nearest_error, chosen_error) in errors.items() if nearest_error < chosen_error}


def layers_of(model: ir.Model, plan: QuantPlan, *, blocks: bool) -> list[QuantizedLayer]:
    """The layers whose int8 weight, or weight in blocks, can be rounded by what calibration feeds them."""
    work = copied(model)
    nodes = {first_output(node): node for node in work.graph}
    activations: dict[tuple[str, int], QuantValue] = {}
    for item in plan.values:
        if item.role == "activation" and item.dtype in ("int8", "uint8"):
            activations.update(dict.fromkeys(item.readers, item))
    layers: list[QuantizedLayer] = []
    # A weight that is stored in two types has two entries.
    entries = Counter(item.name for item in plan.values)
    for item in plan.values:
        if item.role != "weight" or len(item.readers) != 1 or entries[item.name] > 1:
            continue
        is_of_repair = item.dtype == "int8"
        if blocks:
            is_of_repair = item.block > 0
        if not is_of_repair:
            continue
        reader, index = item.readers[0]
        node = nodes[reader]
        if index != 1 or node.op_type not in ("Conv", "Gemm", "MatMul") or node.attributes.get_int("transA", 0) == 1:
            continue
        array = weight_of(node.inputs[1])
        source = node.inputs[0]
        # SAME pads by the size of the input, which differs from run to run.
        padded = node.attributes.get_string("auto_pad", "NOTSET")
        is_matrix = array is not None and array.ndim == 2
        if array is None or source is None or constant(source) is not None or padded not in ("NOTSET", "VALID"):
            continue
        if node.op_type == "Conv" or is_matrix:
            layers.append(QuantizedLayer(node, item, array, source.name or "", activations.get((reader, 0))))
    return layers


def _moment_bytes(layer: QuantizedLayer) -> int:
    """Memory of the second moments of what a layer reads, in float32."""
    groups, _, inputs = layer.rows.shape
    return int(4 * groups * inputs**2)


def _moments(model: ir.Model, layers: list[QuantizedLayer], feeds: Iterable[Feed]) -> dict[str, tuple[Numbers, int]]:
    """By weight: the sum of x xᵀ over rows of what the layer reads, (groups, inputs, inputs), and how many rows."""
    moments: dict[str, tuple[Numbers, int]] = {}
    for layer, rows in _inputs(model, layers, feeds):
        count, groups = rows.shape[:2]
        # One product for each group: an einsum over all groups would copy all windows.
        sums = np.stack([rows[:, group].T @ rows[:, group] for group in range(groups)])
        previous_sums, previous_count = moments.get(layer.weight.name, (np.zeros_like(sums), 0))
        moments[layer.weight.name] = previous_sums + sums, previous_count + count
    return moments


def _inputs(
    model: ir.Model, layers: Sequence[QuantizedLayer], feeds: Iterable[Feed]
) -> Iterator[tuple[QuantizedLayer, Numbers]]:
    """For each feed and layer: what the layer multiplies its weights with, as it is quantised."""
    for layer, data in values_read(model, layers, feeds):
        if layer.activation is not None:
            data, _ = qdq.fake_quantized(data, layer.activation)
        rows = _windows(layer, data)
        # One NaN would spoil all sums of the layer.
        yield layer, rows[np.isfinite(rows).all(axis=(1, 2))]


def values_read(
    model: ir.Model, layers: Sequence[QuantizedLayer], feeds: Iterable[Feed]
) -> Iterator[tuple[QuantizedLayer, Numbers]]:
    """What each layer reads, for each feed."""
    session = OnnxRuntime(few_runs=True).open(model, list(dict.fromkeys(layer.source for layer in layers)))
    for feed in feeds:
        values = {**feed, **session.run(feed)}
        for layer in layers:
            yield layer, np.asarray(values[layer.source], np.float32)


def _windows(layer: QuantizedLayer, data: Numbers) -> Numbers:
    """What a layer multiplies its weights with, at evenly spread positions: (positions, groups, inputs)."""
    if layer.node.op_type != "Conv":
        rows = data.reshape(-1, 1, data.shape[-1])
        return rows[_spread(len(rows), rows.shape[2])]
    spatial = data.ndim - 2
    node = layer.node
    kernel = layer.array.shape[2:]
    pads = list(node.attributes.get_ints("pads") or (0,) * 2 * spatial)
    strides = node.attributes.get_ints("strides") or (1,) * spatial
    dilations = node.attributes.get_ints("dilations") or (1,) * spatial
    both_ends = zip(pads[:spatial], pads[spatial:], strict=True)
    data = np.pad(data, ((0, 0), (0, 0), *both_ends))
    extents = tuple((size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True))
    axes = tuple(range(2, 2 + spatial))
    # Views, not copies: neighbouring windows overlap.
    views = np.lib.stride_tricks.sliding_window_view(data, extents, axes)
    at_strides = tuple(slice(None, None, step) for step in strides)
    inside = tuple(slice(None, None, step) for step in dilations)
    kept = (slice(None), slice(None), *at_strides, *inside)
    views = views[kept]
    shape = (views.shape[0], *views.shape[2 : 2 + spatial])
    positions = _spread(int(np.prod(shape)), data.shape[1] * int(np.prod(kernel)))
    windows: Numbers = np.moveaxis(views, 1, 1 + spatial)[np.unravel_index(positions, shape)]
    return windows.reshape(len(positions), layer.groups, -1)


def _spread(count: int, width: int) -> npt.NDArray[np.int64]:
    """Evenly spread numbers below `count`: as many rows of this width as the bounds admit."""
    most = max(1, min(count, MOST_ROWS, MOST_ELEMENTS // max(width, 1)))
    return np.linspace(0, count - 1, most).astype(np.int64)


def _scales(layer: QuantizedLayer, moments: Numbers) -> Numbers:
    """One scale for each output channel, or one for all where the plan has one."""
    rows = layer.rows.astype(np.float32)
    powers = np.einsum("gkk->gk", moments)[:, None]
    planned = np.array(layer.weight.scales, np.float32)
    by_output = planned.size == rows.shape[0] * rows.shape[1]
    best = np.full(planned.shape, np.inf)
    chosen = planned
    for end in ENDS:
        scale = planned * end
        if by_output:
            scale = scale.reshape(*rows.shape[:2], 1)
        error = rows - np.clip(np.rint(rows / scale), -LEVELS, LEVELS) * scale
        noise = (np.square(error) * powers).sum(axis=2).reshape(-1)
        if not by_output:
            noise = noise.sum(keepdims=True)
        chosen = np.where(noise < best, planned * end, chosen)
        best = np.minimum(noise, best)
    return np.asarray(chosen, np.float32)


def _solved(layer: QuantizedLayer, scales: Numbers, moments: Numbers, count: int) -> Numbers:
    """The rounded weights, (groups, outputs, inputs). No change of a single weight lowers the error of the layer."""
    rows = layer.rows.astype(np.float32)
    groups, outputs, inputs = rows.shape
    scale = np.broadcast_to(scales.reshape(-1, 1), (groups * outputs, 1)).reshape(groups, outputs, 1)
    # Shrinkage: with few rows the correlations of the inputs are estimated badly, so they are scaled towards 0. The
    # diagonal (the power of each input) keeps its value.
    shrinkage = count / (count + inputs)
    second = moments / count * shrinkage
    diagonal = np.einsum("gkk->gk", moments) / count
    np.einsum("gkk->gk", second)[...] = diagonal
    exact = rows / scale
    low = np.clip(np.floor(exact), -LEVELS, LEVELS)
    high = np.clip(low + 1, -LEVELS, LEVELS)
    steps = np.clip(np.rint(exact), -LEVELS, LEVELS)
    # Half of the gradient of the error by each weight, in steps; kept up to date with each change.
    pull = (steps - exact) @ second
    for _ in range(SWEEPS):
        changes = 0
        for k in range(inputs):
            move = low[:, :, k] + high[:, :, k] - 2 * steps[:, :, k]
            gain = move * (2 * pull[:, :, k] + move * second[:, None, k, k])
            # Smaller gains are rounding of float32, and could move a weight back and forth.
            group, output = np.nonzero(gain < -1e-6 * second[:, None, k, k])
            if not len(group):
                continue
            step = move[group, output]
            steps[group, output, k] += step
            pull[group, output] += step[:, None] * second[group, k]
            changes += len(group)
        if not changes:
            break
    return np.asarray(steps * scale, np.float32)


def with_scales(plan: QuantPlan, scales: Mapping[str, QuantValue]) -> QuantPlan:
    """The plan in which weights have the scales of these entries, where they are cut along the same axis."""
    values: list[QuantValue] = []
    for item in plan.values:
        # In another format, or along another axis, the scales of the repair mean nothing.
        other = scales.get(item.name)
        if other is not None and (other.axis, other.dtype) == (item.axis, item.dtype):
            item = dataclasses.replace(item, scales=other.scales, amax=other.amax, calibrator=other.calibrator)
        values.append(item)
    return QuantPlan(values=tuple(values), kept=plan.kept)
