"""Why a stage may have lost accuracy: small rules from figures of its report to a cause and a change that addresses it.

A rule is a function that takes the evidence and gives the causes that it sees. Other distributions add theirs by the
entry points `layerline.causes`. Most rules look only at stages that lost something: a figure that is unusual in a model
that works is no fault. NaN and Inf, failed gates and a loss that rose at the end of training are reported of any stage.
"""

from __future__ import annotations

import functools
import glob
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from statistics import fmean
from typing import Any, Protocol

from layerline.pipeline.errors import Unavailable, brief
from layerline.pipeline.report import OWN, LayerDiff, Report, Scalar

GROUP = "layerline.causes"
CLIPPED = 0.005
"""Share of a value's elements beyond its range from which clipping counts as a cause."""
LOW_DB = 20.0
"""A layer with less SQNR by itself loses accuracy visibly: its error is a tenth of its signal."""
UNFIT_DB = 10.0
"""Below this a value lost its signal. int8 steps over the right range keep more of nearly any value."""
RANGE_USED = 0.125
"""Share of a range that calibration used from which downwards 3 bits of 8 are lost."""
UNEVEN_DB = 12.0
"""The worst channel of a weight lies so far below the whole: its values are a quarter of the others' size."""
HALF_TYPES = ("fp16", "bf16")
LAG = 0.1
"""Relative distance of averaged weights from the online ones from which the average lags behind."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One possible reason.

    Attributes:
        name: in a few words ("clipped range").
        stage: where the accuracy was lost.
        layer: the value or module; empty where the whole stage is meant.
        evidence: the figures that speak for it.
        advice: what to change.
        setting: the change as `key.path=value` of pipe.yaml; empty where it is another kind of change.
        confidence: from 0 to 1, by which causes are ranked.
    """

    name: str
    stage: str
    layer: str = ""
    evidence: str
    advice: str
    setting: str = ""
    confidence: float

    def row(self) -> dict[str, Scalar]:
        return {
            "cause": self.name,
            "stage": self.stage,
            "layer": self.layer,
            "evidence": self.evidence,
            "advice": self.advice,
            "setting": self.setting,
            "confidence": round(self.confidence, 2),
        }


