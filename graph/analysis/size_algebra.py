"""Sizes as numbers or names, and how they multiply and divide.

A size is a number, or the name of a symbolic size ("batch"), or a product of them ("6*batch"). Two equal names are the
same number in every run. A name that starts with "?" is a number the graph computes in a way that isn't followed; it
may be negative, unlike a size.

Integers wrap around where a type ends, as they do in every runtime. Sizes of axes are taken to be below 2**31, so a
name fits each type followed here; of a product of names that is taken for granted in int64 alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from layerline.pipeline.inputs.untrusted import is_number

Size = int | str
Sizes = tuple[Size, ...]
INTEGER_BITS = {ir.DataType.INT64: 64, ir.DataType.INT32: 32}
_LARGEST_SIZE = 2**31 - 1
_SUM_SIGNS = (" + ", " - ")


def sizes(value: ir.Value | None) -> Sizes | None:
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


def is_size(item: Size) -> bool:
    """Whether an element is certainly not negative."""
    if isinstance(item, str):
        return "?" not in item
    return item >= 0


def product(items: Iterable[Size]) -> Size:
    """The product of sizes: a number, or names in alphabetical order behind their factor; sums are in brackets."""
    others = [item for item in items if item != 1]
    # A single factor is written as it is, without the brackets that a sum takes among others.
    if len(others) == 1 and isinstance(others[0], str) and len(_split_factors(others[0])) == 1:
        return others[0]
    factor, names = _number_and_names(others)
    if factor == 0 or not names:
        return factor
    names.sort()
    if factor != 1:
        names.insert(0, str(factor))
    return "*".join(names)


def quotient(items: Iterable[Size], divisors: Iterable[Size]) -> Size | None:
    """The product of some sizes over the product of others, where it is certain; None where names don't cancel."""
    factor, names = _number_and_names(items)
    divisor, divisor_names = _number_and_names(divisors)
    for name in divisor_names:
        if name not in names:
            return None
        names.remove(name)
    if divisor == 0 or factor % divisor != 0:
        return None
    return product([factor // divisor, *map(_without_brackets, names)])


def wrap(item: Size, dtype: ir.DataType | None, fallback: str) -> Size:
    """What an integer type makes of an element; `fallback` where that depends on how large its sizes are."""
    bits = None
    if dtype is not None:
        bits = INTEGER_BITS.get(dtype)
    if isinstance(item, int):
        if bits is None:
            return item
        half: int = 2 ** (bits - 1)
        wrapped: int = (item + half) % 2**bits - half
        return wrapped
    factor, names = _number_and_names([item])
    is_single_name = factor == 1 and len(names) == 1
    if is_single_name or (bits == 64 and factor <= _LARGEST_SIZE):
        return item
    return fallback


def _number_and_names(items: Iterable[Size]) -> tuple[int, list[str]]:
    """A product as its number and the names in it."""
    number = 1
    names: list[str] = []
    for item in items:
        if isinstance(item, int):
            number *= item
            continue
        for part in _split_factors(item):
            if is_number(part):
                number *= int(part)
            else:
                names.append(part)
    return number, names


def _split_factors(size: str) -> list[str]:
    """The factors that a size is written as: asterisks inside brackets are not its own, and a sum is one factor."""
    outside = _blank_brackets(size)
    if "//" in outside or any(sign in outside for sign in _SUM_SIGNS):
        return [f"({size})"]
    factors: list[str] = []
    start = 0
    for index, character in enumerate(outside):
        if character == "*":
            factors.append(size[start:index])
            start = index + 1
    factors.append(size[start:])
    return factors


def _without_brackets(size: str) -> str:
    """A sum without the brackets that it had as a factor: alone it is written without."""
    if not (size.startswith("(") and size.endswith(")")):
        return size
    inner = size[1:-1]
    outside = _blank_brackets(inner)
    if any(sign in outside for sign in _SUM_SIGNS):
        return inner
    return size


def _blank_brackets(text: str) -> str:
    """The text with all that stands in brackets blanked out; the outer brackets themselves stay."""
    depth = 0
    characters: list[str] = []
    for character in text:
        if character == ")":
            depth -= 1
        if depth:
            characters.append(" ")
        else:
            characters.append(character)
        if character == "(":
            depth += 1
    return "".join(characters)
