"""Why quantize may have lost accuracy: rules of `pipe why` that look at its report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean

from layerline.pipeline.diagnosis.evidence import Cause, Evidence, Rule, finite, format_setting, of_lost
from layerline.pipeline.report import CLIPPED as BEYOND
from layerline.pipeline.report import GAIN, OWN, ROUNDING, LayerDiff, Report, Scalar

CLIPPED = 0.005  # share of a value's elements beyond its range from which clipping counts as a cause
MORE_CLIPPED = 4  # so many times more is clipped in evaluation than in calibration where the two have other data
LOW_DB = 20.0  # a layer with less by itself loses accuracy visibly: its error is a tenth of its signal
UNFIT_DB = 10.0  # below this a value lost its signal; int8 steps over the right range keep more of nearly any value
RANGE_USED = 0.125  # share of a range that calibration used from which downwards 3 bits of 8 are lost
# By so much a layer's own SQNR is lower than rounding explains: its error is twice as large. In sound models the two
# differ by what the rounding of biases and of a half type for the rest adds, a tenth of a dB where int8 loses much.
UNEXPLAINED_DB = 6.0
GREAT_GAIN = 10.0  # dB by which the outputs gain from one layer that is the reason by itself
LEAST_GAIN = 0.5  # by fewer dB the outputs hardly gain: other layers lose as much
# Least loss of a slice that counts, for metrics between 0 and 1. A slice has few samples: one of 50 is as much.
SLICE_LOSS = 0.02
UNEVEN_DB = 12.0  # the worst channel of a weight is so far below the whole: its values are a quarter of the others'
UNLIKE = "calibration data unlike eval_data()"
_UNLIKE_ADVICE = "calibrate on samples like those of eval_data(): the same preparation, and all classes"


@of_lost("quantize")
def clipped_range(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """Values of which a large share lies beyond the range that calibration chose."""
    clipped: list[tuple[bool, float, LayerDiff]] = []
    for record in report.records:
        share = finite(record.extra.get(BEYOND)) or 0.0
        least = _least_own(report, record.name)
        if share >= CLIPPED and (least is None or least < 2 * LOW_DB):
            clipped.append((least is None or least < LOW_DB, share, record))
    if not clipped:
        return
    harms, share, worst = max(clipped, key=lambda item: item[:2])
    text = f"{100 * share:.2g} % of {worst.where} lies beyond its range"
    if len(clipped) > 1:
        text += f", and more than {100 * CLIPPED:g} % of {len(clipped) - 1} other values"
    if worst.own_db is not None:
        text += f"; with exact inputs it has {worst.own_db:.1f} dB"
    advice, setting = "use a calibrator that keeps all values", "quantize.calibrator=minmax"
    # Nothing clips less than minmax: what it cuts off lies beyond all calibration samples.
    if evidence.setting("quantize", "calibrator") == "minmax":
        advice, setting = "calibrate on samples like those of eval_data()", ""
    confidence = min(0.9, 0.5 + 5 * share) if harms else 0.35
    yield Cause.at(worst, name="clipped range", evidence=text, advice=advice, setting=setting, confidence=confidence)


@of_lost("quantize")
def unlike_calibration(_: Evidence, report: Report) -> Iterator[Cause]:
    """Calibration samples that differ from eval_data(), by one of two signs."""
    cause = _clipped_in_evaluation(report) or _signal_lost_everywhere(report)
    if cause is not None:
        yield cause


def _clipped_in_evaluation(report: Report) -> Cause | None:
    """Values of which evaluation lies beyond the range far more often than calibration."""
    beyond: list[tuple[float, float, Mapping[str, Scalar]]] = []
    for row in report.tables.get("quantized", ()):
        in_calibration = finite(row.get(BEYOND))
        in_evaluation = finite(row.get("clipped_there"))
        if in_calibration is None or in_evaluation is None:
            continue
        least = _least_own(report, str(row["value"]))
        if least is None or least >= LOW_DB:
            continue
        if in_evaluation >= max(CLIPPED, MORE_CLIPPED * in_calibration):
            beyond.append((in_evaluation, in_calibration, row))
    if not beyond:
        return None
    in_evaluation, in_calibration, row = max(beyond, key=lambda item: item[0])
    text = f"{100 * in_evaluation:.2g} % of {row['value']} lies beyond its range on eval_data(), and "
    text += f"{100 * in_calibration:.2g} % in calibration; {len(beyond)} values are like that"
    return Cause.of_row(row, name=UNLIKE, evidence=text, advice=_UNLIKE_ADVICE, confidence=0.92)


def _signal_lost_everywhere(report: Report) -> Cause | None:
    """At least half of the values without signal, though the ranges cut off little of what calibration saw."""
    measured = [record for record in report.records if record.own_db is not None]
    low = [record for record in measured if _own(record) < UNFIT_DB]
    unfit = [record for record in low if (finite(record.extra.get(BEYOND)) or 0.0) < CLIPPED]
    shares = [finite(row.get(BEYOND)) for row in report.tables.get("quantized", ())]
    known_shares = [share for share in shares if share is not None]
    # Where most ranges cut off what calibration saw, the calibrator is the reason.
    mostly_clipped = 2 * sum(share >= CLIPPED for share in known_shares) > len(known_shares)
    if len(unfit) < 2 or len(unfit) * 2 < len(measured) or mostly_clipped:
        return None
    worst = min(unfit, key=_own)
    text = f"{len(unfit)} of {len(measured)} values have less than {UNFIT_DB:g} dB with exact inputs, down to "
    text += f"{worst.own_db:.1f} dB at {worst.where}, and calibration saw little beyond their ranges"
    return Cause.at(worst, name=UNLIKE, evidence=text, advice=_UNLIKE_ADVICE, confidence=0.92)


@of_lost("quantize")
def unexplained_error(_: Evidence, report: Report) -> Iterator[Cause]:
    """A layer whose error with exact inputs is far greater than what rounding its inputs and weights explains."""
    unexplained: list[LayerDiff] = []
    for record in report.records:
        rounding = record.extra.get(ROUNDING)
        # What loses less than a hundredth is no reason, whatever it comes from.
        if _own(record) < 2 * LOW_DB and isinstance(rounding, int | float) and rounding - _own(record) > UNEXPLAINED_DB:
            unexplained.append(record)
    if unexplained:
        worst = min(unexplained, key=_own)
        yield Cause.at(
            worst,
            name="the model computes otherwise than its plan",
            evidence=f"{worst.op} {worst.where} has {worst.own_db:.1f} dB with exact inputs, where rounding its inputs "
            f"and weights leaves {worst.extra[ROUNDING]:.1f} dB",
            advice="compare its bias, scales and zero points with plan.json: pipe plan; pipe why --repro shows it",
            confidence=0.94,
        )


@of_lost("quantize")
def coarse_range(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """A range far greater than the values that calibration saw: few of its steps are used."""
    for row in report.tables.get("quantized", ()):
        used = finite(row.get("range_used"))
        if row.get("role") != "activation" or used is None or not 0 < used < RANGE_USED:
            continue
        yield Cause.of_row(
            row,
            name="range far beyond the data",
            evidence=f"calibration saw {100 * used:.2g} % of the range of {row['value']}, which "
            f"{row.get('module') or 'a layer'} reads",
            advice="keep the layer in half precision, or mend the range that the model brings along",
            setting=format_setting(evidence, str(row.get("module") or row["value"])),
            confidence=min(0.9, 0.9 - used),
        )


@of_lost("quantize")
def uneven_channels(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """Weights of which some channels are far smaller than others, under one scale or scales that do not fit."""
    for row in report.tables.get("quantized", ()):
        whole, worst = finite(row.get("sqnr_db")), finite(row.get("worst_channel_db"))
        if row.get("role") != "weight" or whole is None or worst is None:
            continue
        if worst > LOW_DB or whole - worst < UNEVEN_DB:
            continue
        advice = "keep the layer in half precision"
        setting = format_setting(evidence, str(row.get("module") or row["value"]))
        scale, confidence = "a scale for each channel", 0.6
        if row.get("axis") is None:
            scale, confidence = "one scale for all channels", 0.85
            if evidence.setting("quantize", "per_channel") is False:
                advice, setting = "give each channel a scale", "quantize.per_channel=true"
        text = f"{row['value']} has {worst:.1f} dB in its worst channel and {whole:.1f} dB as a whole, with {scale}"
        yield Cause.of_row(
            row,
            name="uneven weight channels",
            evidence=text,
            advice=advice,
            setting=setting,
            confidence=confidence,
        )


@of_lost("quantize")
def sensitive_layers(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """Layers that lose most by themselves, with exact inputs; many small losses where no single one stands out."""
    rows = [record for record in report.sorted("own") if record.own_db is not None]
    # A layer may lose little by itself, but in what the outputs are computed from.
    low = [record for record in rows if _own(record) < LOW_DB or _gain(record) >= GREAT_GAIN]
    # What a layer loses by itself may be lost on the outputs: those first by which they gain.
    for record in sorted(low, key=lambda record: -_gain(record))[:3]:
        # Without its signal a layer is a better reason than a class that lost more than others.
        confidence = 0.65 if _own(record) < UNFIT_DB else 0.55
        text = f"{record.op} {record.where} has {record.own_db:.1f} dB with exact inputs"
        if GAIN in record.extra:
            gained = f"the outputs gain {_gain(record):.1f} dB by it alone in float"
            if _gain(record) == math.inf:
                gained = "the outputs have no error with it alone in float"
            text += f"; {gained}"
            # By itself it is not the reason.
            if _gain(record) < LEAST_GAIN:
                confidence = 0.45
        yield Cause.at(
            record,
            name="a layer that int8 does not suit",
            evidence=text,
            advice="keep it in half precision; `pipe tune` finds all that need it",
            setting=format_setting(evidence, record.name),
            confidence=confidence,
        )
    if rows and not low:
        text = f"no layer has less than {LOW_DB:g} dB by itself; the lowest is {rows[0].where} with "
        yield Cause.at(
            rows[0],
            name="many small losses",
            evidence=f"{text}{rows[0].own_db:.1f} dB",
            advice="let a search choose the layers that stay float: pipe tune",
            setting="quantize.search=true",
            confidence=0.4,
        )


def _gain(record: LayerDiff) -> float:
    """By how many dB the outputs gain without the layer's conversion; -inf where that was not measured."""
    gain = record.extra.get(GAIN)
    if isinstance(gain, int | float):
        return float(gain)
    return -math.inf


