"""Plans a run: computes each stage's key, and says whether the stage is fresh or why it must run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys import canonical, env, stage_code
from layerline.pipeline.keys.fingerprint import Fingerprint, Reader
from layerline.pipeline.reasons import describe
from layerline.pipeline.records.ledger import Ledger, Record
from layerline.pipeline.records.store import Artifact, DamagedError, Store
from layerline.pipeline.stage import Stage
from layerline.pipeline.task import DATA_HOOKS
from layerline.pipeline.untrusted import DIGITS, integer, is_inside, open_file, read_json, storable

CHECKPOINTS = "scratch/checkpoints"
"""In a stage's working folder: the checkpoints that an interrupted stage resumes from."""
SETS = "sets.json"
"""In a stage's working folder: the overrides of the run that was last at work in it."""
ORDER = "order"
"""In a stage's working folder: a number that grows from run to run; a clock can be set back."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The state of one stage."""

    stage: Stage
    key: str | None  # hash over `parts`; None while an input is missing
    # what the result depends on, by name ("config.epochs", "input.model", "hook.loss", "env.torch")
    parts: Mapping[str, Any]
    notes: tuple[str, ...] = ()  # where user code could not be followed, so that more counts
    record: Record | None = None  # the record of an earlier run with this key
    artifact: Artifact | None = None  # the verified artifact; None if the stage must run
    reason: str = ""  # why the stage must run, or that it is fresh


def check_file(root: Path, stage: Stage, name: str) -> None:
    """Raises ConfigError on a path of a stage's configuration that is no regular file of the project."""
    if not is_inside(name) or not (root / name).is_file():
        raise ConfigError(f"stage {stage.name} reads {name}, which is not in the project", where="pipe.yaml")


