"""Keys and freshness: what each stage would be run on, whether that has been done already, and if not, why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.files import Hasher
from layerline.pipeline.inputs.untrusted import DIGITS, integer, is_inside, open_file, read_json, storable
from layerline.pipeline.keys import canonical, env, stage_code
from layerline.pipeline.keys.fingerprint import Fingerprint, Reader
from layerline.pipeline.reasons import describe
from layerline.pipeline.records.ledger import Ledger, Record
from layerline.pipeline.records.store import Artifact, DamagedError, Store
from layerline.pipeline.stage import Stage
from layerline.pipeline.task import DATA_HOOKS

CHECKPOINTS = "scratch/checkpoints"
"""In a stage's working folder: what it goes on from."""
SETS = "sets.json"
"""In a stage's working folder: the overrides of the run that was last at work in it."""
ORDER = "order"
"""In a stage's working folder: a number that grows from run to run; a clock can be set back."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage as things stand.

    Attributes:
        stage: the stage.
        key: hash over `parts`; None while an input isn't there yet.
        parts: what the result depends on, by name ("config.epochs", "input.model", "hook.loss", "env.torch").
        notes: what could not be followed in the user's code, and counts whole.
        record: what the key gave before; None when it never ran.
        artifact: what it left, verified; None when it would run.
        reason: why it would run, or that it is fresh.
    """

    stage: Stage
    key: str | None
    parts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    record: Record | None = None
    artifact: Artifact | None = None
    reason: str = ""


def check_file(root: Path, stage: Stage, name: str) -> None:
    """Refuses a file that a stage names and that is no file of the project: a device or a pipe would never end.

    Raises:
        ConfigError: names the stage and the file.
    """
    if not is_inside(name) or not (root / name).is_file():
        raise ConfigError(f"stage {stage.name} reads {name}, which is not in the project", where="pipe.yaml")


@dataclass
class Planner:
    """Reads a project's state; writes nothing."""

    project: Project
    store: Store
    ledger: Ledger
    hasher: Hasher
    _prints: dict[str, Fingerprint] = field(default_factory=dict)
    _facts: dict[str, str] = field(default_factory=dict)
    _codes: dict[type[Stage], str] = field(default_factory=dict)
    _reader: Reader | None = None

    def steps(self) -> list[Step]:
        """Every stage of the project, in order."""
        made: dict[str, Artifact | None] = {}
        steps = []
        for stage in self.project.stages:
            step = self.step(stage, made)
            made[stage.gives] = step.artifact
            steps.append(step)
        return steps

    def step(self, stage: Stage, made: Mapping[str, Artifact | None]) -> Step:
        """One stage, given the artifacts by kind that exist before it."""
        parts, notes = self._parts(stage)
        waiting = [kind for kind in stage.takes.values() if made.get(kind) is None]
        if waiting:
            behind = [s.name for s in self.project.upstream(stage).values() if s.gives in waiting]
            return Step(stage=stage, key=None, parts=parts, notes=notes, reason=f"after {' and '.join(behind)}")
        inputs = {f"input.{port}": made[kind] for port, kind in stage.takes.items()}
        parts |= {name: artifact.digest for name, artifact in inputs.items() if artifact}
        # The whole configuration once more: dotted names alone can't tell {"a.b": 1} from {"a": {"b": 1}}.
        key = canonical.digest({**parts, "config": _configuration(stage)})
        record = self.ledger.get(key)
        if record is None:
            reason = self._why(stage, parts, key)
            return Step(stage=stage, key=key, parts=parts, notes=notes, reason=reason)
        artifact, reason = self._artifact(record)
        return Step(
            stage=stage, key=key, parts=parts, notes=notes, record=record, artifact=artifact, reason=reason
        )  # fmt: skip

    def _artifact(self, record: Record) -> tuple[Artifact | None, str]:
        """What a record's run left, if all of it is still there and whole; and in words what is the matter."""
        short = record.digest[:12]
        try:
            artifact = self.store.get(record.digest)
        except DamagedError as error:
            return None, f"its artifact {short} is damaged: {error}"
        if artifact is None:
            return None, f"its artifact {short} is gone from the store"
        if not self.ledger.report_is_whole(record.report):
            return None, "its report is missing or damaged"
        return artifact, "fresh"

    def parts(self, stage: Stage) -> dict[str, Any]:
        """What a stage's result depends on besides its inputs."""
        return self._parts(stage)[0]

    def _parts(self, stage: Stage) -> tuple[dict[str, Any], tuple[str, ...]]:
        parts: dict[str, Any] = {"stage": stage.name, "version": stage.version}
        if stage.implementation:
            parts["use"] = stage.implementation
        parts |= {f"config.{n}": v for n, v in _flat(_configuration(stage))}
        parts |= {f"env.{n}": self._fact(n) for n in stage.env}
        parts["code"] = self._code(type(stage))
        notes: list[str] = []
        for hook in self.hooks(stage):
            fingerprint = self.fingerprint(hook)
            parts[f"hook.{hook}"] = fingerprint.digest
            parts |= {f"file.{n}": d for n, d in fingerprint.files.items()}
            notes += self._notes(hook, fingerprint)
        files = stage.files()
        if DATA_HOOKS & set(self.hooks(stage)):
            files += self.project.data
        parts |= {f"file.{storable(name)}": self._file(stage, name) for name in files}
        return parts, tuple(dict.fromkeys(notes))

    def hooks(self, stage: Stage) -> list[str]:
        """The hooks that a stage may call, as the task stands.

        Of a row of `first_of` those up to the first that is surely a function: defining one before it changes the key.
        """
        called = {h for row in stage.first_of for h in self._up_to_first(row)}
        optional = {h for row in stage.first_of for h in row}
        return [h for h in stage.hooks() if h in called or h not in optional]

    def _up_to_first(self, row: Sequence[str]) -> list[str]:
        first = next((n for n, hook in enumerate(row) if self.fingerprint(hook).function), len(row))
        return list(row[: first + 1])

    def changed(self, step: Step, imported: Mapping[Path, str]) -> str:
        """Which file of a stage's key changed since it was hashed, in words; empty where none did.

        Args:
            step: the stage.
            imported: SHA-256 of each module that this run imported from the project.
        """
        paths = {name: p for hook in self.hooks(step.stage) for name, p in self.fingerprint(hook).paths.items()}
        paths |= {storable(name): self.project.root / name for name in (*step.stage.files(), *self.project.data)}
        names = [name.removeprefix("file.") for name in step.parts if name.startswith("file.")]
        for name in names:
            if what := self.hasher.changed(paths.get(name, self.project.root / name)):
                return f"{name} {what}"
        edited = self._reader.imported_as_read(imported) if self._reader else ""
        return f"{edited} was edited" if edited else ""

    def fingerprint(self, hook: str) -> Fingerprint:
        """What a hook of the user's task depends on."""
        if hook not in self._prints:
            task = self.project.root / self.project.task
            self._reader = self._reader or Reader(task, self.hasher, self.project.root)
            self._prints[hook] = self._reader.hook(hook)
        return self._prints[hook]

    def _code(self, stage: type[Stage]) -> str:
        if stage not in self._codes:
            self._codes[stage] = stage_code.digest(stage, self.hasher)
        return self._codes[stage]

    def _fact(self, name: str) -> str:
        if name not in self._facts:
            self._facts[name] = env.fact(name)
        return self._facts[name]

    def _notes(self, hook: str, fingerprint: Fingerprint) -> list[str]:
        """Where the text of a hook doesn't show what it reads."""
        notes = [f"{hook}(): {file} counts whole: {why}" for file, why in fingerprint.whole.items()]
        data = self.project.data
        unlisted = [f for f in fingerprint.folders if not any(file.startswith(f"{f}/") for file in data)]
        return notes + [f"{hook}() names the folder {f}: what is in it counts only under `data:`" for f in unlisted]

    def _file(self, stage: Stage, name: str) -> str:
        check_file(self.project.root, stage, name)
        return self.hasher.file(self.project.root / name)

    def _why(self, stage: Stage, parts: Mapping[str, Any], key: str) -> str:
        before = self.ledger.head(stage.name)
        if has_checkpoint(self.project.works / key):
            return "cut short; goes on from its checkpoint"
        if before is None:
            return "never ran"
        return describe(before.parts, shown(parts)) or "its record is gone"


