"""Reads pipe.yaml: the project's stages and the whole configuration of each. Errors name the line and the field."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from layerline.pipeline import nearest, stage_table
from layerline.pipeline.config.document import Document
from layerline.pipeline.config.validation_errors import UNKNOWN, field_paths, mistake, unfit_numbers
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.files import check_link
from layerline.pipeline.keys import canonical
from layerline.pipeline.keys.patterns import expand
from layerline.pipeline.stage import Stage
from layerline.pipeline.task import no_task_file
from layerline.pipeline.untrusted import check_utf8, is_inside, printable

FILE = "pipe.yaml"
STATE = ".layerline"
_OWN_KEYS = ("name", "task", "data", "check", "track")
TRACKERS = ("tensorboard", "mlflow")
_PLACES_SHOWN = 3
# What is said of a field that there is not: the second by the sections of train.
_UNKNOWN = (UNKNOWN, "no such field")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with a pipe.yaml."""

    root: Path
    name: str  # what people call it
    task: str  # the user's task file, relative to root
    data: tuple[str, ...]  # files whose content the data hooks read, relative to root
    stages: tuple[Stage, ...]  # the stages in the order they run
    sets: tuple[str, ...] = ()  # the `key.path=value` that pipe.yaml was overridden with
    check: bool = True  # whether everything is checked before a stage that may take long
    track: str | None = None  # one of TRACKERS: where runs are logged

    @property
    def state(self) -> Path:
        """Where Layerline keeps what it made."""
        return self.root / STATE

    @property
    def works(self) -> Path:
        """Where stages work, each in a folder that is named after its key."""
        return self.state / "work"

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises ConfigError: this project has none; names the nearest."""
        by_name = {s.name: s for s in self.stages}
        if name not in by_name:
            raise ConfigError(f"there is no stage {name!r} here", hint=nearest.hint(name, by_name))
        return by_name[name]

    def upstream(self, stage: Stage) -> dict[str, Stage]:
        """The stage behind each input port."""
        by_kind = {other.gives: other for other in reversed(self.stages)}
        return {port: by_kind[kind] for port, kind in stage.takes.items()}

    def needed_for(self, names: Sequence[str] | None) -> tuple[Stage, ...]:
        """The named stages (None: all) and everything they take from, in the order they run."""
        if names is None:
            return self.stages
        # Everything upstream of the named stages counts as named.
        wanted: set[str] = set()
        pending = [self.stage(n) for n in names]
        while pending:
            stage = pending.pop()
            wanted.add(stage.name)
            pending += self.upstream(stage).values()
        return tuple(s for s in self.stages if s.name in wanted)

    def require_task(self, names: Sequence[str] | None = None) -> None:
        """Raises TaskError where there is no task file and a named stage (None: all), or one before, has hooks."""
        if any(s.hooks() for s in self.needed_for(names)) and not (self.root / self.task).is_file():
            raise no_task_file(self.task)


def load(folder: Path, overrides: Sequence[str] = ()) -> Project:
    """Reads pipe.yaml, with overrides on top; a ConfigError names place, field, what was seen and the nearest name."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("it is a file, not a folder", where=str(folder))
    check_utf8(folder)
    # Before anything is read below it: a link may lead to somebody else's files.
    check_link(folder / STATE)
    document = Document(folder / FILE)
    for override in overrides:
        document.override(override)
    raw = document.content
    for key in raw:
        if key not in _OWN_KEYS and key not in stage_table.names():
            valid = [*_OWN_KEYS, *stage_table.names()]
            raise document.error((key,), "unknown key", _hint(str(key), nearest.hint(str(key), valid)))
    names = _stage_names(raw, document)
    stages = _ordered([_build_stage(n, raw.get(n), document) for n in names])
    settings: dict[str, Any] = {"name": project_name(folder), "task": "task.py", "check": True}
    settings |= {key: raw[key] for key in _OWN_KEYS if key in raw}
    for key in ("name", "task"):
        if not isinstance(settings[key], str) or not settings[key]:
            raise document.error((key,), f"expected text, saw {settings[key]!r}")
    if not is_inside(settings["task"]):
        raise document.error(("task",), f"expected a path inside the project, saw {settings['task']!r}")
    if not isinstance(settings["check"], bool):
        raise document.error(("check",), f"expected true or false, saw {settings['check']!r}")
    track = settings.get("track")
    if track is not None and track not in TRACKERS:
        hint = nearest.hint(str(track), TRACKERS)
        raise document.error(("track",), f"expected {' or '.join(TRACKERS)}, saw {track!r}", hint)
    settings["data"] = _data_files(document, folder)
    return Project(root=folder, stages=stages, sets=tuple(overrides), **settings)


def project_name(folder: Path) -> str:
    """What a project in a folder is called where pipe.yaml gives no name."""
    return printable(folder.resolve().name, 100) or "project"


def as_options(overrides: Sequence[str]) -> str:
    """Overrides as one types them."""
    return " ".join(f"--set {shlex.quote(text)}" for text in overrides)


