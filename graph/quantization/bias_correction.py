"""Bias correction: subtracts the mean error that quantisation causes in a channel from the layer's bias.

The mean errors are measured on samples, see `mean_errors`. Only stored biases change, so it costs nothing at run time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.calib.plan import QuantPlan, readers_of
from layerline.graph.analysis.ir_queries import FreshNames, add_initializer, copied, first_output, optional_input
from layerline.graph.quantization.channel_axes import output_rows
from layerline.graph.quantization.weight_sources import drop_unread, weight_of

_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")


def correct(model: ir.Model, shifts: Mapping[str, npt.NDArray[np.float64]]) -> tuple[ir.Model, int]:
    """Corrects the biases of a quantised model.

    Args:
        shifts: the mean error of each output channel, by the layer's first output. The bias of a MatMul is an Add after
            it, with one number per channel; without such an Add the MatMul stays as it is.

    Returns:
        A copy with corrected biases, and how many were corrected.
    """
    work = copied(model)
    names = FreshNames(work)
    corrected = 0
    for node in list(work.graph):
        shift = shifts.get(first_output(node))
        if shift is not None and shift.any() and _correct(work.graph, names, node, shift):
            corrected += 1
    return work, corrected


def axes(model: ir.Model, plan: QuantPlan) -> dict[str, int]:
    """The layers with a quantised input whose bias can be corrected, each with the axis of its channels."""
    readers = readers_of([value for value in plan.values if value.role == "activation" and not value.block])
    channel_axes: dict[str, int] = {}
    for node in model.graph:
        rows = output_rows(node)
        if first_output(node) not in readers or rows is None or _holder(node, len(rows)) is None:
            continue
        # A product has its channels along the last axis, a convolution behind the batch.
        axis = -1
        if node.op_type in ("Conv", "ConvTranspose"):
            axis = 1
        channel_axes[first_output(node)] = axis
    return channel_axes


def _holder(node: ir.Node, channels: int) -> tuple[ir.Node, int, npt.NDArray[np.float64]] | None:
    """The node that adds the bias of a layer, the position of the bias and its numbers; None where it can't be
    corrected. A layer without a bias has zeros."""
    holder: ir.Node | None = node
    place = 2
    if node.op_type not in _WITH_BIAS:
        holder, place = _bias_add(node)
    # Gemm multiplies its bias by beta.
    if holder is None or (node.op_type == "Gemm" and node.attributes.get_float("beta", 1.0) != 1.0):
        return None
    old = optional_input(holder, place)
    if old is None:
        return holder, place, np.zeros(channels)
    bias = weight_of(old)
    # A bias of another size is stretched over the channels, or is computed.
    if bias is None or bias.size != channels:
        return None
    return holder, place, bias.astype(np.float64)


def _correct(graph: ir.Graph, names: FreshNames, node: ir.Node, shift: npt.NDArray[np.float64]) -> bool:
    held = _holder(node, shift.size)
    if held is None:
        return False
    holder, place, wide = held
    old = optional_input(holder, place)
    # A new bias has the type of what the layer reads.
    source = old if old is not None else node.inputs[0]
    dtype = np.dtype(np.float32)
    if source is not None and source.dtype is not None:
        dtype = source.dtype.numpy()
    corrected = (wide - shift.reshape(wide.shape)).astype(dtype)
    new = add_initializer(graph, names.fresh(f"{first_output(node)}/bias"), corrected)
    if len(holder.inputs) <= place:
        holder.resize_inputs(place + 1)
    holder.replace_input_with(place, new)
    if old is not None:
        drop_unread(old)
    return True


def _bias_add(node: ir.Node) -> tuple[ir.Node | None, int]:
    """The Add after a MatMul that adds a constant to each channel, and the position of that constant."""
    output = node.outputs[0]
    uses = list(output.uses())
    if node.op_type != "MatMul" or len(uses) != 1 or output.is_graph_output() or uses[0].node.op_type != "Add":
        return None, 0
    place = 1 - uses[0].idx
    bias = weight_of(uses[0].node.inputs[place])
    if bias is None or bias.ndim == 0 or bias.shape[-1] != bias.size:
        return None, 0
    return uses[0].node, place
