"""Sizes of axes as numbers or as text: the name of a symbolic size, or an expression such as "2*batch".

Two equal texts are the same number in every run. onnx_ir's SymbolicDim does the arithmetic, with sympy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import onnx_ir as ir
import sympy

Size = int | str
SymbolicShape = tuple[Size, ...]
IrDim = int | ir.SymbolicDim

NUMBER = "num__"
"""Begins the name of a number that the graph computes in a way that is not followed: it may be negative."""
_LONGEST = 200
_MOST_BRACKETS = 4
_NUMBER = re.compile(r"-?[0-9]+")
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


def sizes(value: ir.Value | None) -> SymbolicShape | None:
    """The shape of a value with a name for every size that has no number; None where not even the rank is known."""
    if value is None or value.shape is None:
        return None
    named: list[Size] = []
    for axis, dim in enumerate(value.shape):
        if isinstance(dim, int):
            named.append(dim)
        else:
            named.append(dim.value or f"{value.name}#{axis}")
    return tuple(named)


def is_size(item: IrDim | Size) -> bool:
    """Whether an element of an integer tensor is certainly not negative."""
    return item >= 0 if isinstance(item, int) else NUMBER not in str(item)


def product(dims: Iterable[IrDim]) -> Size:
    """The product of sizes, in the one form that equal products have in common."""
    total: IrDim = 1
    for dim in dims:
        total = total * dim
    return size_of(simplified(total) or total)


def broadcast(shapes: Sequence[Sequence[IrDim]]) -> list[IrDim | None]:
    """The shape that shapes are stretched to; None for an axis where two names meet, either of which may be 1."""
    result: list[IrDim | None] = []
    for aligned in zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1):
        distinct = list(dict.fromkeys(size for size in aligned if size != 1))
        numbers = [size for size in distinct if isinstance(size, int)]
        if not distinct:
            result.append(1)
        elif len(distinct) == 1:
            result.append(distinct[0])
        # A number other than 1 decides, or the operator fails.
        elif numbers:
            result.append(numbers[0])
        else:
            result.append(None)
    return result[::-1]


def size_of(dim: IrDim) -> Size:
    """A number, or the text of a symbolic size."""
    return dim if isinstance(dim, int) else str(dim.value)


def simplified(dim: IrDim) -> IrDim | None:
    """A dimension with a plain number where its expression comes to one; None for what is no size or too involved."""
    if isinstance(dim, int):
        return dim
    text = dim.value or ""
    # sympy's time grows with the expression, and a network nests a rounding for each of its strides.
    if not text or len(text) > _LONGEST or text.count("(") > _MOST_BRACKETS:
        return None
    if _NUMBER.fullmatch(text):
        return int(text)
    try:
        has_symbols = bool(dim.free_symbols())
    except ValueError:  # it does not parse
        return None
    # sympy writes a division by zero as "zoo".
    if not has_symbols:
        return None
    return dim


def from_file(dim: IrDim) -> IrDim | None:
    """A size as a file declares it; None where it says nothing.

    Any text may be the name of a size in a file. One that is no plain name is put in quotes and becomes one symbol:
    "a - b" of a file has nothing to do with the difference of a and b, and "9**9**9" must not be computed.
    """
    if isinstance(dim, int):
        # Sizes of 0 and -1 are how old exporters wrote "any".
        if dim <= 0:
            return None
        return dim
    if not dim.value:
        return None
    if _NAME.fullmatch(dim.value) or dim.value.startswith("'"):
        return dim
    # The library assumes the same of every size: an integer above 0.
    return ir.SymbolicDim(sympy.Symbol(f"'{dim.value}'", integer=True, positive=True))


def unquoted(shape: ir.Shape) -> ir.Shape:
    """The shape with the names that the file has; see `from_file`."""
    dims: list[IrDim] = []
    for dim in shape:
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            dim = ir.SymbolicDim(dim.value.replace("'", ""))
        dims.append(dim)
    return ir.Shape(dims)
