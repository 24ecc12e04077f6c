"""`pipe report`: one run as one HTML file that loads nothing from elsewhere. page.html is its template."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from layerline.pipeline.commands import lookup
from layerline.pipeline.commands.lookup import LogRows, PastRun
from layerline.pipeline.commands.settings import changed, settings, versions
from layerline.pipeline.config.project import as_options
from layerline.pipeline.diagnosis import why
from layerline.pipeline.diagnosis.causes import Cause
from layerline.pipeline.reasons import UNSET
from layerline.pipeline.records.ledger import Record, Run
from layerline.pipeline.report import CHANNELS, CONVERGENCE, FLIPPED, HISTOGRAMS, Gate, Report, Scalar
from layerline.pipeline.run.plan import Planner
from layerline.views import document, glossary, plan_tree, run_comparison, summary
from layerline.views.curves import convergence, curves, validated
from layerline.views.follow import MERGED, Followed, by_module, by_own_error, follow, follow_views, in_network_order
from layerline.views.formatting import FAILED, amount, decibels, heading, number, outcome
from layerline.views.heat_map import heat_map
from layerline.views.lines import DEPLOYED
from layerline.views.screen import cleaned
from layerline.views.tables import Column, TableView, filled, free_table, records_table

MAIN_METRICS = 4
CAUSES = 5  # shown at most
CHANNELS_DRAWN = 8  # of an opened layer
ROWS_AT_FIRST = 25
LONG = 48  # characters; a longer text is wrapped, as in page.js
SUMMARY = (
    Column("stage"),
    Column("verdict"),
    Column("worst layer"),
    Column("own dB", "low"),
    Column("SQNR dB", "low"),
    Column("figures"),
    Column("compared", "number"),
    Column("failed", "number"),
    Column("seconds", "number"),
)


def of_run(planner: Planner, run: Run, compare: Sequence[str] = ()) -> str:
    """The page of a run, from what is stored; `compare` names other runs to put beside it."""
    project = planner.project
    reports = lookup.past(planner, run).reports
    logs = lookup.logs(planner, run)
    # A run that passed was asked for the stages it has; only a failed one leaves stages without a result.
    missing: list[str] = []
    if not run.passed:
        missing.extend(stage.name for stage in project.stages if stage.name not in reports)
    plans = {}
    for stage, path in lookup.files(planner, run, "quantized", plan_tree.FILE).items():
        plans[stage] = plan_tree.read(path)
    causes = why.from_reports(project, run, reports, logs)
    others = lookup.beside_run(planner, run, compare)
    return page(project.name, run, reports, missing, logs, causes, others, plans)


def page(
    title: str,
    run: Run,
    reports: Mapping[str, Report],
    missing: Sequence[str] = (),
    logs: Mapping[str, LogRows] | None = None,
    causes: Sequence[Cause] = (),
    others: Sequence[PastRun] = (),
    plans: Mapping[str, Mapping[str, plan_tree.PlanEntry]] | None = None,
) -> str:
    """The run as a self-contained page; the same input gives the same text.

    Control characters in names become escapes before anything else is done with them; the template escapes every text.

    Args:
        title: the project's name.
        reports: by stage; a stage without one is shown with what its record holds.
        missing: stages that a failed run left without a result.
        logs: by stage, the rows of the metrics.csv that a training left.
        others: runs to put beside it.
        plans: by stage, the entries of its quantisation plan.
    """
    title, run, reports, missing, causes = cleaned((title, run, reports, missing, causes))
    # In the order of the stages, which all tables of the page keep.
    of_run = {record.stage: reports[record.stage] for record in run.records if record.stage in reports}
    rows = follow(of_run)
    # A quantised model is ranked by the error that each layer adds itself: the heat map shows that one then.
    own_rows: Sequence[Followed] = ()
    if any(report.order == "own" for report in of_run.values()):
        own_rows = follow({stage: by_own_error(report) for stage, report in of_run.items()})
    layer_of = {row.value: row.layer for row in rows}
    stages = []
    for record in run.records:
        log = (logs or {}).get(record.stage, [])
        stage = _stage(record, of_run.get(record.stage), log, layer_of, earlier=record.stage not in run.ran)
        if plans and record.stage in plans:
            # The plan says of each layer why it stays float.
            tables = [table for table in stage["tables"] if table[0] != "stays float"]
            stage["tables"] = [*tables, ("plan", _plan(cleaned(plans[record.stage]), rows))]
        stages.append(stage)
    # What a cause may link to.
    layers: set[str] = set()
    for row in rows:
        layers.update((row.layer, row.value))
    drawn: dict[str, list[Mapping[str, Scalar]]] = {"histograms": [], "channels": []}
    for report in of_run.values():
        drawn["histograms"] += _drawn(report, HISTOGRAMS)
        drawn["channels"] += _channels(report)
    constants = {
        "FAILED": FAILED,
        "LONG": LONG,
        "MERGED": MERGED,
        "ROWS_AT_FIRST": ROWS_AT_FIRST,
        "SUMMARY": SUMMARY,
        "CAUSES": CAUSES,
    }
    functions = {f.__name__: f for f in (amount, as_options, grid_data, heading, outcome)}
    return document.template("page.html", {**constants, **functions}).render(
        **document.head("page.js", "img-src data:"),
        title=title,
        run=run,
        headline=summary.headline(of_run),
        facts=summary.facts(run, of_run, missing),
        failures=list(summary.failures(run, of_run)),
        causes=causes,
        layers=layers,
        beside=_beside(PastRun(run, of_run), others),
        stages=stages,
        heat_map=heat_map(by_module(own_rows or rows), list(of_run)),
        followed=follow_views(rows, list(of_run), own_rows),
        drawn=drawn,
        any_merged=any(row.into for row in rows),
        glossary=glossary.view(),
    )


def grid_data(views: Sequence[TableView], drawn: Mapping[str, Sequence[Mapping[str, Scalar]]]) -> dict[str, Any]:
    """All rows of a table's views, and what is drawn of their values (histograms, channels), for page.js."""
    data = []
    for view in views:
        columns = {"heads": [c.label for c in view.columns], "kinds": [c.kind for c in view.columns]}
        data.append({"label": view.label, **columns, "rows": view.rows})
    return {"first": ROWS_AT_FIRST, "views": data, "drawn": drawn}