class NonFinite(Protocol):
    """Samples with NaN or Inf in their outputs; the first value that has them, and its module, where that is known."""

    @property
    def text(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def module(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the rules may look at.

    Attributes:
        reports: by stage, in the order in which they ran.
        settings: the fields of each stage's configuration.
        losses: by stage that lost something: what, in words.
        logs: the rows of metrics.csv by training stage.
        nonfinite: by stage, the samples of eval_data() whose outputs it made NaN or Inf.
    """

    reports: Mapping[str, Report]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)
    logs: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    nonfinite: Mapping[str, NonFinite] = field(default_factory=dict)

    def lost(self, stage: str) -> Report | None:
        """The report of a stage that lost something; None if it did not, or has none."""
        return self.reports.get(stage) if stage in self.losses else None

    def setting(self, stage: str, name: str) -> Any:
        return self.settings.get(stage, {}).get(name)


Rule = Callable[[Evidence], Iterable[Cause]]


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
            layer, count = first.name, first.one_sided or first.nonfinite_b
            text = f"{first.op} {first.where} is the first of {len(bad)} values with NaN or Inf: {count} elements"
        elif samples is not None:
            layer, text = samples.value, samples.text
            if samples.value:
                text += f"; the first value that has them is {samples.value}"
            if samples.module:
                text += f" of {samples.module}"
        else:
            continue
        half = evidence.setting(stage, "mode") in HALF_TYPES or evidence.setting(stage, "rest") in HALF_TYPES
        name = "overflow of half precision" if half else "values that are not finite"
        setting = ""
        if half:
            advice = "keep the layer in float32"
            if layer:
                setting = _layer(evidence, layer, "fp32")
        elif bad and stage in ("export", "fuse"):
            advice = f"look at its inputs: pipe debug {stage}"
        else:
            advice = "look at its inputs: for log, a root, a division or an overflow"
        yield Cause(name=name, stage=stage, layer=layer, evidence=text, advice=advice, setting=setting, confidence=0.95)


def parity_failed(evidence: Evidence) -> Iterator[Cause]:
    """The first value of an exported or rewritten model beyond its tolerance."""
    for stage in ("export", "import-onnx", "fuse"):
        report = evidence.reports.get(stage)
        first = None if report is None else report.first_failing()
        if first is None or first.one_sided:
            continue
        measured = _figure(getattr(first, first.judged))
        cause = first.extra.get("cause")
        yield Cause(
            name="a value differs from the stage before",
            stage=stage,
            layer=first.name,
            evidence=f"{first.op} {first.where}: {first.judged} {measured}, tolerance {_figure(first.tolerance)}"
            + (f"; {cause}" if cause else ""),
            advice=f"see the smallest model that shows it: pipe debug {stage}",
            confidence=0.9,
        )


def failed_gates(evidence: Evidence) -> Iterator[Cause]:
    """Gates that say themselves what is wrong, such as calibration data of another size than the evaluation's."""
    for stage, report in evidence.reports.items():
        for gate in report.gates:
            if gate.passed or "budget" in gate.name or gate.name in ("output SQNR", "output cosine", "search"):
                continue
            yield Cause(
                name=gate.name,
                stage=stage,
                evidence=f"{gate.seen}; expected {gate.expected}",
                advice=gate.hint or f"see: pipe diff {stage}",
                confidence=0.93,  # a gate measured it; the rules below infer
            )


def _of_lost(stage: str) -> Callable[[Callable[[Evidence, Report], Iterator[Cause]]], Rule]:
    """Makes a rule of a function that takes the report of a stage: it is called where that stage lost something."""

    def as_rule(look: Callable[[Evidence, Report], Iterator[Cause]]) -> Rule:
        @functools.wraps(look)
        def rule(evidence: Evidence) -> Iterator[Cause]:
            report = evidence.lost(stage)
            if report is not None:
                yield from look(evidence, report)

        return rule

    return as_rule


@_of_lost("quantize")
def clipped_range(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """Values of which a large share lies beyond the range that calibration chose."""
    clipped: list[tuple[float, LayerDiff]] = []
    harmful: list[tuple[float, LayerDiff]] = []
    for record in report.records:
        share, least = _finite(record.extra.get("clipped")), _least_own(report, record)
        if share is None or share < CLIPPED or (least is not None and least >= 2 * LOW_DB):
            continue
        clipped.append((share, record))
        if least is None or least < LOW_DB:
            harmful.append((share, record))
    if not clipped:
        return
    share, worst = max(harmful or clipped, key=lambda pair: pair[0])
    others = f", and more than {100 * CLIPPED:g} % of {len(clipped) - 1} other values" if len(clipped) > 1 else ""
    # Nothing clips less than minmax: what it cuts off lies beyond all calibration samples.
    widest = evidence.setting("quantize", "calibrator") == "minmax"
    yield Cause(
        name="clipped range",
        stage="quantize",
        layer=worst.name,
        evidence=f"{100 * share:.2g} % of {worst.where} lies beyond its range{others}{_own_text(worst)}",
        advice="calibrate on samples like those of eval_data()" if widest else "use a calibrator that keeps all values",
        setting="" if widest else "quantize.calibrator=minmax",
        confidence=min(0.9, 0.5 + 5 * share) if harmful else 0.35,
    )


@_of_lost("quantize")
def unlike_calibration(_: Evidence, report: Report) -> Iterator[Cause]:
    """Most layers lose their signal by themselves, though calibration saw little beyond their ranges."""
    measured = [record for record in report.records if record.own_db is not None]
    unfit: list[tuple[float, LayerDiff]] = []
    for record in measured:
        own, share = record.own_db, _finite(record.extra.get("clipped"))
        if own is not None and own < UNFIT_DB and (share is None or share < CLIPPED):
            unfit.append((own, record))
    shares = [_finite(row.get("clipped")) for row in report.tables.get("quantized", ())]
    clipped = [share for share in shares if share is not None and share >= CLIPPED]
    # Where most ranges cut off what calibration saw, the calibrator is the reason.
    if len(unfit) * 2 < len(measured) or len(unfit) < 2 or len(clipped) * 2 > len([s for s in shares if s is not None]):
        return
    own, worst = min(unfit, key=lambda pair: pair[0])
    yield Cause(
        name="calibration data unlike eval_data()",
        stage="quantize",
        layer=worst.name,
        evidence=f"{len(unfit)} of {len(measured)} values have less than {UNFIT_DB:g} dB with exact inputs, down to "
        f"{own:.1f} dB at {worst.where}, and calibration saw little beyond their ranges",
        advice="calibrate on samples like those of eval_data(): the same preparation, and all classes",
        confidence=0.92,
    )


@_of_lost("quantize")
def coarse_range(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """A range far greater than the values that calibration saw: few of its steps are used."""
    for row in report.tables.get("quantized", ()):
        used = _finite(row.get("range_used"))
        if row.get("role") != "activation" or used is None or not 0 < used < RANGE_USED:
            continue
        yield Cause(
            name="range far beyond the data",
            stage="quantize",
            layer=str(row["value"]),
            evidence=f"calibration saw {100 * used:.2g} % of the range of {row['value']}, which "
            f"{row.get('module') or 'a layer'} reads",
            advice="keep the layer in half precision, or mend the range that the model brings along",
            setting=_layer(evidence, str(row.get("module") or row["value"])),
            confidence=min(0.9, 0.9 - used),
        )


@_of_lost("quantize")
def uneven_channels(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """Weights of which some channels are far smaller than others, under one scale or scales that do not fit."""
    for row in report.tables.get("quantized", ()):
        whole, worst = _finite(row.get("sqnr_db")), _finite(row.get("worst_channel_db"))
        if row.get("role") != "weight" or whole is None or worst is None:
            continue
        per_tensor = row.get("axis") is None
        if worst > LOW_DB or whole - worst < UNEVEN_DB:
            continue
        name = str(row["value"])
        layer = str(row.get("module") or name)
        scale = "one scale for all channels" if per_tensor else "a scale for each channel"
        turn_on = per_tensor and evidence.setting("quantize", "per_channel") is False
        yield Cause(
            name="uneven weight channels",
            stage="quantize",
            layer=layer,
            evidence=f"{name} has {worst:.1f} dB in its worst channel and {whole:.1f} dB as a whole, with {scale}",
            advice="give each channel a scale" if turn_on else "keep the layer in half precision",
            setting="quantize.per_channel=true" if turn_on else _layer(evidence, layer),
            confidence=0.85 if per_tensor else 0.6,
        )


@_of_lost("quantize")
def sensitive_layers(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """Layers that lose most by themselves, with exact inputs; many small losses where no single one stands out."""
    rows: list[tuple[float, LayerDiff]] = []
    for record in report.records:
        own = record.own_db
        if own is not None:
            rows.append((own, record))
    rows.sort(key=lambda row: row[0])
    low = [row for row in rows if row[0] < LOW_DB]
    for own, record in low[:3]:
        yield Cause(
            name="a layer that int8 does not suit",
            stage="quantize",
            layer=record.name,
            evidence=f"{record.op} {record.where} has {own:.1f} dB with exact inputs",
            advice="keep it in half precision; `pipe tune` finds all that need it",
            setting=_layer(evidence, record.name),
            confidence=0.55,
        )
    if rows and not low:
        own, record = rows[0]
        yield Cause(
            name="many small losses",
            stage="quantize",
            layer=record.name,
            evidence=f"no layer has less than {LOW_DB:g} dB by itself; the lowest is {record.where} with {own:.1f} dB",
            advice="let a search choose the layers that stay float: pipe tune",
            setting="quantize.search=true",
            confidence=0.4,
        )


@_of_lost("quantize")
def lost_slice(evidence: Evidence, report: Report) -> Iterator[Cause]:
    """A class or slice that lost far more than all samples together: calibration data may have too little of it."""
    budgets = evidence.setting("quantize", "max_drop")
    changes: dict[str, list[tuple[float, str]]] = {}
    for row in report.tables.get("slices", ()):
        change = _finite(row.get("change"))
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
        if worst < -0.02 and worst < 3 * min(others, 0.0) - 0.02:
            yield Cause(
                name="one class lost most",
                stage="quantize",
                layer=slice_name,
                evidence=f"{metric} of {slice_name} got worse by {-worst:.3g}, "
                f"the others by {0.0 - others:.3g} on average",
                advice="give calib_data() samples of every class, as many of this one as of the others",
                confidence=0.6,
            )


@_of_lost("ema")
def average_lags(_: Evidence, report: Report) -> Iterator[Cause]:
    """Averaged weights that are still near where training began."""
    rows = [r for r in report.records if r.op == "parameter" and r.rel_l2 is not None]
    lagging = [record for record in rows if record.rel_l2 is not None and record.rel_l2 > LAG]
    if len(lagging) * 2 > len(rows):
        worst = max(lagging, key=lambda record: record.rel_l2 or 0.0)
        yield Cause(
            name="the average lags behind",
            stage="ema",
            layer=worst.name,
            evidence=f"{len(lagging)} of {len(rows)} averaged weights are more than {LAG:g} away from the online ones; "
            f"{worst.name} by {worst.rel_l2:.2g}",
            advice="let the average follow faster (a smaller train.training.ema_decay, or ema_warmup: true), or ship "
            "the online weights",
            setting="ema.weights=online",
            confidence=0.85,
        )


@_of_lost("ema")
def stale_statistics(_: Evidence, report: Report) -> Iterator[Cause]:
    """Outputs of BatchNorm that move although the averaged weights are near the online ones."""
    parameters = {r.name: r.rel_l2 for r in report.records if r.op == "parameter" and r.rel_l2 is not None}
    if not parameters or max(parameters.values()) > LAG:
        return
    for record in report.records:
        if record.op.startswith("BatchNorm") and record.sqnr_db is not None and record.sqnr_db < LOW_DB:
            yield Cause(
                name="stale BatchNorm statistics",
                stage="ema",
                layer=record.name,
                evidence=f"{record.where} has {record.sqnr_db:.1f} dB, though no averaged weight is more than "
                f"{max(parameters.values()):.2g} away from the online one",
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
    clipped_range,
    coarse_range,
    unlike_calibration,
    uneven_channels,
    sensitive_layers,
    lost_slice,
    average_lags,
    stale_statistics,
    training_diverged,
)


def _layer(evidence: Evidence, name: str, chosen: str = "") -> str:
    """The setting that gives one more layer a format of its own: the half type in use, if none is named."""
    layers = dict(evidence.setting("quantize", "layers") or {})
    in_use = [wanted for wanted in (*layers.values(), evidence.setting("quantize", "rest")) if wanted in HALF_TYPES]
    # Keys are patterns: a bracket in a name stands for itself.
    layers[glob.escape(name)] = chosen or (in_use[0] if in_use else "fp16")
    return f"quantize.layers={json.dumps(layers, ensure_ascii=False)}"


def _least_own(report: Report, record: LayerDiff) -> float | None:
    """The least SQNR, with exact inputs, of a value and of the layers that read it quantised; None if not measured.

    Rounding and clipping a value is an error of the layer that reads it.
    """
    readers = [row.get("module") for row in report.tables.get("quantized", ()) if row.get("value") == record.name]
    measured = [record.extra[OWN]] if OWN in record.extra else []
    for other in report.records:
        modules = [module.strip() for module in other.module.split(",")]
        if OWN in other.extra and any(module in readers for module in modules if module):
            measured.append(other.extra[OWN])
    values = [float(own) for own in measured if isinstance(own, int | float)]
    return min(values, default=None)


def _own_text(record: LayerDiff) -> str:
    own = record.own_db
    return "" if own is None else f"; with exact inputs it has {own:.1f} dB"


def _finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "not measured"
