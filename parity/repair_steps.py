"""Repairs of a quantised model one after another, each judged by what it gains, and the table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layerline.graph.quantization import measured_plan
from layerline.graph.quantization.convert import Calibrated, Converted
from layerline.graph.quantization.repairs import Repair, Workshop
from layerline.parity.search_judge import Judge, Verdict
from layerline.pipeline.report import Report, Scalar

LEAST_GAIN_DB = 0.1
"""What the outputs must gain on calibration samples at least, for a repair to be judged."""


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """A model after its repairs.

    Attributes:
        calibrated: with the repairs that gained.
        converted: made from it.
        verdict: on that.
        evaluations: how many models were judged.
        rows: the table, a row for each repair that was tried.
    """

    calibrated: Calibrated
    converted: Converted
    verdict: Verdict
    evaluations: int
    rows: Sequence[Mapping[str, Scalar]]

    def added_to(self, report: Report) -> Report:
        """The report with the table."""
        return dataclasses.replace(report, tables={"repairs": self.rows, **report.tables})


def run(
    calibrated: Calibrated,
    names: Sequence[Repair],
    *,
    workshop: Workshop,
    finish: Callable[[Calibrated], tuple[Calibrated, Converted]],
    judge: Judge,
    stop: bool,
    said: Callable[[str], None],
) -> Repaired:
    """Makes those repairs that gain: the outputs on calibration samples, and the judge finds the model no worse.

    Args:
        calibrated: without corrected biases, which every repair changes.
        names: what is tried, in this order.
        workshop: tries them.
        finish: corrects biases, where that is wanted, and makes the model.
        judge: by the task's metric, else by the outputs on samples.
        stop: end as soon as the judge passes a model.
        said: called with a sentence for each repair.
    """
    outputs = measured_plan.Judge(calibrated.model, calibrated.feeds)
    finished, converted = finish(calibrated)
    verdict = judge(converted)
    said(f"all layers quantised: {verdict.seen}")
    before = outputs.least_db(converted.measured)
    evaluations = 1
    rows: list[Mapping[str, Scalar]] = []
    for name in names:
        if stop and verdict.passed:
            break
        repaired, changed = workshop.repaired(name, calibrated)
        row: dict[str, Scalar] = {"repair": name, "changed": changed, "outcome": "nothing to change"}
        rows.append(row)
        if not changed:
            continue
        new_finished, new_converted = finish(repaired)
        after = outputs.least_db(new_converted.measured)
        row |= {"before_db": before, "after_db": after, "outcome": "undone: the outputs do not gain"}
        if before is None or after is None or after >= before + LEAST_GAIN_DB:
            new_verdict = judge(new_converted)
            evaluations += 1
            row |= {"judged": f"{verdict.seen}, then {new_verdict.seen}", "outcome": "undone: other samples lose"}
            if new_verdict.passed or new_verdict.lack <= verdict.lack:
                row["outcome"] = "kept"
                calibrated, finished, converted = repaired, new_finished, new_converted
                verdict, before = new_verdict, after
        said(f"{name}: {row['outcome']}; {row.get('judged', '')}".rstrip("; "))
    return Repaired(calibrated=finished, converted=converted, verdict=verdict, evaluations=evaluations, rows=rows)
