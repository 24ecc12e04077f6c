"""Products as people write them in any order: x * 0.5 * (1 + erf(x / 1.414)) has four spellings and one meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import parent, scalar

MOST_OPENED = 16
"""Mul and Div nodes that are taken apart at most: more than a written-out function has. A chain of n squares would have
2^n factors."""
# Constants are compared in the precision they are stored in.
_CLOSE = {ir.DataType.FLOAT: 1e-6, ir.DataType.DOUBLE: 1e-6, ir.DataType.FLOAT16: 2e-3, ir.DataType.BFLOAT16: 1e-2}


@dataclass(frozen=True)
class Product:
    """A number times values.

    Attributes:
        number: the product of all scalar constants in it.
        values: the other factors.
    """

    number: float
    values: tuple[ir.Value, ...]


def product(value: ir.Value | None) -> Product:
    """`value` taken apart into factors as far as Mul and Div by constants go."""
    number = 1.0
    values: list[ir.Value] = []
    opened = 0
    pending = [value]
    while pending:
        factor = pending.pop()
        if factor is None:
            return Product(math.nan, ())
        constant = scalar(factor)
        if constant is not None:
            number *= constant
            continue
        node = parent(factor, "Mul", "Div")
        divisor = scalar(node.inputs[1]) if node is not None and node.op_type == "Div" else None
        # A divisor that is computed makes the quotient a factor of its own.
        if node is None or opened == MOST_OPENED or (node.op_type == "Div" and not divisor):
            values.append(factor)
            continue
        opened += 1
        if divisor:
            number /= divisor
            pending.append(node.inputs[0])
        else:
            pending += [node.inputs[1], node.inputs[0]]
    return Product(number, tuple(values))


def close(a: float | None, b: float, of: ir.Value | None) -> bool:
    """Whether two constants are the same in the precision of a value's type."""
    if a is None:
        return False
    tolerance = _CLOSE.get(of.dtype, 0.0) if of is not None and of.dtype is not None else 0.0
    return bool(np.isclose(a, b, rtol=tolerance, atol=0.0))


def plus(value: ir.Value | None, amount: float) -> ir.Value | None:
    """x, where `value` is x + amount."""
    node = parent(value, "Add")
    if node is None:
        return None
    for side in (0, 1):
        if close(scalar(node.inputs[1 - side]), amount, value):
            return node.inputs[side]
    return None
