"""Along which axis the scales of a weight run, and where channels would have to share scales that do not fit them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import dim
from layerline.graph.quantization.weight_sources import weight_of

# Output channels that share a scale may differ this much in size: the smallest loses two of its eight bits.
_CHANNEL_MAX_RATIO = 4.0


def channel_axis(node: ir.Node) -> int | None:
    """The output-channel dimension of the weight, input 1; None where one scale has to do for the whole weight."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        depthwise = _groups(node) > 1 and dim(node.inputs[1], 0) == _groups(node)
        return 0 if depthwise else 1
    if node.op_type == "Gemm":
        transposed = node.attributes.get_int("transB", 0)
        return 0 if transposed else 1
    # onnxruntime's MatMulInteger takes one scale per channel only for weights with two axes. It fails to load others.
    weight = weight_of(node.inputs[1])
    if weight is None or weight.ndim != 2:
        return None
    return 1


def summed_axis(node: ir.Node) -> int | None:
    """The dimension of the weight, input 1 of a Gemm or MatMul, that a product sums over; None unless it has two."""
    axis = channel_axis(node)
    return None if axis is None else 1 - axis


def uneven(node: ir.Node) -> str:
    """Why channels would have to share an integer scale that does not fit them; empty where none does."""
    return _uneven_groups(node) or _uneven_stack(node)


def _groups(node: ir.Node) -> int:
    groups: int = node.attributes.get_int("group", 1)
    return groups


def shared_scales(node: ir.Node) -> str:
    """The remark on a grouped ConvTranspose, whose axis 1 holds one output channel of every group."""
    if node.op_type != "ConvTranspose" or _groups(node) == 1 or channel_axis(node) != 1:
        return ""
    return f", each scale shared by its {_groups(node)} groups"


def _uneven_groups(node: ir.Node) -> str:
    """Why a grouped ConvTranspose stays float: output channels that would share a scale differ too much in size."""
    weight = weight_of(node.inputs[1])
    if not shared_scales(node) or weight is None or weight.shape[0] % _groups(node):
        return ""
    grouped = np.abs(weight.astype(np.float64)).reshape(_groups(node), -1, *weight.shape[1:])
    greatest = grouped.max(axis=(1, *range(3, grouped.ndim)), initial=0.0)  # (groups, outputs / group)
    ratio = max((_spread(channels) for channels in greatest.T), default=1.0)
    if ratio <= _CHANNEL_MAX_RATIO:
        return ""
    return f"its {_groups(node)} groups would share scales along axis 1, and their channels differ {ratio:.3g} times"


def _uneven_stack(node: ir.Node) -> str:
    """Why a product with a stack of matrices stays float: its channels would share one scale and differ too much."""
    weight = weight_of(node.inputs[1])
    if node.op_type != "MatMul" or weight is None or weight.ndim < 3:
        return ""
    ratio = _spread(np.abs(weight.astype(np.float64)).max(axis=tuple(range(weight.ndim - 1)), initial=0.0))
    if ratio <= _CHANNEL_MAX_RATIO:
        return ""
    scales = f"its weight has {weight.ndim} axes, for which onnxruntime takes one scale"
    return f"{scales}, and its channels differ {ratio:.3g} times"


def _spread(sizes: npt.NDArray[np.float64]) -> float:
    """How many times larger the greatest size is than the smallest above 0; 1 where there is none."""
    used = sizes[sizes > 0]
    return float(used.max() / used.min()) if used.size else 1.0
