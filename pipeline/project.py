"""pipe.yaml, read: the project's stages and the whole configuration of each. Mistakes are told by line and field."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from layerline.pipeline import canonical, table
from layerline.pipeline.errors import ConfigError, TaskError
from layerline.pipeline.mistakes import mistake, nearest, numbers_in_disguise
from layerline.pipeline.stage import Stage

FILE = "pipe.yaml"
STATE = ".layerline"
_OWN_KEYS = ("name", "task", "data")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with a pipe.yaml.

    Attributes:
        root: the folder.
        name: what people call it.
        task: the user's task file, relative to root.
        data: files whose content the data hooks read, relative to root.
        stages: the stages in the order they run.
        sets: the `key.path=value` that pipe.yaml was overridden with.
    """

    root: Path
    name: str
    task: str
    data: tuple[str, ...]
    stages: tuple[Stage, ...]
    sets: tuple[str, ...] = ()

    @property
    def state(self) -> Path:
        """Where Layerline keeps what it made."""
        return self.root / STATE

    @property
    def works(self) -> Path:
        """Where stages work, each in a folder that is named after its key."""
        return self.state / "work"

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            ConfigError: this project has none; names the nearest.
        """
        found = next((s for s in self.stages if s.name == name), None)
        if found is None:
            raise ConfigError(f"there is no stage {name!r} here", hint=nearest(name, [s.name for s in self.stages]))
        return found

    def upstream(self, stage: Stage) -> dict[str, Stage]:
        """The stage behind each input port."""
        return {port: next(s for s in self.stages if s.gives == kind) for port, kind in stage.takes.items()}

    def needed_for(self, names: Sequence[str]) -> tuple[Stage, ...]:
        """The named stages and everything they take from, in the order they run."""
        wanted: set[str] = set()
        pending = [self.stage(n) for n in names]
        while pending:
            stage = pending.pop()
            wanted.add(stage.name)
            pending += self.upstream(stage).values()
        return tuple(s for s in self.stages if s.name in wanted)

    def require_task(self, names: Sequence[str] | None = None) -> None:
        """Checks that the task file is there if any of the named stages (None: of all), or what they need, has hooks.

        Raises:
            TaskError: it is not.
        """
        stages = self.stages if names is None else self.needed_for(names)
        if any(s.hooks() for s in stages) and not (self.root / self.task).is_file():
            raise TaskError(
                "there is no such task file",
                where=self.task,
                hint="create it, or name another with `task:` in pipe.yaml",
            )


def load(folder: Path, overrides: Sequence[str] = ()) -> Project:
    """Reads `folder/pipe.yaml`, with `key.path=value` overrides on top.

    Raises:
        ConfigError: names file, line, column, field, what was seen and the nearest valid name.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError("it is a file, not a folder", where=str(folder))
    document = _Document(folder / FILE)
    for override in overrides:
        document.override(override)
    raw = document.content
    for key in raw:
        if key not in _OWN_KEYS and key not in table.names():
            raise document.error((key,), "unknown key", nearest(str(key), [*_OWN_KEYS, *table.names()]))
    names = _stage_names(raw, document)
    stages = _ordered([_build_stage(n, raw.get(n), document) for n in names])
    return Project(
        root=folder,
        name=_text(document, "name", folder.resolve().name),
        task=_text(document, "task", "task.py"),
        data=_data_files(document, folder),
        stages=stages,
        sets=tuple(overrides),
    )


def as_options(overrides: Sequence[str]) -> str:
    """Overrides as one types them."""
    return " ".join(f"--set {shlex.quote(text)}" for text in overrides)


