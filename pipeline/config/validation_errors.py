"""What is wrong with a stage's fields, in one sentence: which field, what was expected, what was seen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from layerline.pipeline.nearest import closest, hint

Place = tuple[str | int, ...]

# So many places are told where a field of that name is, and so deep is looked for one.
_TOLD = 3
_DEEPEST = 4

# By the first word of a pydantic error's kind, and by the name of a type.
_WANTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "str": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "fields",
    "mapping": "fields",
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
    """The first mistake. Of a field that takes several forms: in the form that what was written comes closest to."""
    faults = [_located(cls, raw, e) for e in error.errors(include_url=False)]
    faults.sort(key=lambda f: f.kind == "missing")  # the unknown name is most often the one that is missed
    first = faults[0]
    if first.union is None:
        return _in_words(cls, [first])
    forms = [f for f in faults if f.union == first.union]
    closest = max(forms, key=lambda f: f.depth)
    return _in_words(cls, [f for f in forms if (f.place, f.depth) == (closest.place, closest.depth)])


def numbers_in_disguise(raw: Any, taken: Any, place: Place = ()) -> Iterator[Mistake]:
    """Where `true` or `false` was taken for a number, in the order written: pydantic takes true for 1.

    Args:
        raw: what was written.
        taken: what it was understood as, dumped.
        place: where both are.
    """
    if isinstance(raw, bool):
        if not isinstance(taken, bool) and taken is not None:
            yield Mistake(place, f"expected {_WANTED.get(type(taken).__name__, 'fields')}, saw {raw}")
    elif isinstance(raw, Mapping) and isinstance(taken, Mapping):
        for key in raw:
            if key in taken:
                yield from numbers_in_disguise(raw[key], taken[key], (*place, key))
    elif isinstance(raw, list) and isinstance(taken, list | tuple) and len(raw) == len(taken):
        for i, (ours, theirs) in enumerate(zip(raw, taken, strict=True)):
            yield from numbers_in_disguise(ours, theirs, (*place, i))


def beyond_64_bits(raw: Any, place: Place = ()) -> Iterator[Mistake]:
    """Integers that no field, array or file holds, in the order written."""
    if isinstance(raw, int) and not -(2**63) <= raw < 2**64:
        yield Mistake(place, f"expected an integer of 64 bits, saw {raw}")
    elif isinstance(raw, Mapping):
        for key, value in raw.items():
            yield from beyond_64_bits(value, (*place, key))
    elif isinstance(raw, list):
        for i, value in enumerate(raw):
            yield from beyond_64_bits(value, (*place, i))


def elsewhere(name: str, fields: Sequence[Sequence[str]]) -> str:
    """A hint for a field that is at another place, or nearly so; empty where there is none.

    Args:
        name: what was written.
        fields: paths of all fields, from the top of pipe.yaml.
    """
    name = closest(name, [f[-1] for f in fields])
    paths = sorted({".".join(f) for f in fields if f[-1] == name}, key=lambda path: (path.count("."), path))
    return f"did you mean {' or '.join(paths[:_TOLD])}?" if paths else ""


def field_paths(cls: type[BaseModel], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field that a model takes, as a path; NAME stands for a key of one's own, 0 for an item of a list."""
    for name, info in cls.model_fields.items():
        yield (*place, info.alias or name)
        if len(place) < _DEEPEST:
            for model, step in _models_below(info.annotation):
                yield from field_paths(model, (*place, info.alias or name, *step))


def _models_below(annotation: Any) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ()
    step: tuple[str, ...] = ()
    if isinstance(origin := get_origin(annotation), type):
        if issubclass(origin, Mapping):
            step = ("NAME",)
        elif issubclass(origin, Sequence):
            step = ("0",)
    for inner in get_args(annotation):
        for model, deeper in _models_below(inner):
            yield model, (*step, *deeper)


def _located(cls: type[BaseModel], raw: Any, error: ErrorDetails) -> _Fault:
    """Where the error is in what was written: pydantic's own place also names a union's members and short forms."""
    models, node, place, union = [cls], raw, list[str | int](), None
    for part in error["loc"]:
        if _fields(models, part) and not isinstance(node, Mapping):
            union = tuple(place) if union is None else union  # a short form, and what it stands for
            break
        if _fields(models, part) or _has(node, part):
            models = [m for a in _fields(models, part) for m in _models_in(a)] or models
            node = node[part] if _has(node, part) else None
            place.append(part)
        elif part != "[key]":  # how pydantic marks a mapping's own key
            union = tuple(place) if union is None else union
    return _Fault(tuple(place), union, error)


def _has(node: Any, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, Mapping) and part in node


def _in_words(cls: type[BaseModel], faults: Sequence[_Fault]) -> Mistake:
    """One sentence for faults of one place; several are the forms that it takes."""
    first = faults[0]
    place, seen = first.place, first.error["input"]
    if first.kind == "told":  # by a stage, in whole sentences
        return Mistake(place, first.error["ctx"]["what"], first.error["ctx"]["hint"])
    if first.kind == "missing":
        return Mistake(place, "it is required, and missing")
    if first.kind == "extra_forbidden":
        return Mistake(place, "unknown field", _nearest_field(cls, place))
    if first.kind == "literal_error" and isinstance(seen, str) and len(faults) == 1:
        valid = [v.strip("'") for v in re.split(", | or ", first.error["ctx"]["expected"])]
        return Mistake(place, f"unknown value {seen!r}", hint(seen, valid))
    told = [f for f in faults if f.kind not in ("missing", "extra_forbidden")]
    first_form, *others = dict.fromkeys(_expected(cls, f) for f in told)
    wanted = " or ".join([first_form, *(o.removeprefix("expected ") for o in others)])
    alone = wanted == "expected a list" and isinstance(seen, str | int | float)
    return Mistake(place, f"{wanted}, saw {seen!r:.80}", f"a list of one: [{seen}]" if alone else "")


def _nearest_field(cls: type[BaseModel], place: Place) -> str:
    name, valid = str(place[-1]), _names(cls, place[:-1])
    stage = getattr(cls, "name", "")
    own = [(stage, *path) if isinstance(stage, str) and stage else path for path in field_paths(cls)]
    exact = [path for path in own if path[-1] == name]
    if exact or not closest(name, valid):
        return elsewhere(name, own) or hint(name, valid)
    return hint(name, valid)


def _expected(cls: type[BaseModel], fault: _Fault) -> str:
    """What pydantic asks for, in the words of every other message."""
    kind, message = fault.kind, fault.error["msg"]
    if kind == "model_type" and (names := _names(cls, fault.place)):
        return f"expected the field{'s' * (len(names) > 1)} {', '.join(names)}"
    if (wanted := _WANTED.get(kind.partition("_")[0])) and kind.endswith(("_type", "_parsing", "_from_float")):
        return f"expected {wanted}"
    return message.removeprefix("Value error, ").replace("Input should be", "expected", 1)


def _names(cls: type[BaseModel], place: Place) -> list[str]:
    """Valid field names at a place; an index or a mapping's key names no field: there it is what they hold."""
    models: list[type[BaseModel]] = [cls]
    for part in place:
        models = [m for a in _fields(models, part) for m in _models_in(a)] or models
    return [n for m in models for n in m.model_fields]


def _fields(models: Sequence[type[BaseModel]], part: str | int) -> list[Any]:
    """What the models' fields of that name take."""
    return [f.annotation for m in models for n, f in m.model_fields.items() if part in (n, f.alias)]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models_in(a)]
