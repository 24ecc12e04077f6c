"""Along which axis the scales of a weight run, and where channels would have to share scales that do not fit them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import dim, optional_input
from layerline.graph.fusion import affine_ops
from layerline.graph.quantization.weight_sources import weight_of

# Output channels that share a scale may differ this much in size: the smallest loses two of its eight bits.
_CHANNEL_MAX_RATIO = 4.0


def channel_axis(node: ir.Node) -> int | None:
    """The output-channel dimension of the weight, input 1; None where one scale has to do for the whole weight."""
    if node.op_type == "ConvTranspose":
        # Its weight is (inputs, outputs / group, ...). A depthwise one has a group for each input channel; with other
        # groups no axis holds all output channels.
        depthwise = _groups(node) > 1 and dim(node.inputs[1], 0) == _groups(node)
        if depthwise:
            return 0
        return 1
    if node.op_type in ("Conv", "Gemm"):
        if affine_ops.outputs_come_first(node):
            return 0
        return 1
    # onnxruntime's MatMulInteger takes one scale per channel only for weights with two axes. It fails to load others.
    weight = weight_of(node.inputs[1])
    if weight is None or weight.ndim != 2:
        return None
    return 1


def summed_axis(node: ir.Node) -> int | None:
    """The dimension of the weight, input 1 of a Gemm or MatMul, that a product sums over; None unless it has two."""
    axis = channel_axis(node)
    if axis is None:
        return None
    return 1 - axis


def output_rows(node: ir.Node) -> npt.NDArray[Any] | None:
    """The weight, input 1, by the channel of the layer's output: (channels, weights of each); None for other nodes."""
    weight = weight_of(optional_input(node, 1))
    if node.op_type not in affine_ops.OPS or weight is None or weight.ndim < 2:
        return None
    # Of an invalid file: its inputs can't be shared out among the groups.
    if node.op_type == "ConvTranspose" and weight.shape[0] % _groups(node):
        return None
    return affine_ops.rows(node, weight)


def shared_scales(node: ir.Node) -> str:
    """The remark on a grouped ConvTranspose, whose axis 1 holds one output channel of every group."""
    if node.op_type != "ConvTranspose" or _groups(node) == 1 or channel_axis(node) != 1:
        return ""
    return f", each scale shared by its {_groups(node)} groups"


def uneven(node: ir.Node) -> str:
    """Why channels would have to share an integer scale that does not fit them; empty where none does."""
    weight, rows = weight_of(node.inputs[1]), output_rows(node)
    if weight is None or rows is None or not weight.size:
        return ""
    if shared_scales(node):
        # The channels with one index in all groups share a scale.
        why = f"its {_groups(node)} groups would share scales along axis 1"
        together = _groups(node)
    elif node.op_type == "MatMul" and weight.ndim > 2:
        why = f"its weight has {weight.ndim} axes, for which onnxruntime takes one scale"
        together = len(rows)
    else:
        return ""
    greatest = np.abs(rows.astype(np.float64)).max(axis=1, initial=0.0).reshape(together, -1)
    ratio = max((_ratio(sizes) for sizes in greatest.T), default=1.0)
    if ratio <= _CHANNEL_MAX_RATIO:
        return ""
    return f"{why}, and its channels differ {ratio:.3g} times"


def _groups(node: ir.Node) -> int:
    groups: int = node.attributes.get_int("group", 1)
    return groups


def _ratio(sizes: npt.NDArray[np.float64]) -> float:
    """How many times larger the greatest size is than the smallest above 0; 1 where there is none."""
    used = sizes[sizes > 0]
    if not used.size:
        return 1.0
    return float(used.max() / used.min())
