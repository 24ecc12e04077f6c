"""What commands that only look are about: a stage's newest record, its artifact, its report in another run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pydantic import TypeAdapter

from layerline.pipeline import nearest
from layerline.pipeline.commands.settings import changed, has_settings, previous
from layerline.pipeline.config.project import Project, as_options
from layerline.pipeline.errors import ConfigError, PipeError
from layerline.pipeline.files import claim
from layerline.pipeline.keys.fingerprint import Fingerprint
from layerline.pipeline.records.ledger import Record, Run, fault
from layerline.pipeline.records.store import Artifact, DamagedError
from layerline.pipeline.report import Report
from layerline.pipeline.run.plan import Planner, Step, fields, open_planner
from layerline.pipeline.untrusted import read_bytes

ALL = "all"
"""What stands for every stage on the command line."""


def status(planner: Planner) -> tuple[list[Step], dict[str, str]]:
    """Every stage as things stand, and its state; what was hashed for that is remembered."""
    steps = planner.steps()
    with suppress(OSError):  # a project that can't be written can be looked at
        claim(planner.project.state)
    planner.hasher.save()
    return steps, states(planner, steps)


def explained(planner: Planner, stage: str) -> tuple[Step, Mapping[str, str] | None, dict[str, Fingerprint]]:
    """A stage as things stand, the parts of the key it last ran with, and what each of its hooks reaches."""
    step = _step(planner, stage)
    before = step.record or planner.ledger.head(stage)
    prints = {hook: planner.fingerprint(hook) for hook in planner.hooks(step.stage)}
    if before is None:
        return step, None, prints
    return step, before.parts, prints


def states(planner: Planner, steps: list[Step]) -> dict[str, str]:
    """`fresh`, `would run` or `may run` by stage; behind one that has to run again, the input may turn out the same."""
    by_stage = {}
    for step in steps:
        state = "would run"
        if step.artifact:
            state = "fresh"
        elif step.key is None and planner.ledger.head(step.stage.name):
            state = "may run"
        by_stage[step.stage.name] = state
    return by_stage


def _step(planner: Planner, stage: str) -> Step:
    """A stage as things stand."""
    return next(step for step in planner.steps() if step.stage.name == stage)


def asked_for(project: Project, names: Sequence[str]) -> list[str] | None:
    """The stages that a command names; None for `all`. Raises ConfigError on a name that is no stage."""
    valid = [*(s.name for s in project.stages), ALL]
    for name in names:
        if name not in valid:
            raise ConfigError(f"there is no stage {name!r} here", hint=nearest.hint(name, valid))
    if ALL not in names:
        return list(names)
    if len(names) > 1:
        raise ConfigError("`all` means every stage: give it alone, or name stages", hint=f"pipe run {ALL}")
    return None


@dataclass(frozen=True)
class Chosen:
    """A stage's record, and the newest run that it belongs to; None if all such runs are removed."""

    record: Record
    run: Run | None


def choose(planner: Planner, stage: str, run_id: str | None = None) -> Chosen:
    """A stage's record: in the run of that id, the newest with the project's overrides, or the newest."""
    project = planner.project
    if run_id is not None:
        past = planner.ledger.find_run(run_id, stage)
        return Chosen(_record_in(past, stage), past)
    if project.sets:
        run = _run_with_settings(planner, [s.name for s in project.needed_for([stage])])
        if run is None:
            return Chosen(_from_key(planner, stage), None)
        return Chosen(_record_in(run, stage), run)
    record = planner.ledger.head(stage) or _from_key(planner, stage)
    # From the newest to the oldest.
    for run in planner.ledger.runs():
        if record in run.records:
            return Chosen(record, run)
    return Chosen(record, None)


def stage_and_run(text: str, run_id: str | None) -> tuple[str, str | None]:
    """The stage and the run of `STAGE@RUN`; of `STAGE` alone with `run_id`. Raises ConfigError: the run is empty."""
    name, at, run = text.partition("@")
    if at and not run:
        raise ConfigError(f"{text} names no run", hint=f"{name}@previous, an id from `pipe runs`, or {name} alone")
    return name, run or run_id


def find_run(planner: Planner, run_id: str | None) -> Run:
    """The run of that id, or the newest with the overrides that the project was read with, or the newest."""
    project = planner.project
    one_choice(project, run_id)
    if run_id is not None or not project.sets:
        return planner.ledger.find_run(run_id or "last")
    run = _run_with_settings(planner, [text.split(".")[0] for text in project.sets])
    if run is None:
        asked = as_options(project.sets)
        raise PipeError(f"no run had {asked}", hint=f"pipe run all {asked}")
    return run


def _run_with_settings(planner: Planner, needed: Sequence[str]) -> Run | None:
    """The newest run with a record of each needed stage, whose stages all had the project's settings."""
    wanted = {stage.name: fields(stage) for stage in planner.project.stages}
    for run in planner.ledger.runs():
        # Records of stages that this project does not have any more say nothing.
        records = {r.stage: r for r in run.records if r.stage in wanted}
        # The first word of an override need not be a stage: `name=other` sets a field of the project.
        has_all = records.keys() >= wanted.keys() & set(needed)
        if has_all and records and all(has_settings(r, wanted[name]) for name, r in records.items()):
            return run
    return None


def one_choice(project: Project, run_id: str | None) -> None:
    """Raises ConfigError: a run was named for the result that the overrides choose, too."""
    if run_id is not None and project.sets:
        raise ConfigError("a run and --set both say which result is meant", hint="give one of the two")


