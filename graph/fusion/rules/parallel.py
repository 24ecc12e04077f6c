"""Convolutions of one input that are added, as one: the branches that RepVGG, MobileOne and ACNet train with.

Conv(x, V) + Conv(x, W) = Conv(x, V + W) where both take the same steps and the smaller kernel fits into the larger one
at the place that its padding gives it. A BatchNormalization of x itself is a 1x1 convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, parent
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.affine_ops import Linear
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole
from layerline.graph.fusion.rules.linear import normalisation, refuse_training


@dataclass(frozen=True)
class _Kernel:
    """Weights (outputs, inputs / group, kernel …) and bias in float64, and how the kernel moves over the input.

    Attributes:
        begins: padding before each spatial axis.
        ends: padding behind it.
        steps: group and strides, which two kernels must share.
        dilations: those of each axis.
    """

    weight: Array
    bias: Array
    begins: list[int]
    ends: list[int]
    steps: tuple[int, ...]
    dilations: list[int]

    def margins(self, small: _Kernel) -> list[tuple[int, int]] | None:
        """How many elements of this kernel lie before and behind the other, by axis; None where that sticks out."""
        margins: list[tuple[int, int]] = []
        for axis, size in enumerate(small.weight.shape[2:]):
            covering = self.weight.shape[2 + axis]
            dilation = self.dilations[axis]
            # The distance between the elements of a kernel of one element means nothing.
            if size > 1 and small.dilations[axis] != dilation:
                return None
            # Element i reads the input at i * dilation - begin.
            offset, rest = divmod(self.begins[axis] - small.begins[axis], dilation)
            reach = self.ends[axis] - (covering - 1 - offset) * dilation
            # Both end where the same element of the input is the last one.
            if rest or offset < 0 or offset + size > covering or reach != small.ends[axis] - (size - 1) * dilation:
                return None
            margins.append((offset, covering - offset - size))
        return margins


@on("parallel-conv", "Add")
def convolutions(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    branches = [parent(value, "Conv", "BatchNormalization") for value in node.inputs]
    if branches[0] is None or branches[1] is None or branches[0].inputs[0] is not branches[1].inputs[0]:
        return None
    linears = [_convolution(branch) for branch in branches]
    kernels: list[_Kernel] = []
    for branch, linear in zip(branches, linears, strict=True):
        conv = linear or linears[0] or linears[1]
        if branch is None or conv is None:
            return None
        sole(branch.outputs[0], node)
        kernels.append(_kernel(linear) if linear else _identity(branch, conv))
    # Other numbers of channels would be broadcast against each other.
    if kernels[0].steps != kernels[1].steps or kernels[0].weight.shape[:2] != kernels[1].weight.shape[:2]:
        raise Declined(f"the branches of {node.outputs[0].name} differ in strides, groups or channels")
    for index, linear in enumerate(linears):
        large, small = kernels[index], kernels[1 - index]
        margins = large.margins(small)
        if linear is not None and margins is not None:
            weight = large.weight + np.pad(small.weight, [(0, 0), (0, 0), *margins])
            return linear.with_weights(tape, weight, large.bias + small.bias, "parallel")
    raise Declined(f"neither kernel of the branches of {node.outputs[0].name} covers the other")


def _convolution(branch: ir.Node | None) -> Linear | None:
    """A Conv with constant weights whose padding is written out."""
    if branch is None or branch.op_type != "Conv" or branch.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    return affine_ops.behind(branch.outputs[0])


def _kernel(linear: Linear) -> _Kernel:
    attributes = linear.node.attributes
    axes = linear.weight.ndim - 2
    pads = attributes.get_ints("pads", [0] * (2 * axes))
    return _Kernel(
        weight=linear.weight.astype(np.float64),
        bias=linear.bias,
        begins=list(pads[:axes]),
        ends=list(pads[axes:]),
        steps=(attributes.get_int("group", 1), *attributes.get_ints("strides", [1] * axes)),
        dilations=list(attributes.get_ints("dilations", [1] * axes)),
    )


def _identity(norm: ir.Node, conv: Linear) -> _Kernel:
    """A BatchNormalization as a 1x1 convolution in as many groups as the one beside it."""
    axes = conv.weight.ndim - 2
    group = conv.node.attributes.get_int("group", 1)
    inputs = conv.weight.shape[1]
    refuse_training(norm, f"BatchNormalization {norm.outputs[0].name}")
    scale, shift = normalisation(norm, inputs * group)
    weight = np.zeros((inputs * group, inputs))
    channels = np.arange(inputs * group)
    weight[channels, channels % inputs] = scale
    return _Kernel(
        weight=weight.reshape(*weight.shape, *[1] * axes),
        bias=shift,
        begins=[0] * axes,
        ends=[0] * axes,
        steps=(group, *[1] * axes),
        dilations=[1] * axes,
    )
