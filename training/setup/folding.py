"""Names that differ in one number alone, written as one: `layer.{0..11}.output.bias`. A plan of hundreds is read so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from layerline.pipeline.inputs.untrusted import is_number

T = TypeVar("T")
_Template = tuple[str, str]
"""What stands before a number between dots, and after it."""


def folded(told: Mapping[str, T]) -> Iterator[tuple[str, int, T]]:
    """(name, or names with their numbers in braces; how many; what is told of each), in the order of the first.

    Names are folded only where the same is told of them: nothing is lost.
    """
    chosen = _chosen(told)
    members: dict[tuple[_Template, T], list[int]] = {}
    for name, (template, number) in chosen.items():
        members.setdefault((template, told[name]), []).append(number)
    done: set[tuple[_Template, T]] = set()
    for name, what in told.items():
        group = (chosen[name][0], what) if name in chosen else None
        if group is None or len(members[group]) < 2:
            yield name, 1, what
        elif group not in done:
            done.add(group)
            (before, after), numbers = group[0], sorted(members[group])
            yield f"{before}{{{_ranges(numbers)}}}{after}", len(numbers), what


def _chosen(told: Mapping[str, T]) -> dict[str, tuple[_Template, int]]:
    """The number of each name by which most others are its like."""
    slots = {name: list(_slots(name)) for name in told}
    alike = Counter((template, told[name]) for name, found in slots.items() for template, _ in found)
    return {name: max(found, key=lambda slot: alike[slot[0], told[name]]) for name, found in slots.items() if found}


def _slots(name: str) -> Iterator[tuple[_Template, int]]:
    parts = name.split(".")
    for i, part in enumerate(parts):
        if is_number(part) and part == str(int(part)):  # 007 is a name, not the number 7
            yield ("".join(f"{p}." for p in parts[:i]), "".join(f".{p}" for p in parts[i + 1 :])), int(part)


def _ranges(numbers: Sequence[int]) -> str:
    """`0..3,5` of 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
