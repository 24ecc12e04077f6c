"""What a stage was run with: its settings beside their defaults, versions, and what changed between two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerline.pipeline import stage_table
from layerline.pipeline.reasons import UNSET, field_label, phrases
from layerline.pipeline.records.ledger import Record, Run
from layerline.pipeline.run.plan import fields

CONFIG, ENV = "config.", "env."


@dataclass(frozen=True)
class Setting:
    """One field of a stage; `default` is None where the field must be given, or this version hasn't got it."""

    name: str
    value: str
    default: str | None

    @property
    def differs(self) -> bool:
        if self.default is None:
            return self.value not in UNSET
        return self.value != self.default


def settings(record: Record) -> list[Setting]:
    """Every field that the stage ran with, those that differ from their defaults first."""
    cls = stage_table.imported(record.stage)  # none where this project does not use the stage
    usual = fields(cls.model_construct()) if cls else {}
    result: list[Setting] = []
    for part, value in record.parts.items():
        if part.startswith(CONFIG):
            name = part.removeprefix(CONFIG)
            result.append(Setting(field_label(name), value, usual.get(name)))
    return sorted(result, key=lambda setting: not setting.differs)


def has_settings(record: Record, wanted: Mapping[str, str]) -> bool:
    """Whether a stage ran with these fields; one that only one side has was added to the stage, or removed, since."""
    return all(record.parts.get(f"{CONFIG}{name}", value) == value for name, value in wanted.items())


def versions(record: Record) -> dict[str, str]:
    """What computed a record: Layerline, Python and the system, then the packages its key names."""
    packages = {k.removeprefix(ENV): v for k, v in record.parts.items() if k.startswith(ENV)}
    return {**record.versions, **packages}


def previous(runs: Sequence[Run], run: Run) -> Run | None:
    """The run before a run; `runs` are newest first."""
    later = dict(zip([other.id for other in runs], runs[1:], strict=False))
    return later.get(run.id)


def changed(now: Sequence[Record], then: Sequence[Record]) -> list[str]:
    """What differs between the records of two runs, stage by stage: fields, hooks, files and versions.

    An input of a stage that another stage of the run made says nothing that the other's changes don't.
    """
    before = {r.stage: r for r in then}
    changes: list[str] = []
    for record in now:
        old = before.get(record.stage)
        if old is not None and old != record:
            differing = phrases(_own_parts(old), _own_parts(record))
            changes += [f"{record.stage}: {phrase}" for phrase in differing]
    for record in now:
        old = before.get(record.stage, record)
        for name, version in record.versions.items():
            version_then = old.versions.get(name, version)
            if version_then != version:
                changes.append(f"{name} {version_then} -> {version}")
    return list(dict.fromkeys(changes))


def _own_parts(record: Record) -> dict[str, str]:
    """The parts of a record's key without the inputs that other stages made."""
    return {name: value for name, value in record.parts.items() if not name.startswith("input.")}
