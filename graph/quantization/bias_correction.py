"""Bias correction: what quantisation adds to a channel on average is taken off the layer's bias.

After M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), with the
mean error measured on samples. Only stored biases change, so the result costs nothing at run time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.light import Light
from layerline.graph.analysis.fresh_names import FreshNames
from layerline.graph.io.ir_convert import from_ir, to_ir
from layerline.graph.quantization.naming import first_output
from layerline.graph.quantization.weight_sources import drop_unread, weight_of

_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")


def correct(model: Light, shifts: Mapping[str, npt.NDArray[np.float64]]) -> tuple[Light, int]:
    """A copy of a quantised model with corrected biases, and how many were corrected.

    Args:
        shifts: the mean error of each output channel, by the layer's first output. A MatMul has a bias where an Add of
            one number for each channel follows it; without one it stays as it is.
    """
    work = to_ir(model)
    names, done = FreshNames(work), 0
    for node in list(work.graph):
        shift = shifts.get(first_output(node))
        if shift is not None and shift.any():
            done += _correct(work.graph, names, node, shift)
    return from_ir(work), done


def _correct(graph: ir.Graph, names: FreshNames, node: ir.Node, shift: npt.NDArray[np.float64]) -> bool:
    holder, place = (node, 2) if node.op_type in _WITH_BIAS else _added(node)
    if holder is None or (node.op_type == "Gemm" and node.attributes.get_float("beta", 1.0) != 1.0):
        return False
    old = holder.inputs[place] if len(holder.inputs) > place else None
    bias = weight_of(old)
    if old is not None and (bias is None or bias.reshape(-1).size != shift.size):
        return False
    kind = old.dtype if old is not None else node.inputs[0].dtype if node.inputs[0] is not None else None
    dtype = np.dtype(np.float32) if kind is None else kind.numpy()
    shape = shift.shape if bias is None else bias.shape
    wide = np.zeros(shape) if bias is None else bias.astype(np.float64)
    name = names.fresh(f"{first_output(node)}/bias")
    tensor = ir.tensor((wide - shift.reshape(shape)).astype(dtype), name=name)
    made = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(made)
    if len(holder.inputs) <= place:
        holder.resize_inputs(place + 1)
    holder.replace_input_with(place, made)
    if old is not None:
        drop_unread(old)
    return True


def _added(node: ir.Node) -> tuple[ir.Node | None, int]:
    """The Add behind a product that adds a constant to each channel, and which of its inputs that is."""
    output = node.outputs[0]
    uses = list(output.uses())
    if node.op_type != "MatMul" or len(uses) != 1 or output.is_graph_output() or uses[0].node.op_type != "Add":
        return None, 0
    place = 1 - uses[0].idx
    bias = weight_of(uses[0].node.inputs[place])
    if bias is None or bias.ndim == 0 or bias.shape[-1] != bias.size:
        return None, 0
    return uses[0].node, place