def _beside(now: PastRun, others: Sequence[PastRun]) -> dict[str, Any] | None:
    """What differs between runs: in words, their figures, and the layers that moved."""
    if not others:
        return None
    runs = [(past.run, changed(now.run.records, past.run.records)) for past in others]
    # Names come from files of other runs, which are as little trusted as those of this one.
    return cleaned(
        {"runs": runs, "figures": run_comparison.figures(now, others), "moved": run_comparison.moved(now, others)}
    )


def _plan(entries: Mapping[str, plan_tree.PlanEntry], rows: Sequence[Followed]) -> TableView:
    """The entries of a plan under their modules, in the network's order."""
    places = {row.layer: place for place, row in enumerate(rows)}
    cells = []
    for name, entry in entries.items():
        cells.append((str(entry.get("module", "")), name, plan_tree.text(entry)))
    # A module that no comparison reached goes to the end.
    cells.sort(key=lambda row: places.get(row[0], len(places)))
    return TableView("plan", (Column("module"), Column("value"), Column("how it is quantised")), cells)


def _stage(
    record: Record, report: Report | None, log: LogRows, layer_of: Mapping[str, str], *, earlier: bool
) -> dict[str, Any]:
    """What the page shows of a stage.

    Args:
        layer_of: the layer under which a value stands on this page; the record has the name after fusion.
        earlier: whether the artifact comes from an earlier run.
    """
    worst = record.worst or {}
    levels = {"SQNR dB": decibels(number(worst.get("sqnr_db"))), "own dB": decibels(number(worst.get("own_sqnr_db")))}
    layer = layer_of.get(str(worst.get("value")), str(worst.get("layer", "")))
    # Where nothing differs there is no worst layer to name.
    if set(levels.values()) <= {"", "equal"}:
        layer = ""
    overview = {**levels, "seconds": f"{record.seconds:.1f}"}
    if report and report.records:
        overview["compared"] = str(len(report.records))
        overview["failed"] = str(sum(not r.passed for r in report.records))
    # Figures in DEPLOYED come first, so that the limit never cuts them.
    names = sorted(record.metrics, key=lambda name: name not in DEPLOYED)
    figures = [(name, record.metrics[name]) for name in names if record.metrics[name] is not None]
    finished = f"{record.created}, after {record.seconds:.1f} s"
    if earlier:
        finished += ", in an earlier run"
    stage: dict[str, Any] = {
        "record": record,
        "report": report,
        "summary": overview,
        "worst_layer": layer,
        "figures": figures[:MAIN_METRICS],
        "curves": curves(log),
        "validated": validated(log),
        "settings": _settings(record),
        "facts": {"finished": finished, **_made_with(record)},
    }
    if report:
        stage["gates"] = _gates(report.gates)
        stage["tables"] = []
        for title, rows in report.tables.items():
            # What is drawn is not repeated as a table.
            if rows and not _drawn(report, title):
                stage["tables"].append((title, free_table(rows)))
        stage["convergence"] = convergence(_drawn(report, CONVERGENCE))
        stage["flipped"] = _drawn(report, FLIPPED)
        stage["layers"] = records_table(in_network_order(report.records), report.order)
    return stage


