"""What is wrong with a stage's fields, in one sentence: which field, what was expected, and what was written.

pydantic reports one error per form of a union and places that name the forms. Here they become one sentence about one
place in pipe.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from layerline.pipeline.nearest import hint

Place = tuple[str | int, ...]

UNKNOWN = "unknown field"
_DEEPEST = 4  # so many levels below a stage fields are looked for
# What stands in a path for a key of one's own, and for an item of a list.
_STEPS = ("NAME", "0")

# By the first word of a pydantic error's kind, and by the name of a type.
_WANTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table of fields",
    "mapping": "a table of fields",
}


@dataclass(frozen=True)
class Mistake:
    """A sentence about the field at `place`."""

    place: Place
    what: str
    hint: str = ""


@dataclass(frozen=True)
class _Fault:
    """One error of pydantic's. `union` is the place of the field that offers several forms, of which this is one."""

    place: Place
    union: Place | None
    error: ErrorDetails

    @property
    def kind(self) -> str:
        return self.error["type"]

    @property
    def depth(self) -> tuple[int, int]:
        return len(self.place), len(self.error["loc"])


def mistake(cls: type[BaseModel], raw: Mapping[Any, Any], error: ValidationError) -> Mistake:
    """The first mistake. Where a field takes several forms, it is about the form closest to what was written."""
    faults = [_located(raw, e) for e in error.errors(include_url=False)]
    # Missing fields last: an unknown name is most often a misspelling of the missing one, and says more.
    faults.sort(key=lambda fault: fault.kind == "missing")
    first = faults[0]
    if first.union is None:
        return _in_words(cls, [first])
    # pydantic reports an error for each form of a union: the one that got deepest is what was meant.
    forms = [f for f in faults if f.union == first.union]
    closest = max(forms, key=lambda f: f.depth)
    return _in_words(cls, [f for f in forms if (f.place, f.depth) == (closest.place, closest.depth)])


def unfit_numbers(raw: Any, taken: Any, place: Place = ()) -> Iterator[Mistake]:
    """Where `true` or `false` was written for a number, which pydantic accepts as 1 and 0, and integers beyond 64 bits.

    `taken` is the dump of what pydantic made of `raw`; None where a field has a short form.
    """
    if isinstance(raw, bool):
        if not isinstance(taken, bool) and taken is not None:
            yield Mistake(place, f"expected {_WANTED.get(type(taken).__name__, 'fields')}, saw {raw}")
    elif isinstance(raw, int) and not -(2**63) <= raw < 2**64:  # no field, array or file holds it
        yield Mistake(place, f"expected an integer of 64 bits, saw {raw}")
    elif isinstance(raw, Mapping):
        for key, value in raw.items():
            inner = taken.get(key) if isinstance(taken, Mapping) else None
            yield from unfit_numbers(value, inner, (*place, key))
    elif isinstance(raw, list):
        # A short form may have become a longer list: then items have no counterpart.
        same_length = isinstance(taken, list | tuple) and len(taken) == len(raw)
        for i, value in enumerate(raw):
            yield from unfit_numbers(value, taken[i] if same_length else None, (*place, i))


def field_paths(cls: type[BaseModel], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field that a model takes, as a path; NAME stands for a key of one's own, 0 for an item of a list."""
    for name, info in cls.model_fields.items():
        yield (*place, info.alias or name)
        if len(place) < _DEEPEST:
            # A path stands for each place where a field may be written, not for each class.
            for model, step in _models_below(info.annotation):
                yield from field_paths(model, (*place, info.alias or name, *step))


def _models_below(annotation: Any) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ()
    step: tuple[str, ...] = ()
    origin = get_origin(annotation)
    if isinstance(origin, type):
        if issubclass(origin, Mapping):
            step = _STEPS[:1]
        elif issubclass(origin, Sequence):
            step = _STEPS[1:]
    for inner in get_args(annotation):
        for model, deeper in _models_below(inner):
            yield model, (*step, *deeper)


def _located(raw: Any, error: ErrorDetails) -> _Fault:
    """Where the error is in what was written. pydantic's own place also names the members of unions."""
    node = raw
    place: list[str | int] = []
    union: Place | None = None
    for depth, part in enumerate(error["loc"], 1):
        is_index = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if is_index or (isinstance(node, Mapping) and part in node):
            node = node[part]
            place.append(part)
        elif part == "[key]":  # pydantic's mark for a mapping's key
            continue
        elif error["type"] in ("missing", "told") and depth == len(error["loc"]):
            place.append(part)
        else:
            if union is None:
                union = tuple(place)
            if str(part).isidentifier() and not isinstance(node, Mapping):
                break  # a short form, such as `lr` for {name: lr}: what was written has no such field
    return _Fault(tuple(place), union, error)


def _in_words(cls: type[BaseModel], faults: Sequence[_Fault]) -> Mistake:
    """One sentence for the faults of one place. Several faults are the several forms that the field takes."""
    first = faults[0]
    place = first.place
    written = first.error["input"]
    if first.kind == "told":  # a stage's own error, already in sentences
        return Mistake(place, first.error["ctx"]["what"], first.error["ctx"]["hint"])
    if first.kind == "missing":
        return Mistake(place, "it is required, and missing")
    if first.kind == "extra_forbidden":
        return Mistake(place, UNKNOWN, hint(str(place[-1]), _names(cls, place[:-1])))
    if first.kind == "literal_error" and isinstance(written, str) and len(faults) == 1:
        valid = [v.strip("'") for v in re.split(", | or ", first.error["ctx"]["expected"])]
        return Mistake(place, f"unknown value {written!r}", hint(written, valid))
    about_types = [fault for fault in faults if fault.kind not in ("missing", "extra_forbidden")]
    first_form, *other_forms = dict.fromkeys(_expected(cls, fault) for fault in about_types)
    wanted = " or ".join([first_form, *(form.removeprefix("expected ") for form in other_forms)])
    advice = ""
    if wanted == "expected a list" and isinstance(written, str | int | float):
        advice = f"a list of one: [{written}]"
    return Mistake(place, f"{wanted}, saw {written!r:.80}", advice)


def _expected(cls: type[BaseModel], fault: _Fault) -> str:
    """What pydantic expected, in the words of our other messages."""
    kind = fault.kind
    message = fault.error["msg"]
    if kind == "model_type":
        names = _names(cls, fault.place)
        if len(names) == 1:
            return f"expected the field {names[0]}"
        if names:
            return f"expected the fields {', '.join(names)}"
    wanted = _WANTED.get(kind.partition("_")[0])
    if wanted and kind.endswith(("_type", "_parsing", "_from_float")):
        return f"expected {wanted}"
    return message.removeprefix("Value error, ").replace("Input should be", "expected", 1)


def _names(cls: type[BaseModel], place: Place) -> list[str]:
    """Valid field names at a place."""
    names: dict[str, None] = {}  # as an ordered set
    for path in field_paths(cls):
        # NAME and 0 in a path stand for whatever key or index was written.
        steps = zip(path, map(str, place), strict=False)
        if len(path) == len(place) + 1 and all(step in (part, *_STEPS) for step, part in steps):
            names[path[-1]] = None
    return list(names)
