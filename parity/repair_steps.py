"""Tries the repairs of a quantised model one after another, and keeps those that improve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layerline.calib.hold_out import TOO_FEW
from layerline.graph.quantization import measured_plan
from layerline.graph.quantization.convert import Calibrated, Converted
from layerline.graph.quantization.repairs import Repairer
from layerline.parity.search_judge import JudgeConverted, Verdict
from layerline.pipeline.config.quantize_fields import Repair
from layerline.pipeline.report import Report, Scalar


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """A model after its repairs."""

    calibrated: Calibrated  # with the repairs that gained
    converted: Converted  # the quantised model made from it
    plain: Converted  # the quantised model before any repair
    verdict: Verdict  # the judge's verdict on `converted`
    evaluations: int  # how many models were judged
    rows: Sequence[Mapping[str, Scalar]]  # one row of the report's table `repairs` for each repair that was tried

    def added_to(self, report: Report) -> Report:
        """The report with the table `repairs`, and what each did in words."""
        notes = [f"{row['repair']}: {row['outcome']}; {row['measured']}" for row in self.rows]
        tables = {"repairs": self.rows, **report.tables}
        return dataclasses.replace(report, notes=(*notes, *report.notes), tables=tables)


def run(
    calibrated: Calibrated,
    names: Sequence[Repair],
    *,
    repairer: Repairer,
    finish: Callable[[Calibrated], tuple[Calibrated, Converted]],
    judge: JudgeConverted,
    stop: bool,
    log: Callable[[str], None],
) -> Repaired:
    """Keeps a repair if the outputs gain on held-out samples and the judge finds the model no worse.

    Args:
        calibrated: without bias correction, which has to follow the last repair.
        finish: corrects biases, if that is configured, and makes the quantised model.
        stop: whether to end as soon as the judge passes a model.
    """
    finished, converted = finish(calibrated)
    plain = converted
    verdict = judge(converted)
    log(f"all layers quantised: {verdict.seen}")
    evaluations = 1
    rows: list[Mapping[str, Scalar]] = []
    if not calibrated.held_out:
        rows = [{"repair": name, "outcome": "not tried", "measured": TOO_FEW} for name in names]
        names = ()
    trials = measured_plan.Trials(calibrated.model, calibrated.feeds, calibrated.held_out)
    before = trials.decibels(converted.measured)
    for name in names:
        if stop and verdict.passed:
            break
        repaired, changed = repairer.apply(name, calibrated)
        if not changed:
            nothing = "no layer that it is for"
            rows.append({"repair": name, "outcome": "not applied", "measured": nothing})
            log(f"{name}: not applied; {nothing}")
            continue
        row: dict[str, Scalar] = {"repair": name, "outcome": "undone", "measured": changed}
        rows.append(row)
        new_finished, new_converted = finish(repaired)
        after = trials.decibels(new_converted.measured)
        measured = changed
        gain = measured_plan.least_gain(before, after)
        if gain is not None:
            row |= {"without_db": before[-1], "with_db": after[-1]}
            measured += f"; {measured_plan.gain_text(trials.place, before[-1], after[-1])}"
        if gain is None or gain >= measured_plan.LEAST_GAIN_DB:
            new_verdict = judge(new_converted)
            evaluations += 1
            measured += f"; judged: {new_verdict.seen} with it, {verdict.seen} without"
            # A budget that still holds does not excuse a loss of the judged figure.
            if new_verdict.lack <= verdict.lack:
                row["outcome"] = "kept"
                calibrated, finished, converted = repaired, new_finished, new_converted
                verdict, before = new_verdict, after
        row["measured"] = measured
        log(f"{name}: {row['outcome']}; {measured}")
    return Repaired(
        calibrated=finished, converted=converted, plain=plain, verdict=verdict, evaluations=evaluations, rows=rows
    )
