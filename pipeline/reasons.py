"""Why a stage would run again, in a short phrase: what changed between the parts of two keys."""

from __future__ import annotations

from collections.abc import Mapping

Parts = Mapping[str, str]

UNSET = frozenset({None, "None", "", "[]", "{}"})
"""How a field that holds nothing is written in a record; None where a record lacks it."""
_LONGEST = 24
"""Greatest length of a value that is shown; of a longer one only the fact that it changed is."""


def label(name: str) -> str:
    """What a part of a key is called where people read it."""
    if name == "code":
        return "layerline's code of this stage"
    return name


def field_label(name: str) -> str:
    """What a field is called where people read it. The train stage keeps the sections of pipe.yaml in `recipe`."""
    return name.removeprefix("recipe.")


def changes(old: Parts, new: Parts) -> dict[str, tuple[str | None, str | None]]:
    """Parts that differ, by name: (old, new); None where a side has no such part."""
    names = [*new, *(n for n in old if n not in new)]
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}


def awaited(old: Parts, new: Parts, key: str | None) -> set[str]:
    """The inputs of the last run that are not known yet: stages before this one would run first."""
    return {name for name in old if key is None and name.startswith("input.") and name not in new}


def describe(old: Parts, new: Parts) -> str:
    """What differs between two stages' key parts in one short phrase, the first two in full."""
    all_phrases = phrases(old, new)
    text = ", ".join(all_phrases[:2])
    if len(all_phrases) > 2:
        text += f" and {len(all_phrases) - 2} more"
    return text


def phrases(old: Parts, new: Parts) -> list[str]:
    """What differs between two stages' key parts, a phrase for each part.

    A part that holds nothing on both sides (an unset field that one version lacks) is named only where nothing else is.
    """
    differing = changes(old, new)
    telling = {name: sides for name, sides in differing.items() if not UNSET.issuperset(sides)}
    return [_phrase(name, *sides) for name, sides in (telling or differing).items()]


def _phrase(name: str, old: str | None, new: str | None) -> str:
    kind, _, rest = name.partition(".")
    if kind == "hook":
        return f"{rest}() changed"
    if kind in ("input", "file"):
        return f"{kind} {rest} changed"
    called = field_label(rest) if kind in ("env", "config") else label(name)
    before = _written(kind, old)
    after = _written(kind, new)
    if before and after and before != after:
        return f"{called} {before} -> {after}"
    if old is None:
        return f"{called} added"
    if new is None:
        return f"{called} removed"
    return f"{called} changed"


def _written(kind: str, value: str | None) -> str:
    """A value as pipe.yaml has it; empty where it is too long for a phrase."""
    text = as_written(kind, value)
    if len(text) > _LONGEST or "{" in text:
        return ""
    whole = text.removesuffix(".0")
    if kind == "config" and whole.lstrip("-").isdecimal():
        return whole
    return text


def as_written(kind: str, value: str | None) -> str:
    """A value of a key's part as pipe.yaml has it: Python's None and True are unset and true there."""
    if value in UNSET:
        return "unset"
    text = str(value)
    if kind == "config" and text in ("True", "False"):
        return text.lower()
    return text
