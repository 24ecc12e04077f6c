"""The error of single layers by channel: which of them make it, and whether their values or weights stand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.comparison import Comparison
from layerline.compare.comparison_graph import joint
from layerline.graph.analysis.ir_queries import stored_tensor, values_by_name
from layerline.graph.fusion.affine_ops import rows as rows_by_output
from layerline.graph.io.ir_convert import as_ir
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff, Row, decibels

# The axis of an operator's result that counts its channels.
_AXES = dict.fromkeys(("Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "MaxPool"), 1)
_AXES |= dict.fromkeys(("Gemm", "MatMul", "LayerNormalization", "RMSNormalization"), -1)
# The result has the channels of what they read.
ELEMENTWISE = frozenset(("Add", "Cast", "Clip", "Div", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul"))
ELEMENTWISE |= {"PRelu", "Relu", "Sigmoid", "Sub", "Tanh"}
# How a column of two feeds is joined; the others are sums.
_JOINS = {"least": np.minimum, "peak": np.maximum, "greatest": np.maximum}


def channel_errors(
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Sequence[Feed],
    records: Sequence[LayerDiff],
    names: Mapping[str, str] | None = None,
    *,
    most: int | None = None,
) -> list[Row]:
    """A row for each channel of each layer, the worst channels of a layer first.

    `own_sqnr_db`, `max_abs` and `share` (of the layer's error) are with exact inputs, `sqnr_db` is cumulative, `least`
    and `greatest` are of the reference, and `weight_ratio` is the greatest weight over the median of all channels.

    Args:
        records: the rows of the layers in a comparison of the two models.
        names: as `compare` takes `pairs`.
        most: so many channels of a layer have a row at most.

    Returns:
        The rows. Without layers that hold no floats or have another shape in the candidate, and none where the two
        models can't share a graph.
    """
    reference = as_ir(reference)
    candidate = as_ir(candidate)
    runtime = OnnxRuntime(few_runs=True)
    comparison = Comparison(reference, candidate, names, True, runtime)
    by_name = {record.name: record for record in records}
    values = values_by_name(reference.graph)
    axes: dict[int, int] = {}
    for index, pair in enumerate(comparison.pairs):
        if pair.a in by_name and pair.is_float and pair.rank > 1:
            axes[index] = _axis(values[pair.a].producer(), pair.rank)
    if not axes or not comparison.one_graph:
        return []
    graph = joint(reference, candidate, comparison.pairs, measured=axes, axes=axes, isolated=True)
    totals: dict[str, Array] = {}
    try:
        session = runtime.open(graph)
        for feed in feeds:
            for name, array in session.run({key: feed[key] for key in session.inputs if key in feed}).items():
                if name in totals:
                    join = _JOINS.get(name.rpartition("/")[2], np.add)
                    array = join(totals[name], array)
                totals[name] = array
    except (StageError, ValueError):
        # Another shape in the candidate, or a number of channels that differs from feed to feed.
        return []
    rows: list[Row] = []
    for index, axis in axes.items():
        record = by_name[comparison.pairs[index].a]
        columns = {column: totals[f"{index}/{column}"] for column in ("aa", "ee", "own", "peak", "least", "greatest")}
        greatest_weights = _greatest_weights(values[record.name].producer(), len(columns["aa"]))
        rows += _rows(record, axis, columns, greatest_weights)[:most]
    return rows


def _rows(record: LayerDiff, axis: int, columns: Mapping[str, Array], greatest_weights: Array | None) -> list[Row]:
    error = float(columns["own"].sum())
    rows: list[Row] = []
    for channel in range(len(columns["aa"])):
        own, signal = float(columns["own"][channel]), float(columns["aa"][channel])
        row: Row = {"value": record.name, "module": record.module, "op": record.op, "axis": axis, "channel": channel}
        row["channels"] = len(columns["aa"])
        row["own_sqnr_db"] = decibels(signal, own)
        row["sqnr_db"] = decibels(signal, float(columns["ee"][channel]))
        row["share"] = None
        if error > 0 and np.isfinite(error):
            row["share"] = own / error
        row["max_abs"] = float(columns["peak"][channel])
        row["least"] = float(columns["least"][channel])
        row["greatest"] = float(columns["greatest"][channel])
        row["weight_ratio"] = None
        if greatest_weights is not None and np.median(greatest_weights) > 0:
            row["weight_ratio"] = float(greatest_weights[channel] / np.median(greatest_weights))
        rows.append(row)
    return sorted(rows, key=_place)


def _place(row: Row) -> tuple[float, float]:
    """Sorts the channels of a layer by SQNR, NaN before all others, and those without a signal by their error."""
    own = float(row["own_sqnr_db"] or 0.0)
    if np.isnan(own):
        own = -np.inf
    return own, -float(row["max_abs"] or 0.0)


def _axis(node: ir.Node | None, rank: int) -> int:
    """The axis of a value that counts its channels, from the operator behind it."""
    while node is not None and node.op_type in ELEMENTWISE:
        makers = [value.producer() for value in node.inputs if value is not None]
        node = next(filter(None, makers), None)
    if node is not None and node.op_type in _AXES:
        return _AXES[node.op_type] % rank
    # Images have their channels second, sequences and tables last.
    if rank > 3:
        return 1
    return rank - 1


def _greatest_weights(node: ir.Node | None, channels: int) -> Array | None:
    """The greatest magnitude of the weights of each output channel; None for a layer without a stored weight."""
    if node is None or node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return None
    tensor = stored_tensor(node.inputs[1])
    if tensor is None or len(tensor.shape) < 2 or not tensor.size:
        return None
    greatest: Array = np.abs(rows_by_output(node, tensor.numpy())).max(axis=1)
    if len(greatest) != channels:
        return None
    return greatest
