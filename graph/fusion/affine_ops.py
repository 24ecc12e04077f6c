"""Conv, ConvTranspose, Gemm and MatMul as one thing: an affine map whose output channels can be scaled and shifted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, name_of, optional_input, rank
from layerline.graph.fusion.firing import Declined

OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Linear:
    """A node y = W x + b with constant W and b.

    Attributes:
        weight: W as stored.
        bias: b per output channel, with Gemm's beta applied; zeros where the node has none.
        rank: dimensions of y.
        axis: axis of y that holds the output channels.
    """

    node: ir.Node
    weight: Array
    bias: Array
    rank: int
    axis: int

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return int(self.bias.size)

    def per_channel(self, array: Array, name: str) -> Array:
        """`array` as one number per output channel, where broadcasting it against y means just that.

        Raises Declined: it varies along another axis, or broadcasting it would change the shape of y.
        """
        if array.ndim <= self.rank:
            shape = (1,) * (self.rank - array.ndim) + array.shape
            rest = shape[: self.axis] + shape[self.axis + 1 :]
            if all(size == 1 for size in rest) and shape[self.axis] in (1, self.channels):
                return np.broadcast_to(array.reshape(-1).astype(np.float64), (self.channels,))
        raise Declined(
            f"{name} of shape {array.shape} is not one number per channel of {self.node.op_type} output "
            f"{self.node.outputs[0].name} ({self.channels} channels on axis {self.axis} of {self.rank})"
        )

    def scaled(self, tape: Tape, scale: Array, shift: Array, tag: str) -> ir.Value:
        """A new node's output: scale * y + shift, one number per channel each (float64). May raise Declined."""
        node = self.node
        if node.op_type == "MatMul" and (shift.any() or self.bias.any()) and self.rank != 2:
            raise Declined(f"MatMul {node.outputs[0].name} has rank {self.rank} and takes no bias")
        weight = None
        # A weight that stays as it is may be shared, and a copy in a body would be stored beside it.
        if (scale != 1).any():
            # In float64, so that each weight is rounded once.
            weight = np.multiply(self.weight, self.along_outputs(scale), dtype=np.float64)
        return self.with_weights(tape, weight, self.bias * scale + shift, tag)

    def with_weights(self, tape: Tape, weight: Array | None, bias: Array, tag: str) -> ir.Value:
        """The output of a node like this one with another weight (None keeps it) and bias, both float64.

        May raise Declined.
        """
        node = self.node
        bias = self._stored(bias, self.bias, "bias")
        stem = name_of(node.inputs[1])
        inputs = list(node.inputs[:2])
        if weight is not None:
            stored = self._stored(weight, self.weight, "weight")
            inputs[1] = tape.initializer(ir.tensor(stored), f"{stem}/{tag}")
        attributes = dict(node.attributes)
        # The bias that was read has it in it already.
        attributes.pop("beta", None)
        if optional_input(node, 2) is not None or bias.any():
            inputs.append(tape.initializer(ir.tensor(bias), f"{stem}/{tag}_bias"))
        if node.op_type == "MatMul" and len(inputs) == 3:
            return tape.op("Gemm", inputs, attributes)
        return tape.op(node.op_type, inputs, attributes)

    def _stored(self, exact: Array, old: Array, name: str) -> Array:
        """`exact` in the weights' type."""
        where = f"{name} of {self.node.op_type} {self.node.outputs[0].name}"
        dtype = self.weight.dtype
        limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        with np.errstate(over="ignore", invalid="ignore"):
            new = exact.astype(dtype)
            magnitudes = np.abs(new)
            is_finite = magnitudes.max(initial=0.0) < np.inf
            least = magnitudes.min(initial=np.inf)
        if not is_finite:
            if np.isfinite(exact).all() or np.isfinite(old.astype(np.float64)).all():
                raise Declined(f"{where} would overflow {dtype}")
        # Below the normal numbers of a type rounding takes more of a number, and at last all of it.
        elif least < float(limits.smallest_normal):
            rounding = np.linalg.norm(new.astype(np.float64) - exact)
            # As much as the proof takes for rounding (LEAST in verify_rewrites.py).
            if rounding > 4 * float(limits.eps) * np.linalg.norm(exact):
                raise Declined(f"{where} would be too small for {dtype}")
        return new

    def along_outputs(self, scale: Array) -> Array:
        """`scale` in a shape that multiplies the weight of each output channel."""
        weight = self.weight
        if self.node.op_type == "ConvTranspose":
            # W is (inputs, outputs / groups, ...): the inputs of group g belong to the outputs of group g.
            groups = self.node.attributes.get_int("group", 1)
            each = scale.reshape(groups, 1, -1).repeat(weight.shape[0] // groups, axis=1)
            return each.reshape(weight.shape[0], -1, *(1,) * (weight.ndim - 2))
        if outputs_come_first(self.node):
            return scale.reshape(-1, *(1,) * (weight.ndim - 1))
        return scale.reshape(1, -1)


def behind(value: ir.Value | None) -> Linear | None:
    """The linear node with a constant weight that computes `value`, if any; Declined where its bias is computed."""
    if value is None:
        return None
    node = value.producer()
    if node is None or node.domain != "" or node.op_type not in OPS:
        return None
    weight = constant(node.inputs[1])
    if weight is None or weight.dtype.kind not in "fV" or weight.ndim < 2:
        return None
    out_rank, channels = _outputs(node, weight)
    if out_rank is None:
        return None
    # Channels lie behind the batch, but a MatMul makes them the last axis.
    axis = out_rank - 1 if node.op_type == "MatMul" else 1
    linear = Linear(node, weight, np.zeros(channels), out_rank, axis)
    bias_value = optional_input(node, 2)
    if bias_value is None:
        return linear
    bias = constant(bias_value)
    if bias is None:
        raise Declined(f"bias {bias_value.name} of {node.op_type} {node.outputs[0].name} is computed")
    beta = 1.0
    if node.op_type == "Gemm":
        beta = node.attributes.get_float("beta", 1.0)
        # 0 * inf would be NaN, which the runtime does not compute.
        if beta == 0 and not np.isfinite(bias.astype(np.float64)).all():
            name = node.outputs[0].name
            raise Declined(f"bias {bias_value.name} of Gemm {name} is not finite, and beta = 0 leaves it out")
    else:
        # A Conv's bias has one number per channel and no axes for the pixels.
        bias = bias.reshape(-1, *(1,) * (out_rank - 2))
    return Linear(node, weight, beta * linear.per_channel(bias, f"bias {bias_value.name}"), out_rank, axis)


def _outputs(node: ir.Node, weight: Array) -> tuple[int | None, int]:
    """Rank of the output and number of output channels."""
    if node.op_type == "ConvTranspose":
        return weight.ndim, weight.shape[1] * node.attributes.get_int("group", 1)
    channels = weight.shape[0] if outputs_come_first(node) else weight.shape[-1]
    if node.op_type != "MatMul":
        return weight.ndim, channels
    input_rank = rank(node.inputs[0])
    # Weights of more axes differ from matrix to matrix; an input of one axis loses it.
    if weight.ndim != 2 or input_rank is None or input_rank < 2:
        return None, channels
    return input_rank, channels


def outputs_come_first(node: ir.Node) -> bool:
    """Whether the weight of a Conv, Gemm or MatMul has the output channels on its first axis; else on its last."""
    return node.op_type == "Conv" or bool(node.attributes.get_int("transB", 0))


def rows(node: ir.Node, weight: Array) -> Array:
    """The weights of each output channel of a Conv, ConvTranspose, Gemm or MatMul, as the rows of a matrix."""
    if node.op_type == "ConvTranspose":
        # (inputs, outputs / group, ...): the inputs of a group stand together.
        groups = node.attributes.get_int("group", 1)
        grouped = weight.reshape(groups, len(weight) // groups, *weight.shape[1:]).swapaxes(1, 2)
        weight = grouped.reshape(groups * weight.shape[1], len(weight) // groups, *weight.shape[2:])
    elif not outputs_come_first(node):
        weight = np.moveaxis(weight, -1, 0)
    # Not -1: numpy can't work it out for a layer without outputs.
    return weight.reshape(len(weight), math.prod(weight.shape[1:]))