# What the rows of a drawn table must have as finite numbers.
_NUMBERS = {HISTOGRAMS: ("range", "end"), FLIPPED: ("sample",), CONVERGENCE: ("samples",)}
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+=*")


def _drawn(report: Report, title: str) -> Sequence[Mapping[str, Scalar]]:
    """The rows of a table that the page draws. None for other tables, and where a stage gives it another form."""
    if title not in _NUMBERS:
        return ()
    rows = report.tables.get(title, ())
    for row in rows:
        for column in _NUMBERS[title]:
            value = row.get(column)
            if not isinstance(value, int | float) or not math.isfinite(value):
                return ()
        if title == HISTOGRAMS and "profile" not in row:
            return ()
        if title == FLIPPED and "text" not in row and _PICTURE.fullmatch(str(row.get("picture"))) is None:
            return ()
    return rows


def _channels(report: Report) -> list[dict[str, Scalar]]:
    """The channels that make the greatest part of each layer's own error, as far as the stage measured it."""
    of_layer: dict[str, list[dict[str, Scalar]]] = {}
    for row in report.tables.get(CHANNELS, ()):
        level = number(row.get("own_sqnr_db"))
        share = number(row.get("share"))
        # A stage of someone's own may leave anything in a table of this name.
        if level is not None and share is not None and math.isfinite(level) and math.isfinite(share):
            drawn = {name: row.get(name) for name in ("value", "module", "channel")}
            of_layer.setdefault(str(row.get("value")), []).append({**drawn, "own": decibels(level), "share": share})
    rows = []
    for channels in of_layer.values():
        channels.sort(key=lambda row: -float(row["share"] or 0))
        rows += channels[:CHANNELS_DRAWN]
    return rows


def _gates(gates: Sequence[Gate]) -> TableView:
    columns = (Column("gate"), Column("verdict", "verdict"), Column("seen"), Column("expected"), Column("what to do"))
    rows = []
    for gate in gates:
        row = [gate.name, outcome(gate.passed), gate.seen, gate.expected, ""]
        if not gate.passed:
            row[-1] = gate.hint
        rows.append(row)
    return filled(columns, rows)


def _made_with(record: Record) -> dict[str, str]:
    """The settings that differ from their defaults, and the versions, each as one line."""
    fields = settings(record)
    differing = ", ".join(f"{field.name}: {field.value}" for field in fields if field.differs)
    if fields and not differing:
        differing = "the defaults"
    made_with = {}
    if differing:
        made_with["settings"] = differing
    computed_by = ", ".join(f"{name} {version}" for name, version in versions(record).items())
    if computed_by:
        made_with["versions"] = computed_by
    return made_with


def _settings(record: Record) -> TableView:
    """Every field of the stage, those that differ from their defaults first."""
    rows = []
    for field in settings(record):
        row = [field.name, _written(field.value), ""]
        if field.differs:
            row[-1] = _written(field.default)
        rows.append(row)
    return TableView("Settings", (Column("field"), Column("value"), Column("default")), rows)


def _written(value: str | None) -> str:
    if value is None or value in UNSET:
        return "not set"
    return value
