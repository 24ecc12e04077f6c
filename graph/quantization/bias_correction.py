"""Bias correction: subtracts the mean error that quantisation causes in a channel from the layer's bias.

After M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), with the
mean error measured on samples. Only stored biases change, so the result costs nothing at run time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import FreshNames, add_initializer, copied, first_output, optional_input
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


def _correct(graph: ir.Graph, names: FreshNames, node: ir.Node, shift: npt.NDArray[np.float64]) -> bool:
    holder: ir.Node | None = node
    place = 2
    if node.op_type not in _WITH_BIAS:
        holder, place = _bias_add(node)
    # Gemm multiplies its bias by beta.
    if holder is None or (node.op_type == "Gemm" and node.attributes.get_float("beta", 1.0) != 1.0):
        return False
    old = optional_input(holder, place)
    if old is None:
        # The new bias has the type of what the layer reads.
        source = node.inputs[0]
        wide = np.zeros(shift.shape)
    else:
        source = old
        bias = weight_of(old)
        # A bias of another size is stretched over the channels, or is computed.
        if bias is None or bias.size != shift.size:
            return False
        wide = bias.astype(np.float64)
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