class _Document:
    """The YAML text with the place of every field."""

    def __init__(self, path: Path) -> None:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        self.path = path
        self._yaml = YAML(typ="rt")
        self._overridden: dict[tuple[str | int, ...], str] = {}
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"there is no {FILE} in {path.parent.resolve()}", hint="make a project: pipe init DIR"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"it is not UTF-8 text: {error}", where=path.name) from None
        try:
            self.tree = self._yaml.load(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            problem = str(error.problem or error.context).split("\n")[0]
            raise ConfigError(f"not valid YAML: {problem}", where=f"{path.name}{place}") from None
        except YAMLError as error:
            raise ConfigError(f"not valid YAML: {str(error).splitlines()[0]}", where=path.name) from None
        except (AttributeError, RecursionError):  # how the parser takes a mapping that is merged into itself
            raise ConfigError("an alias in it stands for itself", where=path.name) from None
        if self.tree is None:
            self.tree = {}
        if not isinstance(self.tree, Mapping):
            seen = "a list" if isinstance(self.tree, list) else repr(self.tree)
            raise ConfigError(f"expected fields such as `train:`, saw {seen:.80}", where=f"{path.name}:1:1")
        try:
            self.content: dict[Any, Any] = _plain(self.tree)
        except RecursionError:
            raise ConfigError("an alias in it stands for itself", where=path.name) from None

    def override(self, text: str) -> None:
        """Applies one `key.path=value`."""
        from ruamel.yaml.error import YAMLError

        path, equals, value = text.partition("=")
        keys = tuple(int(k) if k.isdigit() else k for k in path.strip().split("."))
        if not equals or "" in keys:
            raise ConfigError(
                f"expected key=value, saw {text!r}", where="--set", hint="for example: --set train.epochs=2"
            )
        try:
            parsed = _plain(self._yaml.load(value)) if value.strip() else None
        except YAMLError:
            parsed = value
        target: Any = self.content
        for depth, key in enumerate(keys[:-1]):
            target = self._child(target, _as_there(target, key), text, keys[: depth + 1])
        self._put(target, _as_there(target, keys[-1]), parsed, text)
        self._overridden[keys] = text

    def error(self, loc: tuple[str | int, ...], what: str, hint: str = "") -> ConfigError:
        """A ConfigError that points at a field."""
        field = ".".join(str(p) for p in loc)
        for keys, text in self._overridden.items():
            if keys == loc[: len(keys)] or (keys[: len(loc)] == loc and not self._is_in_file(loc)):
                return ConfigError(f"{field}: {what}", where=f"--set {text}", hint=hint)
        line, column = self._position(loc)
        return ConfigError(f"{field}: {what}" if field else what, where=f"{self.path.name}:{line}:{column}", hint=hint)

    def _position(self, loc: tuple[str | int, ...]) -> tuple[int, int]:
        node, position = self.tree, (0, 0)
        for key in loc:
            marks = getattr(getattr(node, "lc", None), "data", None) or {}
            if key not in marks:
                break
            position = tuple(marks[key][:2])
            node = node[key]
        return position[0] + 1, position[1] + 1

    def _is_in_file(self, loc: tuple[str | int, ...]) -> bool:
        node = self.tree
        for key in loc:
            if not (isinstance(node, Mapping) and key in node):
                return False
            node = node[key]
        return True

    def _child(self, target: Any, key: str | int, text: str, loc: tuple[str | int, ...]) -> Any:
        if isinstance(target, dict):
            if target.get(key) is None:
                target[key] = {}
            child = target[key]
        elif isinstance(target, list) and isinstance(key, int) and key < len(target):
            child = target[key]
        else:
            raise ConfigError(f"{'.'.join(map(str, loc))} is not there", where=f"--set {text}")
        if not isinstance(child, dict | list):
            raise ConfigError(f"{'.'.join(map(str, loc))} is {child!r} and has no fields", where=f"--set {text}")
        return child

    def _put(self, target: Any, key: str | int, value: Any, text: str) -> None:
        if isinstance(target, list) and not (isinstance(key, int) and key < len(target)):
            raise ConfigError(f"there is no item {key}: the list has {len(target)}", where=f"--set {text}")
        target[key] = value


def _stage_names(raw: Mapping[str, Any], document: _Document) -> list[str]:
    """The standard stages, an import stage in place of those before it, and third parties' that are configured."""
    imports = [n for n in table.names() if n.startswith("import-") and n in raw]
    if len(imports) > 1:
        raise document.error((imports[1],), f"the project already starts at {imports[0]}", "keep one of the two")
    standard = [n for n in table.BUILT_IN if not n.startswith("import-")]
    if imports:
        given = table.stage_class(imports[0]).gives
        producer = next(i for i, n in enumerate(standard) if table.stage_class(n).gives == given)
        for name in standard[: producer + 1]:
            if name in raw:
                raise document.error(
                    (name,), f"the project starts at {imports[0]}, after this stage", "remove one of the two"
                )
        standard = standard[producer + 1 :]
    others = [n for n in raw if n in table.names() and n not in table.BUILT_IN and n not in imports]
    return [*imports, *standard, *others]


def _build_stage(name: str, raw: Any, document: _Document) -> Stage:
    cls = table.stage_class(name)
    if raw is not None and not isinstance(raw, Mapping):
        raise document.error((name,), f"expected the fields of stage {name}, saw {raw!r}")
    try:
        stage = cls.model_validate(raw or {})
    except ValidationError as error:
        told = mistake(cls, raw or {}, error)
        raise document.error((name, *told.place), told.what, told.hint) from None
    if disguised := next(numbers_in_disguise(raw or {}, stage.model_dump()), None):
        raise document.error((name, *disguised.place), disguised.what)
    for field, value in stage:
        _check_key(document, (name, field), value)
    return stage


def _check_key(document: _Document, loc: tuple[str | int, ...], value: Any) -> None:
    """Whatever a field holds becomes part of a key, and a key holds nothing absolute."""
    try:
        canonical.encode(value)
    except ValueError:
        raise document.error(loc, f"expected a path inside the project, saw {str(value)!r}") from None
    except TypeError as error:
        raise document.error(loc, str(error)) from None


def _ordered(stages: list[Stage]) -> tuple[Stage, ...]:
    """Topological order by kinds; among equals, as given."""
    done: list[Stage] = []
    given = [s.gives for s in stages]
    for kind in given:
        if given.count(kind) > 1:
            twins = [s.name for s in stages if s.gives == kind]
            raise ConfigError(f"stages {' and '.join(twins)} both give {kind!r}", where=FILE)
    while len(done) < len(stages):
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


def _text(document: _Document, key: str, default: str) -> str:
    value = document.content.get(key, default)
    if not isinstance(value, str) or not value:
        raise document.error((key,), f"expected text, saw {value!r}")
    if key == "task" and is_outside(value):
        raise document.error((key,), f"expected a path inside the project, saw {value!r}")
    return value


def _data_files(document: _Document, folder: Path) -> tuple[str, ...]:
    patterns = document.content.get("data") or []
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise document.error(("data",), f"expected a list of file patterns, saw {patterns!r}")
    found: list[str] = []
    for index, pattern in enumerate(patterns):
        if is_outside(pattern) or not Path(pattern).parts:
            raise document.error(("data", index), f"expected a path inside the project, saw {pattern!r}")
        try:
            matches = sorted(_files_of(folder, pattern))
        except ValueError as error:
            raise document.error(("data", index), f"{error}, saw {pattern!r}") from None
        if not matches:
            raise document.error(("data", index), f"no file matches {pattern!r}")
        found += matches
    return tuple(dict.fromkeys(found))


def _files_of(folder: Path, pattern: str) -> Iterator[str]:
    """Files that match; all those in a folder that does. Never our own state."""
    for match in folder.glob(pattern):
        for path in match.rglob("*") if match.is_dir() else [match]:
            name = path.relative_to(folder)
            if name.parts[0] != STATE and path.is_file():
                yield name.as_posix()


def is_outside(path: str) -> bool:
    """Whether a path of the configuration leads out of the project's folder."""
    return Path(path).is_absolute() or ".." in Path(path).parts


def _as_there(target: Any, key: str | int) -> str | int:
    """A key as the mapping spells it: `--set` can't tell the name "0" from the number 0."""
    return str(key) if isinstance(target, dict) and key not in target and str(key) in target else key


def _plain(value: Any) -> Any:
    """Plain Python values in place of the parser's own types, which carry comments and formatting."""
    if isinstance(value, Mapping):
        return {_plain(k) if isinstance(k, str | int | float) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    for cls in (bool, int, float, str):
        if isinstance(value, cls):
            return cls(value)
    return value