def _from_key(planner: Planner, stage: str) -> Record:
    """The record of a stage with the project's present code and settings, which may outlive all runs that name it."""
    record = _step(planner, stage).record
    if record is None:
        if not planner.project.sets:
            raise PipeError(f"stage {stage} has not run yet", hint=f"pipe run {stage}")
        options = as_options(planner.project.sets)
        raise PipeError(f"stage {stage} has not run with {options}", hint=f"pipe run {stage} {options}")
    return record


def artifact(project: Project, stage: str, run_id: str | None = None) -> tuple[Artifact, str]:
    """A stage's artifact, checked; and why it may not be the wanted one, empty where it is as asked for."""
    planner = open_planner(project)
    again = f"make it again with: pipe run {stage} {as_options(project.sets)}".rstrip()
    record = choose(planner, project.stage(stage).name, run_id).record
    try:
        stored = planner.store.get(record.digest)
    except DamagedError as error:
        raise DamagedError(error.what, where=f"{stage} {record.digest[:12]}", hint=again) from None
    if stored is None:
        raise PipeError(f"the artifact of {stage} is gone from the store", hint=again)
    is_asked_for = run_id is not None or bool(project.sets)
    if not record.passed:
        if is_asked_for:
            return stored, f"this run of {stage} did not pass"
        return stored, f"the newest run of {stage} did not pass"
    if is_asked_for:
        return stored, ""
    now = _step(planner, record.stage).artifact
    if now is not None and now.digest != record.digest:
        return stored, f"the newest run of {stage} had other settings: pipe run {stage} goes back to those of pipe.yaml"
    return stored, ""


@dataclass(frozen=True)
class Beside:
    """A stage's report in another run, and what differs in what both were made from."""

    run: Run
    report: Report
    changed: tuple[str, ...]


def beside(planner: Planner, chosen: Chosen, run_id: str) -> Beside:
    """Another run's report of the same stage. Raises PipeError: there is no such run, or it has no such stage."""
    stage = chosen.record.stage
    past = planner.ledger.find_run(run_id, stage)
    then = _record_in(past, stage)
    # Stages that this one does not depend on can't have changed its report.
    needed = {s.name for s in planner.project.needed_for([stage])}
    now: Sequence[Record] = (chosen.record,)
    if chosen.run is not None:
        now = chosen.run.records
    differing = changed([r for r in now if r.stage in needed], [r for r in past.records if r.stage in needed])
    return Beside(past, planner.ledger.report(then), tuple(differing))


def filed_report(planner: Planner, stage: str, run_id: str | None, against: str | None) -> tuple[Report, Beside | None]:
    """The report of a stage, and that of the run `against`. Raises ConfigError: the project has no such stage."""
    chosen = choose(planner, planner.project.stage(stage).name, run_id)
    other = None
    if against is not None:
        other = beside(planner, chosen, against)
    return planner.ledger.report(chosen.record), other


@dataclass(frozen=True)
class PastRun:
    """A run and its reports by stage."""

    run: Run
    reports: Mapping[str, Report]


def past(planner: Planner, run: Run) -> PastRun:
    """The run with its reports; PipeError where one is missing or damaged."""
    return PastRun(run, {record.stage: planner.ledger.report(record) for record in run.records})


def beside_run(planner: Planner, run: Run, others: Sequence[str]) -> list[PastRun]:
    """The named runs, or the one before the run; none where its reports can't be read."""
    if others:
        return [past(planner, planner.ledger.find_run(name)) for name in others]
    before = previous(list(planner.ledger.runs()), run)
    if before is not None:
        with suppress(PipeError):  # nobody asked for it, and `pipe verify` reports the damage
            return [past(planner, before)]
    return []


def _record_in(run: Run, stage: str) -> Record:
    for record in run.records:
        if record.stage == stage:
            return record
    raise PipeError(f"run {run.id} has no stage {stage}", hint="name a run that went through it")


LogRows = list[dict[str, float]]
"""A training log: of each row the columns in which something was measured."""
_LOG = TypeAdapter(LogRows)
# A log is read as a whole; a larger one was not written by a training.
_LOG_BYTES = 1 << 27


def logs(planner: Planner, run: Run) -> dict[str, LogRows]:
    """The training log (metrics.csv) beside each checkpoint of a run, by stage; none where the artifact is gone."""
    return {stage: read_log(path) for stage, path in files(planner, run, "checkpoint", "metrics.csv").items()}


def files(planner: Planner, run: Run, kind: str, name: str) -> dict[str, Path]:
    """A file of each artifact of a kind, by stage; none where the file or the artifact is gone."""
    by_stage = {}
    for record in run.records:
        if record.kind != kind:
            continue
        with suppress(DamagedError):  # the page leaves the file out, and `pipe verify` reports the damage
            artifact = planner.store.get(record.digest)
            if artifact is not None and (artifact.path / name).is_file():
                by_stage[record.stage] = artifact.path / name
    return by_stage


def read_log(path: Path) -> LogRows:
    """The rows of a metrics.csv. Raises PipeError: it is no table of numbers, or too large; names the file."""
    try:
        rows = list(csv.DictReader(StringIO(read_bytes(path, _LOG_BYTES).decode())))
        for row in rows:
            # A cell is empty where a column was not measured in that step.
            for name in [name for name, cell in row.items() if not cell]:
                del row[name]
        return _LOG.validate_python(rows)
    except (OSError, ValueError, csv.Error) as error:
        raise PipeError(
            f"it is no table of numbers: {fault(error)}", where=str(path), hint="the stage writes it again with --force"
        ) from None