@of_lost("quantize")
def lost_slice(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """A class or slice that lost far more than all samples together: calibration data may have too little of it."""
    budgets = evidence.setting("quantize", "max_drop")
    changes: dict[str, list[tuple[float, str]]] = {}
    for row in report.tables.get("slices", ()):
        change = finite(row.get("change"))
        if change is None:
            continue
        metric = str(row["metric"])
        if isinstance(budgets, Mapping) and budgets.get(metric, {}).get("rise") is not None:
            change = -change  # less is better
        changes.setdefault(metric, []).append((change, str(row["slice"])))
    for metric, by_slice in changes.items():
        by_slice.sort()
        if len(by_slice) < 2:
            continue
        worst, slice_name = by_slice[0]
        others = fmean(change for change, _ in by_slice[1:])
        if worst < -SLICE_LOSS and worst < 3 * min(others, 0.0) - SLICE_LOSS:
            yield Cause(
                name="one class lost most",
                layer=slice_name,
                evidence=f"{metric} of {slice_name} got worse by {-worst:.3g}, "
                f"the others by {0.0 - others:.3g} on average",
                advice="give calib_data() samples of every class, as many of this one as of the others",
                confidence=0.6,
            )


def _own(record: LayerDiff) -> float:
    """SQNR with exact inputs; inf where there is no error or no figure."""
    return math.inf if record.own_db is None else record.own_db


def _least_own(report: Report, value: str) -> float | None:
    """The least SQNR, with exact inputs, of a value and of the layers that read it quantised; None if not measured.

    Rounding and clipping a value is an error of the layer that reads it.
    """
    readers = {""}
    for row in report.tables.get("quantized", ()):
        if row.get("value") == value:
            readers.update(str(row.get("module") or "").split(", "))
    readers.discard("")
    measured: list[float] = []
    for record in report.records:
        own = record.extra.get(OWN)
        concerned = record.name == value or not readers.isdisjoint(record.module.split(", "))
        if concerned and isinstance(own, int | float):
            measured.append(float(own))
    return min(measured, default=None)


RULES: tuple[Rule, ...] = (
    unexplained_error,
    clipped_range,
    coarse_range,
    unlike_calibration,
    uneven_channels,
    sensitive_layers,
    lost_slice,
)
