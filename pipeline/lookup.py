"""What commands that only look are about: a stage's newest record, its artifact, its report in another run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from layerline.pipeline.errors import ConfigError, PipeError
from layerline.pipeline.ledger import Ledger, Record, Run
from layerline.pipeline.mistakes import nearest
from layerline.pipeline.plan import Planner, Step, open_planner
from layerline.pipeline.project import Project
from layerline.pipeline.report import Report
from layerline.pipeline.store import Artifact, DamagedError

ALL = "all"
"""What stands for every stage on the command line."""


def states(planner: Planner, steps: list[Step]) -> dict[str, str]:
    """`fresh`, `would run` or `may run` by stage; behind one that has to run again, the input may turn out the same."""
    found = {}
    for step in steps:
        may = step.key is None and planner.ledger.head(step.stage.name)
        found[step.stage.name] = "fresh" if step.artifact else ("may run" if may else "would run")
    return found


def asked_for(project: Project, names: Sequence[str]) -> list[str] | None:
    """The stages that a command names; None for `all`.

    Raises:
        ConfigError: `all` beside a stage, or a name that is no stage; tells the nearest.
    """
    valid = [*(s.name for s in project.stages), ALL]
    for name in names:
        if name not in valid:
            raise ConfigError(f"there is no stage {name!r} here", hint=nearest(name, valid))
    if ALL not in names:
        return list(names)
    if len(names) > 1:
        raise ConfigError("`all` means every stage: give it alone, or name stages", hint=f"pipe run {ALL}")
    return None


def head(planner: Planner, stage: str) -> Record:
    """The record of a stage's newest run.

    Raises:
        PipeError: it has not run yet.
    """
    record = planner.ledger.head(stage)
    if record is None:  # no run is left that says so, yet its result may be there
        record = next(s.record for s in planner.steps() if s.stage.name == stage)
    if record is None:
        raise PipeError(f"stage {stage} has not run yet", hint=f"pipe run {stage}")
    return record


def artifact(project: Project, stage: str) -> tuple[Artifact, str]:
    """A stage's newest artifact, checked; and why it may not be the wanted one, empty where it is the configuration's.

    Raises:
        PipeError: there is none, or it is damaged or gone.
    """
    planner, again = open_planner(project), f"make it again with: pipe run {stage}"
    record = head(planner, project.stage(stage).name)
    try:
        found = planner.store.get(record.digest)
    except DamagedError as error:
        raise DamagedError(error.what, where=f"{stage} {record.digest[:12]}", hint=again) from None
    if found is None:
        raise PipeError(f"the artifact of {stage} is gone from the store", hint=again)
    return found, _doubt(planner, record, stage)


def _doubt(planner: Planner, record: Record, stage: str) -> str:
    if not record.passed:
        return f"the newest run of {stage} did not pass"
    now = next(s.artifact for s in planner.steps() if s.stage.name == record.stage)
    if now is not None and now.digest != record.digest:
        return f"the newest run of {stage} had other settings: pipe run {stage} goes back to those of pipe.yaml"
    return ""


def report_in(ledger: Ledger, run_id: str, stage: str) -> tuple[str, Report]:
    """A stage's report in another run, and the run's whole id.

    Raises:
        PipeError: there is no such run, or it has no such stage.
    """
    past = ledger.find_run(run_id, stage)
    record = next((r for r in past.records if r.stage == stage), None)
    if record is None:
        raise PipeError(f"run {past.id} has no stage {stage}", hint="name a run that went through it")
    return past.id, ledger.report(record)


def logs(planner: Planner, run: Run) -> dict[str, str]:
    """The training log (metrics.csv) beside each checkpoint of a run, by stage; none where the artifact is gone."""
    found = {}
    for record in (r for r in run.records if r.kind == "checkpoint"):
        with suppress(DamagedError):  # `pipe verify` tells; a report of the run can do without
            artifact = planner.store.get(record.digest)
            if artifact is not None and (file := artifact.path / "metrics.csv").is_file():
                found[record.stage] = file.read_text("utf-8")
    return found
