"""Why a stage would run again, in a short phrase: what changed between the parts of two keys.

A key has a part per leaf of the configuration (`config.schedule.warmup`). Where a whole section was added or removed,
the phrase names the section once instead of each leaf.
"""

from __future__ import annotations

from collections.abc import Mapping

Parts = Mapping[str, str]

_LONGEST = 24
"""Characters of a value that is shown; a longer one is only said to have changed."""


def label(name: str) -> str:
    """What a part of a key is called where people read it."""
    return "layerline's code of this stage" if name == "code" else name


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
    """What differs between two stages' key parts, a phrase for each field."""
    fields: dict[str, None] = {}
    for name in changes(old, new):
        if not _shown_by_entries(name, old, new):
            fields[_field(name, old, new)] = None
    return [_phrase(name, old, new) for name in fields]


def _shown_by_entries(name: str, old: Parts, new: Parts) -> bool:
    """Whether an empty mapping became a full one, or the other way round: then its entries are the change."""
    return any(name not in side and _below(side, name) for side in (old, new))


def _field(name: str, old: Parts, new: Parts) -> str:
    """The largest entry around a part that one side lacks as a whole; the part itself where both have it."""
    pieces = name.split(".")
    if pieces[0] != "config":
        return name
    if name in old and name in new:
        outer = name.rpartition(".")[0]
        if len(pieces) > 2 and _is_short(outer, old) and _is_short(outer, new):
            return outer
        return name
    lacking = new if name in old else old
    for length in range(2, len(pieces)):
        entry = ".".join(pieces[:length])
        if entry not in lacking and not _below(lacking, entry):
            return entry
    return name


def _is_short(name: str, side: Parts) -> bool:
    """Whether an entry is written as one value: `dims.x: 48` is short for `size`, the one field set below `dims.x`."""
    return len(_set(side, name)) == 1 < len(_below(side, name))


def _phrase(name: str, old: Parts, new: Parts) -> str:
    kind, _, rest = name.partition(".")
    if kind == "hook":
        return f"{rest}() changed"
    if kind in ("input", "file"):
        return f"{kind} {rest} changed"
    before, after = _value(name, old), _value(name, new)
    called = rest if kind in ("env", "config") else label(name)
    if before != after and None not in (before, after):
        return f"{called} {before} -> {after}"
    if before == "unset":
        return f"{called} added"
    if after == "unset":
        return f"{called} removed"
    return f"{called} changed"


def _value(name: str, side: Parts) -> str | None:
    """What a field holds, as pipe.yaml has it; "unset", or None where that is too long for a phrase."""
    values = _set(side, name)
    if not values:
        return "unset"
    text = values[0]
    if len(values) > 1 or len(text) > _LONGEST or "{" in text:
        return None
    return _written(text) if name.startswith("config.") else text


def _written(text: str) -> str:
    if text in ("True", "False"):
        return text.lower()
    whole = text.removesuffix(".0")
    return whole if whole.lstrip("-").isdecimal() else text


def _set(side: Parts, name: str) -> list[str]:
    """The values at and below a name, without those that hold nothing."""
    values = _below(side, name)
    if name in side:
        values.insert(0, side[name])
    return [value for value in values if value not in ("None", "")]


def _below(side: Parts, name: str) -> list[str]:
    return [v for n, v in side.items() if n.startswith(f"{name}.")]
