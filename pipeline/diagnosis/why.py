"""`pipe why`: where accuracy was lost, by which cause, and what to change."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from layerline.pipeline.commands import lookup
from layerline.pipeline.commands.debug import debug
from layerline.pipeline.config.project import Project, load
from layerline.pipeline.diagnosis.causes import PARITY, RULES, Cause, Evidence, Rule, rules
from layerline.pipeline.errors import ConfigError, located
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.report import GAIN, LOST_OUTPUT, NO_METRIC, OWN, WARNING, LayerDiff, Report, Scalar
from layerline.pipeline.run.outcome import Listener
from layerline.pipeline.run.plan import open_planner
from layerline.pipeline.run.runner import Runner
from layerline.pipeline.run.workplace import temporary_work
from layerline.pipeline.stage import Log
from layerline.pipeline.task import Task

TABLES = ("metric by stage", "causes", "worst layers")
# By name, on use: they import onnx.
_SCORES = "layerline.parity.stage_scores"
_REPRO = "layerline.parity.stage_repro"
_WORST = 3  # layers of each stage


@dataclass(frozen=True)
class Explained:
    """The result of `pipe why`, and the data that it was measured on.

    Attributes:
        report: the verdict in its notes, and the tables "metric by stage", "causes" and "worst layers".
        causes: as `ranked` orders them.
        folders: the artifact of each stage.
        feeds: some batches of eval_data().
    """

    report: Report
    causes: Sequence[Cause]
    folders: Mapping[str, Path]
    feeds: Sequence[Any]


def explain(project: Project, log: Log, run_id: str | None = None) -> Explained:
    """Measures the metric after each stage of a run, and ranks the causes of what was lost.

    Nothing is run again and nothing is stored.

    Raises:
        PipeError: nothing has run yet.
    """
    planner = open_planner(project)
    run = lookup.find_run(planner, run_id)
    project = load(project.root, run.sets)  # the settings that the run had
    stages = {stage.name for stage in project.stages}
    reports: dict[str, Report] = {}
    folders: dict[str, Path] = {}
    # Sentences about stages whose accuracy is not known.
    unfinished: list[str] = []
    for stage, error in run.errors.items():
        unfinished.append(f"{stage} ended in an error, and was not evaluated: {located(error.where, error.error)}")
    for record in run.records:
        stage = record.stage
        if stage not in stages:
            continue
        reports[stage] = report = planner.ledger.report(record)
        if not report.passed and not report.is_wrong:
            unfinished.append(f"{stage} was not judged: {report.failure().what}")
        artifact = planner.store.get(record.digest)
        if artifact is not None:
            folders[stage] = artifact.path
        elif record.kind != "engine":  # which is not evaluated anyway
            unfinished.append(f"{stage} was not evaluated: its artifact was removed; pipe run {stage} makes it again")
    scores = _scores(project, folders, log)
    evidence = _evidence(project, reports, lookup.logs(planner, run), scores)
    causes = ranked(evidence)
    unfinished += scores.skipped
    return Explained(_report(evidence, causes, unfinished, scores), causes, folders, scores.feeds)


def from_reports(
    project: Project, run: Run, reports: Mapping[str, Report], logs: Mapping[str, lookup.LogRows]
) -> list[Cause]:
    """The ranked causes as far as the reports of a run hold them: nothing is measured, and no task is imported.

    Stages lost something if they did not pass. Rules of other distributions are left out: they are foreign code.
    """
    with suppress(ConfigError):  # pipe.yaml may have changed so that the overrides of the run no longer fit it
        project = load(project.root, run.sets)
    return ranked(_evidence(project, reports, logs), RULES)


def _evidence(
    project: Project, reports: Mapping[str, Report], logs: Mapping[str, lookup.LogRows], scores: Any = None
) -> Evidence:
    """What the rules look at. A stage that did not pass has lost something too, unless it could not be judged."""
    lost: dict[str, str] = {}
    for stage, report in reports.items():
        if report.is_wrong:
            lost[stage] = report.failure().what
        elif _notes(report, LOST_OUTPUT) and _notes(report, NO_METRIC):
            # No metric says whether the outputs may lose that much.
            lost[stage] = "; ".join(_notes(report, LOST_OUTPUT))
    nonfinite = {}
    if scores is not None:
        lost |= scores.losses
        nonfinite = scores.nonfinite
    losses = {stage.name: lost[stage.name] for stage in project.stages if stage.name in lost}
    settings = {stage.name: stage.model_dump() for stage in project.stages}
    return Evidence(reports=reports, settings=settings, losses=losses, logs=logs, nonfinite=nonfinite)


def ranked(evidence: Evidence, applied: Sequence[Rule] | None = None) -> list[Cause]:
    """What the rules see: of stages that lost something first, the earliest stage first, in it the likeliest cause."""
    order = list(dict.fromkeys([*evidence.reports, *evidence.losses]))
    if applied is None:
        applied = rules()
    causes = [cause for rule in applied for cause in rule(evidence)]

    def place(cause: Cause) -> tuple[bool, int, float]:
        at = order.index(cause.stage) if cause.stage in order else len(order)
        return cause.stage not in evidence.losses, at, -cause.confidence

    return sorted(causes, key=place)


def _scores(project: Project, folders: Mapping[str, Path], log: Log) -> Any:
    task = Task(project.root / project.task, project.root)
    modules: dict[str, Callable[[], Any]] = {}
    max_drop = None
    for stage in project.stages:
        # Stages that leave weights can open them as something to run.
        if hasattr(stage, "session") and stage.name in folders:
            modules[stage.name] = partial(stage.session, folders[stage.name], task)
        max_drop = getattr(stage, "max_drop", max_drop)
    with temporary_work(task, log, {}, {}) as work:
        return import_module(_SCORES).measure(work, folders, modules, max_drop)


def _report(evidence: Evidence, causes: list[Cause], unfinished: list[str], scores: Any) -> Report:
    worst: list[dict[str, Scalar]] = []
    warnings: list[str] = []
    for stage, report in evidence.reports.items():
        # Outputs may lose their signal though the metric stays.
        loss = evidence.losses.get(stage, "")
        warnings += [f"{stage}: {warning}" for warning in _notes(report, WARNING) if warning not in loss]
        if evidence.losses and stage not in evidence.losses:
            continue
        for record in report.sorted(report.order)[:_WORST]:
            own = record.extra.get(OWN)
            if record.passed and record.sqnr_db in (None, math.inf) and own in (None, math.inf):
                continue
            # A narrow terminal leaves out the last columns.
            row: dict[str, Scalar] = {"stage": stage, "layer": record.where, OWN: own, "sqnr_db": record.sqnr_db}
            row |= {GAIN: record.extra.get(GAIN), "value": record.name, "op": record.op}
            worst.append(row)
    tables = dict(zip(TABLES, (scores.rows, [cause.row() for cause in causes], worst), strict=True))
    notes = (*verdict(evidence, causes, unfinished), *warnings, *scores.notes)
    return Report(stage="why", notes=notes, tables=tables)


def _notes(report: Report, beginning: str) -> list[str]:
    """The notes of a kind, which their first words tell."""
    return [note for note in report.notes if note.startswith(beginning)]


def verdict(evidence: Evidence, causes: list[Cause], unfinished: Sequence[str] = ()) -> list[str]:
    """Where accuracy was lost, why, and what to do, in sentences.

    Args:
        unfinished: a sentence for each stage that ended in an error or whose model can't run.
    """
    sentences = [*unfinished]
    if not evidence.losses and not causes:
        where = "the stages that were evaluated" if unfinished else "any stage"
        return [*sentences, f"no loss was found in {where}"]
    for stage, what in evidence.losses.items():
        sentences.append(f"lost in {stage}: {what}")
        if not any(cause.stage == stage for cause in causes):
            sentences.append(f"no rule explains it: see pipe diff {stage}")
    if causes:
        cause = causes[0]
        layer = f" at {cause.place}" if cause.layer else ""
        sentences.append(f"likely cause: {cause.name}{layer} ({cause.evidence})")
        change = f", with --set {shlex.quote(cause.setting)}" if cause.setting else ""
        sentences.append(f"what to do: {cause.advice}{change}")
        if cause.stage in evidence.reports:
            sentences += _gain(evidence.reports[cause.stage], cause)
    return sentences


def _gain(report: Report, cause: Cause) -> list[str]:
    """What the outputs gain without the conversion of the layer, where that was measured."""
    for record in report.sorted("gain"):
        gain = record.extra.get(GAIN)
        is_meant = cause.value == record.name or cause.layer in (record.name, *record.module.split(", "))
        if is_meant and gain == math.inf:
            return [f"{record.name} alone in float leaves the outputs without an error"]
        if is_meant and isinstance(gain, int | float):
            return [f"{record.name} alone in float changes the SQNR of the outputs by {gain:+.1f} dB"]
    return []


@dataclass(frozen=True)
class Trial:
    """A change that was tried: the setting, and the same findings with it; or the reason why there is none to try."""

    setting: str = ""
    report: Report | None = None
    reason: str = ""


def attempt(project: Project, causes: Sequence[Cause], listener: Listener, run_id: str | None = None) -> Trial:
    """Runs what the change of the likeliest cause makes out of date, and explains that run.

    The results of other runs stay; the new run is the newest one.

    Raises:
        PipeError: a stage fails with the change.
    """
    if not causes:
        return Trial(reason="no cause was found")
    likeliest = causes[0]
    if not likeliest.setting:
        # A change for a less likely cause would show nothing.
        return Trial(reason=f"no change of pipe.yaml addresses the likeliest cause, {likeliest.name}")
    run = lookup.find_run(open_planner(project), run_id)
    changed = load(project.root, (*run.sets, likeliest.setting))
    # The engine is not evaluated, so it need not be built.
    stages = [record.stage for record in run.records if record.kind != "engine"]
    done = Runner(changed, listener).run(stages)
    for result in done.results:
        if result.error is not None and result.record is None:
            raise result.error
    return Trial(likeliest.setting, explain(changed, listener).report)


def reproduce(project: Project, explained: Explained, listener: Listener, folder: Path) -> LayerDiff | None:
    """Writes the smallest model that shows the likeliest cause, its inputs and a script.

    Returns:
        The value that it computes; None if no cause was found.

    Raises:
        PipeError: nothing of the cause shows in an ONNX model.
    """
    if not explained.causes:
        return None
    cause = explained.causes[0]
    # The reference of an export is torch.
    if cause.name == PARITY and cause.stage == "export":
        return debug(project, cause.stage, folder, listener)[0].records[0]
    row: LayerDiff = import_module(_REPRO).write(cause.stage, cause.value, explained.folders, explained.feeds, folder)
    return row