class Planner:
    """Reads a project's state; writes nothing."""

    def __init__(self, project: Project, store: Store, ledger: Ledger, hasher: Hasher) -> None:
        self.project = project
        self.store = store
        self.ledger = ledger
        self.hasher = hasher
        self._reader: Reader | None = None
        self._prints: dict[str, Fingerprint] = {}
        self._fact = cache(env.fact)
        self._code = cache(stage_code.digest)

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
        parts, notes = self.parts(stage)
        # Without the digest of an input there is no key: the stage behind it may run, or find itself fresh.
        waiting = [kind for kind in stage.takes.values() if made.get(kind) is None]
        if waiting:
            behind = [s.name for s in self.project.upstream(stage).values() if s.gives in waiting]
            return Step(stage=stage, key=None, parts=parts, notes=notes, reason=f"after {' and '.join(behind)}")
        for port, kind in stage.takes.items():
            artifact = made[kind]
            assert artifact is not None
            parts[f"input.{port}"] = artifact.digest
        # The whole configuration once more: dotted names alone can't tell {"a.b": 1} from {"a": {"b": 1}}.
        key = canonical.digest({**parts, "config": _configuration(stage)})
        step = Step(stage=stage, key=key, parts=parts, notes=notes, record=self.ledger.get(key))
        if step.record is None:
            before = self.ledger.head(stage.name)
            reason = "never ran"
            if has_checkpoint(self.project.works / key):
                reason = "cut short; goes on from its checkpoint"
            elif before is not None:
                reason = describe(before.parts, shown(parts)) or "its record is gone"
            return replace(step, reason=reason)
        artifact, reason = self._artifact(step.record)
        return replace(step, artifact=artifact, reason=reason)

    def _artifact(self, record: Record) -> tuple[Artifact | None, str]:
        """The artifact of a record if it is complete, and the reason."""
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

    def parts(self, stage: Stage) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a stage's result depends on besides its inputs, and notes on what can't be followed."""
        parts: dict[str, Any] = {"stage": stage.name, "version": stage.version}
        if stage.implementation:
            parts["use"] = stage.implementation
        for name, value in _flat(_configuration(stage)).items():
            parts[f"config.{name}"] = value
        for name in stage.facts():
            parts[f"env.{name}"] = self._fact(name)
        parts["code"] = self._code(type(stage), self.hasher)
        notes: dict[str, None] = {}  # as an ordered set
        hooks = self.hooks(stage)
        for hook in hooks:
            fingerprint = self.fingerprint(hook)
            parts[f"hook.{hook}"] = fingerprint.digest
            for name, digest in fingerprint.files.items():
                parts[f"file.{name}"] = digest
            notes |= {f"{hook}(): {file} counts whole: {why}": None for file, why in fingerprint.whole.items()}
            for folder in fingerprint.folders:
                if not any(file.startswith(f"{folder}/") for file in self.project.data):
                    notes[f"{hook}() names the folder {folder}: what is in it counts only under `data:`"] = None
        # Hooks of data may read any file of `data:`; others read none.
        files = stage.files()
        if not DATA_HOOKS.isdisjoint(hooks):
            files += self.project.data
        for name in files:
            check_file(self.project.root, stage, name)
            parts[f"file.{storable(name)}"] = self.hasher.file(self.project.root / name)
        return parts, tuple(notes)

    def hooks(self, stage: Stage) -> list[str]:
        """The hooks that a stage may call, as the task stands.

        Of a row of `first_of` those up to the first that is surely a function: defining one before it changes the key.
        """
        unused: set[str] = set()
        used: set[str] = set()
        for row in stage.rows():
            names = used
            for hook in row:
                names.add(hook)
                if names is used and self.fingerprint(hook).function:
                    names = unused
        return [hook for hook in stage.hooks() if hook in used or hook not in unused]

    def changed(self, step: Step, imported: Mapping[Path, str]) -> str:
        """Which file of a stage's key changed since it was hashed, in words; empty where none did.

        `imported` has the SHA-256 of each module that this run imported from the project.
        """
        root = self.project.root
        paths: dict[str, Path] = {}
        for hook in self.hooks(step.stage):
            paths |= self.fingerprint(hook).paths
        for name in (*step.stage.files(), *self.project.data):
            paths[storable(name)] = root / name
        for part in step.parts:
            name = part.removeprefix("file.")
            if name != part:
                change = self.hasher.changed(paths.get(name, root / name))
                if change:
                    return f"{name} {change}"
        for path, digest in imported.items():
            if self._reader and self._reader.was_edited(path, digest):
                return f"{self._reader.relative(path)} was edited"
        return ""

    def fingerprint(self, hook: str) -> Fingerprint:
        """What a hook of the user's task depends on."""
        if hook not in self._prints:
            task = self.project.root / self.project.task
            self._reader = self._reader or Reader(task, self.hasher, self.project.root)
            self._prints[hook] = self._reader.hook(hook)
        return self._prints[hook]


def open_planner(project: Project, *, memo: bool = True) -> Planner:
    """A planner on the project's own state; with `memo` it believes earlier hashes of files untouched since."""
    state = project.state
    kept = None
    if memo:
        kept = state / "cache" / "digests.json"
    hasher = Hasher(kept)
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
    if isinstance(sets, list) and all(isinstance(text, str) for text in sets):
        return tuple(sets)
    return ()


def order(work: Path) -> int:
    """The number of a working folder among those of its project: the one begun last has the greatest."""
    with suppress(OSError, ValueError), open(work / ORDER, "rb", opener=open_file) as file:
        return integer(file.read(DIGITS).decode(), 0, 2**53)
    return 0


def fields(stage: Stage) -> dict[str, str]:
    """Each field of a stage that counts for its key, by its dotted name, as text."""
    return shown(_flat(_configuration(stage)))


def shown(parts: Mapping[str, Any]) -> dict[str, str]:
    """Key parts as text: what the ledger keeps and `pipe explain` prints."""
    return {name: value if isinstance(value, str) else _text(value) for name, value in parts.items()}


def _text(value: Any) -> str:
    """repr, with sets in an order that is the same in every process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _configuration(stage: Stage) -> dict[str, Any]:
    return stage.model_dump(exclude=set(stage.unkeyed))


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration by dotted names; an empty mapping stays a value so that it differs from an absent one."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
