"""The checks of `pipe check`: what a stage is given to check its part of a project, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from layerline.pipeline.errors import (
    ConfigError,
    PipeError,
    TaskError,
    Unavailable,
    as_pipe_error,
    brief,
    machine_lacks,
    ran_out_of_memory,
)
from layerline.pipeline.nearest import did_you_mean
from layerline.pipeline.task import DATA_HOOKS, Task

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table."""

    stage: str  # the stage it matters to; empty where it matters to all
    item: str  # what was looked at: a hook, a field of pipe.yaml, the device
    state: State  # "error" where the run would fail
    seen: str  # what was seen, and for an error what was expected
    hint: str = ""  # what to do
    where: str = ""  # line, field or tensor
    exit_code: int = 2  # that of an error: 2, or 3 where the machine lacks something

    def error(self) -> PipeError:
        """The same as an error that ends a run."""
        what = f"{self.item}: {self.seen}"
        if self.exit_code == Unavailable.exit_code:
            return Unavailable(what, where=self.where, hint=self.hint)
        return TaskError(what, where=self.where, hint=self.hint)

    def to_json(self) -> dict[str, str]:
        fields = ("stage", "item", "state", "seen", "hint", "where")
        return {name: getattr(self, name) for name in fields}


class Skipped(Exception):
    """An item can't be checked because an earlier check failed, which has been reported."""


class CalledOnce(Task):
    """The user's task; each data hook is called once, and its result is shared by all checks."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__(path, root)
        self._made: dict[str, Any] = {}

    def get(self, hook: str) -> Callable[..., Any]:
        function = super().get(hook)
        if hook not in DATA_HOOKS:
            return function

        def once() -> Any:
            if hook not in self._made:
                try:
                    self._made[hook] = function()
                except PipeError as error:
                    self._made[hook] = error
                    raise
            if isinstance(self._made[hook], PipeError):
                raise Skipped
            return self._made[hook]

        return once


@dataclass
class Inspection:
    """What a stage checks its part of a project with."""

    root: Path  # the project's folder
    task: Task  # the user's hooks; each data hook is called once
    shared: dict[str, Any] = field(default_factory=dict)  # values that stages pass on to later stages, by name
    findings: list[Finding] = field(default_factory=list)  # the findings so far
    stage: str = ""

    @contextmanager
    def item(self, name: str) -> Iterator[None]:
        """Errors raised inside become findings about `name`."""
        try:
            yield
        except Skipped:
            pass
        except (PipeError, OSError, MemoryError) as error:
            self._fail(name, as_pipe_error(error))
        except Exception as error:  # noqa: BLE001 - torch, a runtime: what it says of one item must not hide the others
            if ran_out_of_memory(error):
                self._fail(name, machine_lacks(MemoryError()))
            else:
                self.warn(name, f"it could not be checked: {brief(error)}", "the run itself will tell more")

    def ok(self, item: str, seen: str) -> None:
        """Reports that an item is right."""
        self._add(item, "ok", seen)

    def warn(self, item: str, seen: str, hint: str, where: str = "") -> None:
        """Reports a problem that does not stop a run."""
        self._add(item, "warning", seen, hint, where)

    def need(self, name: str) -> Any:
        """A value that an earlier stage passed on. Raises Skipped: there is none; the reason has been reported."""
        if name not in self.shared:
            raise Skipped
        return self.shared[name]

    def names_something(self, patterns: Sequence[str], item: str) -> None:
        """Checks that each pattern means a value, node or module of the model: its name, one above it, or a glob."""
        if not patterns:
            return
        names = set(self.need("names"))
        if not all(_is_meant(pattern, names) for pattern in patterns) and "all names" in self.shared:
            # Only now: names of what the model does not keep take a pass over the whole program.
            names |= self.shared["all names"]()
        for pattern in patterns:
            if not _is_meant(pattern, names):
                raise ConfigError(
                    f"{pattern!r} matches no value, node or module of the model",
                    where=item,
                    hint=did_you_mean(pattern, sorted(names), 0),
                )
        self.ok(item, f"{', '.join(patterns)}: in the model")

    def _fail(self, name: str, error: PipeError) -> None:
        code = PipeError.exit_code
        if isinstance(error, Unavailable):
            code = error.exit_code
        self._add(name, "error", error.what, error.hint, error.where, code)

    def _add(self, item: str, state: State, seen: str, hint: str = "", where: str = "", code: int = 2) -> None:
        if any((f.item, f.state, f.seen) == (item, state, seen) for f in self.findings):
            return  # several stages meet the same mistake
        if where in (item, item.removesuffix("()")):
            where = ""
        self.findings.append(
            Finding(stage=self.stage, item=item, state=state, seen=seen, hint=hint, where=where, exit_code=code)
        )


def _is_meant(pattern: str, names: set[str]) -> bool:
    """Whether a pattern of `quantize.skip` means any of these names."""
    return any(fnmatchcase(n, pattern) or n.startswith(f"{pattern}.") for n in names)
