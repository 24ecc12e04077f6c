"""Why a stage may have lost accuracy: small rules from figures of its report to a cause and a change that addresses it.

A rule is a function that takes the evidence and gives the causes that it sees. Other distributions add theirs by the
entry points `layerline.causes`. Most rules look only at stages that lost something: a figure that is unusual in a model
that works is no fault. NaN and Inf, failed gates and a loss that rose at the end of training are reported of any stage.
Those of quantize stand in `quantize_causes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import metadata
from statistics import fmean, median

from layerline.pipeline.config.quantize_fields import HALF_TYPES
from layerline.pipeline.diagnosis import quantize_causes
from layerline.pipeline.diagnosis.evidence import Cause, Evidence, NonFinite, Rule, format_setting, of_lost
from layerline.pipeline.errors import Unavailable, brief
from layerline.pipeline.report import Gate, LayerDiff, Report

__all__ = ["Cause", "Evidence", "NonFinite", "Rule", "rules"]
GROUP = "layerline.causes"
PARITY = "a value differs from the stage before"
LOW_DB = 20.0  # BatchNorm outputs below this moved by more than a tenth of their size
LAG = 0.1  # relative distance of averaged weights from the online ones from which the average lags behind
FAR = 5.0  # by this factor a weight is further from the online one than half of the others


def rules() -> list[Rule]:
    """Ours, then those of other distributions.

    Raises:
        Unavailable: one of another distribution can't be imported; names its entry point.
    """
    result = list(RULES)
    for entry in metadata.entry_points(group=GROUP):
        try:
            result.append(entry.load())
        except Exception as error:  # the code of another distribution
            raise Unavailable(f"it can't be imported: {brief(error)}", where=f"entry point {GROUP}: {entry}") from error
    return result


def not_finite(evidence: Evidence) -> Iterator[Cause]:
    """A stage whose values are NaN or Inf where those of the stage before are not, on the probes or on eval_data()."""
    for stage in dict.fromkeys([*evidence.reports, *evidence.nonfinite]):
        report, samples = evidence.reports.get(stage), evidence.nonfinite.get(stage)
        records = () if report is None else report.records
        bad = [record for record in records if record.one_sided or record.nonfinite_b > record.nonfinite_a]
        if bad:
            first = bad[0]
            layer, value, count = first.where, first.name, first.one_sided or first.nonfinite_b
            text = f"{first.op} {first.where} is the first of {len(bad)} values with NaN or Inf: {count} elements"
        elif samples is not None:
            layer, value, text = samples.module or samples.value, samples.value, samples.text
            if value:
                text += f"; the first value that has them is {value}"
        else:
            continue
        name, setting = "values that are not finite", ""
        advice = "look at its inputs: for log, a root, a division or an overflow"
        if evidence.setting(stage, "mode") in HALF_TYPES or evidence.setting(stage, "rest") in HALF_TYPES:
            name, advice = "overflow of half precision", "keep the layer in float32"
            if value:
                setting = format_setting(evidence, value, "fp32")
        elif bad and stage in ("export", "fuse"):
            advice = f"look at its inputs: pipe debug {stage}"
        place = {"stage": stage, "layer": layer, "value": value}
        yield Cause(**place, name=name, evidence=text, advice=advice, setting=setting, confidence=0.95)


def parity_failed(evidence: Evidence) -> Iterator[Cause]:
    """The first value of an exported or rewritten model beyond its tolerance."""
    for stage in ("export", "import-onnx", "fuse"):
        report = evidence.reports.get(stage)
        first = None if report is None else report.first_failing()
        if first is None or first.one_sided:
            continue
        yield Cause.at(
            first,
            name=PARITY,
            stage=stage,
            evidence=f"{first.op} {first.where}: {first.fault}",
            advice=f"see the smallest model that shows it: pipe debug {stage}",
            # It names the layer; what gates say of the outputs follows from it.
            confidence=0.94,
        )


def failed_gates(evidence: Evidence) -> Iterator[Cause]:
    """Gates that say themselves what is wrong, such as calibration data of another size than the evaluation's."""
    for stage, report in evidence.reports.items():
        kinds: dict[str, list[Gate]] = {}
        for gate in report.gates:
            if gate.passed or "budget" in gate.name or gate.name in ("output SQNR", "output cosine", "search"):
                continue
            # "module itself, batch=1" and "module itself, batch=8" are one cause.
            kinds.setdefault(gate.name.split(",")[0], []).append(gate)
        for kind, gates in kinds.items():
            first = gates[0]
            place = "" if first.name == kind else f"{first.name.removeprefix(kind + ', ')}: "
            more = f"; {len(gates) - 1} more fail" if len(gates) > 1 else ""
            yield Cause(
                name=kind,
                stage=stage,
                evidence=f"{place}{first.seen}; expected {first.expected}{more}",
                advice=first.hint or f"see: pipe diff {stage}",
                confidence=0.93,  # a gate measured it; the rules below infer
            )


