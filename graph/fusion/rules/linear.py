"""Constant arithmetic and BatchNormalization into the linear op before them.

A Mul, Div, Add or Sub goes in per output channel where the two are adjacent. A single number goes in also where only
Reshapes and Transposes lie between (the 1/sqrt(d) of attention): those are made again behind the scaled op.

y = gamma (Wx + b - mean) / sqrt(var + eps) + beta scales each output channel of W by gamma / sqrt(var + eps), in
float64, so that weights are rounded once. onnxscript's own rule ignores training mode and weights in Constant nodes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, name_of, parent, rank
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import move_shapes_behind, on, sole

MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")


@on("affine", "Mul", "Div", "Add", "Sub")
def affine(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    for side in (0, 1):
        value = node.inputs[side]
        other = node.inputs[1 - side]
        amount = constant(other)
        if amount is None or value is None or other is None:
            continue
        # Only one number for all elements stays the same wherever they are moved.
        is_single = amount.size == 1 and amount.ndim <= min(rank(value) or 0, 1)
        moves: list[ir.Node] = []
        if is_single and node.op_type in ("Mul", "Div"):
            # The nodes before this one, last first, that only move elements about.
            move = parent(value, *MOVES)
            while move is not None and move.inputs[0] is not None:
                moves.append(move)
                move = parent(move.inputs[0], *MOVES)
        # The values between the linear op and this node, last first, each with its reader.
        path: list[tuple[ir.Value | None, ir.Node]] = [(value, node)]
        path += [(move.inputs[0], move) for move in moves]
        before = affine_ops.behind(path[-1][0])
        if before is None:
            continue
        # 1 / (Wx + b) is not affine in x.
        if node.op_type == "Div" and side == 1:
            raise Declined(f"{node.outputs[0].name} divides a constant by {before.node.op_type} output {value.name}")
        each = before.per_channel(amount, f"constant {other.name}")
        if not moves:
            move_shapes_behind(value, node)
        for read, reader in path:
            sole(read, reader)
        scale, shift = _affine(node.op_type, side, each)
        out = before.scaled(tape, scale, shift, node.op_type.lower())
        for move in reversed(moves):
            out = tape.op(move.op_type, [out, *move.inputs[1:]], move.attributes)
        return out
    return None


def _affine(op: str, side: int, amount: Array) -> tuple[Array, Array]:
    """scale and shift of `y op amount` (side 0) or `amount op y` (side 1)."""
    one = np.ones_like(amount)
    zero = np.zeros_like(amount)
    if op == "Mul":
        return amount, zero
    if op == "Div":
        if not amount.all():
            raise Declined("it divides by zero")
        return 1.0 / amount, zero
    if op == "Add":
        return one, amount
    if side == 0:
        return one, -amount
    return -one, amount


@on("batchnorm", "BatchNormalization")
def batchnorm(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    before = affine_ops.behind(node.inputs[0])
    if before is None:
        return None
    where = f"BatchNormalization {node.outputs[0].name}"
    refuse_training(node, where)
    move_shapes_behind(node.inputs[0], node)
    # Whoever else reads the layer wants it without the normalisation.
    sole(node.inputs[0], node)
    if before.axis != 1:
        name = before.node.outputs[0].name
        raise Declined(f"{where} normalises axis 1, the channels of {name} lie on axis {before.axis}")
    scale, shift = normalisation(node, before.channels)
    return before.scaled(tape, scale, shift, "batchnorm")


def normalisation(node: ir.Node, channels: int) -> tuple[Array, Array]:
    """Scale and shift of a BatchNormalization that does not train: one float64 a channel each. May raise Declined."""
    where = f"BatchNormalization {node.outputs[0].name}"
    parameters: list[Array] = []
    for value in node.inputs[1:5]:
        parameter = constant(value)
        if parameter is None:
            raise Declined(f"{name_of(value) or 'a parameter'} of {where} is computed")
        if parameter.shape != (channels,):
            raise Declined(f"{name_of(value)} of {where} has shape {parameter.shape}, not {channels}")
        parameters.append(parameter.astype(np.float64))
    gamma, beta, mean, var = parameters
    spread = var + node.attributes.get_float("epsilon", 1e-5)
    if not (spread > 0).all():
        raise Declined(f"{where} divides by the root of a variance that is not above 0 ({spread.min()})")
    scale = gamma / np.sqrt(spread)
    return scale, beta - mean * scale


def refuse_training(node: ir.Node, where: str) -> None:
    if node.attributes.get_int("training_mode", 0):
        raise Declined(f"{where} is in training mode")
    if any(o.name for o in node.outputs[1:]):
        raise Declined(f"{where} gives batch statistics ({node.outputs[1].name}): it is in training mode")