def open_planner(project: Project, *, memo: bool = True) -> Planner:
    """A planner on the project's own state.

    Args:
        project: whose state.
        memo: whether hashes of earlier processes are believed where a file is untouched since.
    """
    state = project.state
    hasher = Hasher(state / "cache" / "digests.json" if memo else None)
    return Planner(project, Store(state / "store", hasher), Ledger(state / "ledger"), hasher)


def has_checkpoint(work: Path) -> bool:
    """Whether a stage that was cut short left one in its working folder."""
    return any((work / CHECKPOINTS).glob("*"))


def asked(work: Path) -> tuple[str, ...]:
    """The overrides that a working folder says it had; none where the file is missing or damaged."""
    try:
        sets = read_json(work / SETS, size=1 << 20)
    except (OSError, ValueError):
        return ()
    return tuple(sets) if isinstance(sets, list) and all(isinstance(text, str) for text in sets) else ()


def order(work: Path) -> int:
    """The number of a working folder among those of its project: the one begun last has the greatest."""
    with suppress(OSError, ValueError), open(work / ORDER, "rb", opener=open_file) as file:
        return integer(file.read(DIGITS).decode(), 0, 2**53)
    return 0


def fields(stage: Stage) -> dict[str, str]:
    """Each field of a stage that counts for its key, by its dotted name, as text."""
    return shown(dict(_flat(_configuration(stage))))


def shown(parts: Mapping[str, Any]) -> dict[str, str]:
    """Key parts as text: what the ledger keeps and `pipe explain` prints."""
    return {name: value if isinstance(value, str) else _text(value) for name, value in parts.items()}


def _text(value: Any) -> str:
    """repr, with sets in an order that is the same in every process."""
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def _configuration(stage: Stage) -> dict[str, Any]:
    return stage.model_dump(exclude=set(stage.unkeyed))


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested configuration as dotted names; an empty mapping stays a value so that it differs from an absent one."""
    if isinstance(value, dict) and value:
        return [pair for k, v in value.items() for pair in _flat(v, f"{prefix}.{k}" if prefix else str(k))]
    return [(prefix, value)] if prefix else []