def _hint(name: str, valid: str, stage: str = "") -> str:
    """The hint for an unknown name: the nearest at its place in `valid`, else the places where a field is called so.

    Those of `stage`, in which it was written, come before those of other stages.
    """
    if valid.startswith("did you mean"):
        return valid
    places: dict[str, list[str]] = {}
    for other in stage_table.names():
        cls = stage_table.imported(other)
        if cls is not None:
            for path in cls.written() or field_paths(cls):
                places.setdefault(path[-1], []).append(".".join((other, *path)))
    matching = set(places.get(nearest.closest(name, places), []))
    paths = sorted(matching, key=lambda path: (not path.startswith(f"{stage}."), path.count("."), path))
    if not paths:
        return valid
    return f"did you mean {' or '.join(paths[:_PLACES_SHOWN])}?"


def _stage_names(raw: Mapping[str, Any], document: Document) -> list[str]:
    """The standard stages, an import stage in place of those before it, and third parties' that are configured."""
    # An import stage gives what a standard stage would give; all stages up to that one go.
    imports = [n for n in stage_table.names() if n.startswith("import-") and n in raw]
    if len(imports) > 1:
        raise document.error((imports[1],), f"the project already starts at {imports[0]}", "keep one of the two")
    standard = [n for n in stage_table.BUILT_IN if not n.startswith("import-")]
    if imports:
        kind = stage_table.stage_class(imports[0]).gives
        producer = [stage_table.stage_class(n).gives for n in standard].index(kind)
        for name in standard[: producer + 1]:
            if name in raw:
                raise document.error(
                    (name,), f"the project starts at {imports[0]}, after this stage", "remove one of the two"
                )
        standard = standard[producer + 1 :]
    others = [n for n in raw if n in stage_table.names() and n not in stage_table.BUILT_IN and n not in imports]
    return [*imports, *standard, *others]


def _build_stage(name: str, raw: Any, document: Document) -> Stage:
    if raw is not None and not isinstance(raw, Mapping):
        raise document.error((name,), f"expected the fields of stage {name}, saw {raw!r}")
    cls = stage_table.stage_class(name)
    if raw and "use" in raw:
        if not isinstance(raw["use"], str):
            raise document.error((name, "use"), f"expected the name of a stage, saw {raw['use']!r}")
        try:
            cls = stage_table.stand_in(name, raw["use"])
        except ConfigError as error:
            raise document.error((name, "use"), error.what, error.hint) from None
        raw = {field: value for field, value in raw.items() if field != "use"}
    try:
        stage = cls.model_validate(raw or {})
    except ValidationError as error:
        first = mistake(cls, raw or {}, error)
        hint = first.hint
        if first.what in _UNKNOWN and first.place:  # a field whose name is no text has no place
            hint = _hint(str(first.place[-1]), hint, name)
        raise document.error((name, *first.place), first.what, hint) from None
    # pydantic takes true for 1 and integers of any length.
    for wrong in unfit_numbers(raw or {}, stage.model_dump()):
        raise document.error((name, *wrong.place), wrong.what)
    for field, value in stage:
        try:  # whatever a field holds becomes part of a key, and a key holds nothing absolute
            canonical.encode(value)
        except ValueError:
            what = f"expected a path inside the project, saw {str(value)!r}"
            raise document.error((name, field), what) from None
        except TypeError as error:
            raise document.error((name, field), str(error)) from None
    return stage


def _ordered(stages: list[Stage]) -> tuple[Stage, ...]:
    """Topological order by kinds; among equals, the order of `stages`."""
    done: list[Stage] = []
    kinds = [s.gives for s in stages]
    for kind in kinds:
        if kinds.count(kind) > 1:
            twins = [s.name for s in stages if s.gives == kind]
            raise ConfigError(f"stages {' and '.join(twins)} both give {kind!r}", where=FILE)
    while len(done) < len(stages):
        # A stage is ready once each kind that it takes has been given.
        have = {s.gives for s in done}
        ready = next((s for s in stages if s not in done and set(s.takes.values()) <= have), None)
        if ready is None:
            stuck = next(s for s in stages if s not in done)
            missing = sorted(set(stuck.takes.values()) - have)
            raise ConfigError(
                f"stage {stuck.name} takes {', '.join(missing)}, which no earlier stage gives", where=FILE
            )
        done.append(ready)
    return tuple(done)


def _data_files(document: Document, folder: Path) -> tuple[str, ...]:
    patterns = document.content.get("data") or []
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise document.error(("data",), f"expected a list of file patterns, saw {patterns!r}")
    files: list[str] = []
    for index, pattern in enumerate(patterns):
        if not is_inside(pattern):
            raise document.error(("data", index), f"expected a path inside the project, saw {pattern!r}")
        try:
            matches = expand(folder, pattern)
        except ValueError as error:
            raise document.error(("data", index), f"{error}, saw {pattern!r:.80}") from None
        if not matches:
            raise document.error(("data", index), f"no file matches {pattern!r}")
        files += matches
    return tuple(dict.fromkeys(files))
