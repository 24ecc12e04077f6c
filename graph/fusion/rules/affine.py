"""Multiplying or adding constants into the linear op before it.

Per output channel where the two are adjacent. A single number also where only Reshapes and Transposes lie between (the
1/sqrt(d) of attention): those are made again behind the scaled op.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import Array, constant, parent, rank
from layerline.graph.fusion import affine_ops
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole

MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
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
            moves = _moves(value)
        # The values between the linear op and this node, last first, each with its reader.
        path: list[tuple[ir.Value | None, ir.Node]] = [(value, node)]
        path += [(move.inputs[0], move) for move in moves]
        before = affine_ops.behind(path[-1][0])
        if before is None:
            continue
        # 1 / (Wx + b) is not affine in x.
        if node.op_type == "Div" and side == 1:
            raise Declined(f"{node.outputs[0].name} divides a constant by {before.node.op_type} output {value.name}")
        for read, reader in path:
            sole(read, reader)
        each = before.per_channel(amount, f"constant {other.name}")
        scale, shift = _affine(node.op_type, side, each)
        out = before.scaled(tape, scale, shift, node.op_type.lower())
        for move in reversed(moves):
            out = tape.op(move.op_type, [out, *move.inputs[1:]], move.attributes)
        return out
    return None


def _moves(value: ir.Value) -> list[ir.Node]:
    """The nodes before `value`, last first, that only move elements about."""
    moves: list[ir.Node] = []
    node = parent(value, *MOVES)
    while node is not None and node.inputs[0] is not None:
        moves.append(node)
        node = parent(node.inputs[0], *MOVES)
    return moves


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


RULE = on(
    "affine", "constant Mul, Div, Add and Sub into the linear op before them", ["Mul", "Div", "Add", "Sub"], rewrite
)
