"""The contract of a stage: frozen configuration in, files and a report out. A stage never sees the store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Report
from layerline.pipeline.task import Task


class Log(Protocol):
    """Where a stage says what it is doing; the command line draws it, `--json` drops it."""

    def say(self, text: str) -> None:
        """One sentence, kept on screen."""

    def progress(self, done: int, total: int, **fields: float | str) -> None:
        """Replaces the stage's progress bar: `done` of `total` units, with a few figures beside it."""

    def row(self, figures: Mapping[str, float]) -> None:
        """One row of a training log: what was measured, by column; `step` is one of them."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything a stage is handed.

    Attributes:
        inputs: folder of each input artifact, by port. Read only.
        task: the user's hooks.
        out: an empty folder; what is in it when run() returns becomes the artifact.
        scratch: a folder that outlives a kill and is the same for the same key: resume from it.
        log: where to report progress.
        copies: a folder with a copy of each of the stage's `files()`, whose content is what its key says; None where
            they are read where they lie.
        parts: each part of the stage's key as text; ranks that train together compare theirs.
    """

    inputs: Mapping[str, Path]
    task: Task
    out: Path
    scratch: Path
    log: Log
    copies: Path | None = None
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The project's folder."""
        return self.task.root

    @property
    def sources(self) -> Path:
        """Where the stage's `files()` are as its key says they are, whatever happens to the originals meanwhile."""
        return self.copies or self.root


class Stage(BaseModel):
    """One step of the pipeline; the fields of a subclass are its whole configuration.

    Class constants:
        name: what it is called in pipe.yaml and on the command line.
        version: raise it when the same inputs and configuration would now give another result.
        takes: kind of the artifact behind each input port.
        gives: kind of the artifact it leaves.
        uses: hooks of the user's task that it calls.
        first_of: rows of those hooks; of each row the stage calls the first that the task defines, and no other.
        env: facts about this machine that change the result, as named in `pipeline.keys.env`.
        unkeyed: fields that change how fast the result comes, never what it is: they are no part of the key.
        side: files left in the artifact that are no part of its digest (timings).
        long: whether it may take hours, so that all stages are checked before it starts.
        together: whether all ranks run it, where a launcher started several; else rank 0 does alone.
        implementation: the name that it is registered under, where it stands in for another stage; set by `use:`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    name: ClassVar[str]
    version: ClassVar[int]
    takes: ClassVar[Mapping[str, str]]
    gives: ClassVar[str]
    uses: ClassVar[tuple[str, ...]] = ()
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = ()
    env: ClassVar[tuple[str, ...]] = ()
    unkeyed: ClassVar[frozenset[str]] = frozenset()
    side: ClassVar[frozenset[str]] = frozenset()
    together: ClassVar[bool] = False
    long: ClassVar[bool] = False
    implementation: ClassVar[str] = ""

    @classmethod
    def written(cls) -> list[tuple[str, ...]]:
        """Paths of the fields as people may write them, where that is not the fields as they are: hints name them."""
        return []

    def hooks(self) -> tuple[str, ...]:
        """The hooks this configuration calls: `uses`, unless a field turns one on or off."""
        return self.uses

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """`first_of`, unless a field changes it."""
        return self.first_of

    def facts(self) -> tuple[str, ...]:
        """`env`, unless a field adds to it."""
        return self.env

    def files(self) -> tuple[str, ...]:
        """Files of the project, relative to its folder, whose content is part of the result; read in `work.sources`."""
        return ()

    def announce(self, *, runs: bool) -> None:
        """Rank 0 tells the other ranks whether this stage runs; called once per run, where `together` holds."""

    def follow(self) -> bool:
        """What rank 0 announced; the other ranks wait for it."""
        return False

    def check(self, look: Inspection) -> None:
        """Looks, in seconds and without an artifact, for what would make `run()` fail late; tells it by `look`."""

    @abstractmethod
    def run(self, work: Work) -> Report:
        """Do the work. Files must be written in canonical form: the same content gives the same bytes."""
