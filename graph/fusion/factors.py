"""Products as people write them in any order: x * 0.5 * (1 + erf(x / 1.414)) has four spellings and one meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from layerline.graph.analysis.ir_queries import parent, scalar

# Constants are compared in the precision they are stored in.
_CLOSE = {ir.DataType.FLOAT: 1e-6, ir.DataType.DOUBLE: 1e-6, ir.DataType.FLOAT16: 2e-3, ir.DataType.BFLOAT16: 1e-2}


@dataclass(frozen=True)
class Product:
    """A number times values.

    Attributes:
        number: the product of all scalar constants in it.
        values: the other factors.
        nodes: the Mul, Div and Neg nodes that it was taken apart from.
    """

    number: float
    values: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]


def product(value: ir.Value | None) -> Product:
    """`value` taken apart into factors as far as Mul and Div by constants go."""
    if value is None:
        return Product(math.nan, (), ())
    number = scalar(value)
    if number is not None:
        return Product(number, (), ())
    node = parent(value, "Mul", "Div")
    if node is None:
        return Product(1.0, (value,), ())
    if node.op_type == "Div":
        divisor = scalar(node.inputs[1])
        # A divisor that is computed makes the quotient a factor of its own.
        if divisor is None or divisor == 0:
            return Product(1.0, (value,), ())
        inner = product(node.inputs[0])
        return Product(inner.number / divisor, inner.values, (*inner.nodes, node))
    a = product(node.inputs[0])
    b = product(node.inputs[1])
    return Product(a.number * b.number, a.values + b.values, (*a.nodes, *b.nodes, node))


def close(a: float | None, b: float, of: ir.Value | None) -> bool:
    """Whether two constants are the same in the precision of a value's type."""
    if a is None:
        return False
    tolerance = 0.0
    if of is not None and of.dtype is not None:
        tolerance = _CLOSE.get(of.dtype, 0.0)
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
