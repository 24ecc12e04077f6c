"""The top of the page: the figures of the result, what went wrong, the likely causes, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerline.pipeline.errors import located
from layerline.pipeline.records.ledger import Run
from layerline.pipeline.report import Report, Scalar
from layerline.views.formatting import amount, count, decibels, figure, number

HALF = ("fp16_nodes", "bf16_nodes")
COMPUTE = "compute_"


@dataclass(frozen=True)
class Headline:
    """One figure of the result, large, with a remark below it."""

    label: str
    value: str
    remark: str = ""


def headline(reports: Mapping[str, Report]) -> list[Headline]:
    """Metrics with the interval of what they lost, size, precision and the outputs' SQNR, as far as measured."""
    figures: list[Headline] = []
    for report in reports.values():
        metrics = report.metrics
        # The task's metrics come first: they are what the run is for.
        figures += [_metric(row) for row in report.tables.get("metrics", ())]
        if "bytes_after" in metrics:
            figures.append(_size(metrics.get("bytes_before"), metrics["bytes_after"]))
        if "int8_products" in metrics:
            figures.append(Headline("precision", "int8", f"{metrics['int8_products']} matrix products"))
        # Half precision may stand beside int8, where what stays float is converted too.
        for name in HALF:
            if name in metrics:
                figures.append(Headline("precision", name.removesuffix("_nodes"), f"{metrics[name]} nodes"))
        if "output_sqnr_db" in metrics:
            db = metrics["output_sqnr_db"]
            figures.append(Headline("SQNR of the outputs", f"{decibels(number(db))} dB"))
        if "engine_bytes" in metrics:
            # An engine decides for each layer what it computes in.
            layers = [f"{n} in {name.removeprefix(COMPUTE)}" for name, n in metrics.items() if name.startswith(COMPUTE)]
            figures.append(Headline("engine", amount("engine_bytes", metrics["engine_bytes"]), ", ".join(layers)))
    return figures


def _metric(row: Mapping[str, Scalar]) -> Headline:
    remark = f"float {figure(row.get('float'))}"
    change = number(row.get("change"))
    if change is not None:
        remark += f", change {change:+.3g}"
    low, high = number(row.get("low_95")), number(row.get("high_95"))
    if low is not None and high is not None:
        remark += f" (95 %: {low:+.3g} to {high:+.3g})"
    if row.get("budget"):
        remark += f"; budget: {row['budget']}"
    return Headline(str(row.get("metric")), figure(row.get("converted")), remark)


def _size(before: Scalar, after: Scalar) -> Headline:
    small, large = number(after), number(before)
    remark = f"float {amount('bytes', before)}"
    # A model that did not get smaller has no factor worth a line.
    if small and large and large > small:
        remark += f", {large / small:.3g} times smaller"
    return Headline("size", amount("bytes", after), remark)


def facts(run: Run, reports: Mapping[str, Report], missing: Sequence[str]) -> list[str]:
    """The run in a few figures."""
    records = [record for report in reports.values() for record in report.records]
    gates = [gate for report in reports.values() for gate in report.gates]
    ran = [record for record in run.records if record.stage in run.ran]
    # Found cached: their seconds were spent in an earlier run.
    kept = len(run.records) - len(ran)
    failed_gates = sum(not gate.passed for gate in gates)
    facts = [
        count(len(run.records), "stage"),
        f"{sum(record.seconds for record in ran):.1f} s of work",
        count(len(records), "comparison"),
        f"{sum(not record.passed for record in records)} beyond tolerance",
    ]
    if kept:
        facts.append(f"{count(kept, 'stage')} from an earlier run")
    if failed_gates:
        facts.append(f"{count(failed_gates, 'gate')} failed")
    if missing:
        facts.append(f"without a result: {', '.join(missing)}")
    return facts


def failures(run: Run, reports: Mapping[str, Report]) -> Iterator[tuple[str, str, str]]:
    """What went wrong, in the words of the command line: stage, sentence, hint."""
    for stage, report in reports.items():
        if not report.passed:
            failure = report.failure()
            yield stage, failure.what, failure.hint
    for stage, error in run.errors.items():
        yield stage, located(error.where, error.error), error.hint or ""
    # A gate may be known from the record alone, where the report was damaged or removed.
    failed = [record.stage for record in run.records if not record.passed]
    for stage in failed:
        if stage not in reports or reports[stage].passed:
            yield stage, "did not pass", ""
    if not (run.passed or failed or run.errors):
        # Killed, or a machine that went down.
        yield "", "A stage stopped before it left a record.", ""