@of_lost("ema")
def average_lags(_: Evidence, report: Report) -> Iterator[Cause]:
    """Averaged weights that are still near where training began: most of them, or one."""
    rows = [r for r in report.records if r.op == "parameter" and r.rel_l2 is not None and not math.isnan(r.rel_l2)]
    if not rows:
        return
    worst = max(rows, key=_distance)
    lagging = sum(_distance(record) > LAG for record in rows)
    typical = median(map(_distance, rows))
    if lagging * 2 > len(rows):
        yield Cause.at(
            worst,
            name="the average lags behind",
            evidence=f"{lagging} of {len(rows)} averaged weights are more than {LAG:g} away from the online ones; "
            f"{worst.name} by {worst.rel_l2:.2g}",
            advice="let the average follow faster (a smaller train.training.ema_decay, or ema_warmup: true), or ship "
            "the online weights",
            setting="ema.weights=online",
            confidence=0.85,
        )
    elif _distance(worst) > max(LAG, FAR * typical):
        yield Cause.at(
            worst,
            name="a weight of the average is far from the online one",
            evidence=f"{worst.name} is {worst.rel_l2:.2g} away from the online weight; half of the weights are no more "
            f"than {typical:.2g} away",
            advice="average this weight from the same step on as the others, or ship the online weights",
            setting="ema.weights=online",
            confidence=0.82,
        )


def _distance(record: LayerDiff) -> float:
    """Relative distance of an averaged weight from the online one."""
    return record.rel_l2 or 0.0


@of_lost("ema")
def stale_statistics(_: Evidence, report: Report) -> Iterator[Cause]:
    """Outputs of BatchNorm that move although the averaged weights are near the online ones."""
    distances = [r.rel_l2 for r in report.records if r.op == "parameter" and r.rel_l2 is not None]
    if not distances or max(distances) > LAG:
        return
    for record in report.records:
        if record.op.startswith("BatchNorm") and record.sqnr_db is not None and record.sqnr_db < LOW_DB:
            yield Cause.at(
                record,
                name="stale BatchNorm statistics",
                evidence=f"{record.where} has {record.sqnr_db:.1f} dB, though no averaged weight is more than "
                f"{max(distances):.2g} away from the online one",
                advice="estimate the statistics again for the averaged weights, or ship the online weights",
                setting="ema.weights=online",
                confidence=0.8,
            )
            return


def training_diverged(evidence: Evidence) -> Iterator[Cause]:
    """A loss that ends far above its best."""
    for stage, rows in evidence.logs.items():
        losses = [row["loss"] for row in rows if "loss" in row]
        quarter = len(losses) // 4
        if quarter < 5 or any(not math.isfinite(loss) for loss in losses):
            continue
        best = min(fmean(losses[i : i + quarter]) for i in range(0, len(losses) - quarter + 1, quarter))
        last = fmean(losses[-quarter:])
        # Of the size of the loss: a log-likelihood is below 0.
        if last - best > max(0.5 * abs(best), 0.05):
            yield Cause(
                name="training got worse at the end",
                stage=stage,
                evidence=f"the loss averages {last:.3g} over the last quarter of the log, and {best:.3g} over its best",
                advice="lower the learning rate, or keep the best checkpoint: train.monitor.keep_best",
                confidence=0.7,
            )


RULES: tuple[Rule, ...] = (
    not_finite,
    parity_failed,
    failed_gates,
    *quantize_causes.RULES,
    average_lags,
    stale_statistics,
    training_diverged,
)
