"""quantize: the fused model in int8, fp16 or bf16, with a plan that says why, and what it costs layer by layer."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Gate, LayerDiff, Report, Scalar
from layerline.pipeline.stage import Stage, Work

if TYPE_CHECKING:
    from layerline.backends.base import Feed
    from layerline.backends.light import Light
    from layerline.calib.calibration_survey import Survey
    from layerline.calib.collect import Ranges
    from layerline.calib.plan import QuantPlan
    from layerline.calib.samples import Batch, Samples
    from layerline.export.signature import Signature
    from layerline.graph.quantization.qdq import WeightLoss

COPIED = ("signature.json", "probes.safetensors")
CALIBRATION_HOOKS = ("calib_data", "train_data", "eval_data")


class Quantize(Stage):
    """Post-training quantisation after TensorRT's rules, or a conversion to half precision.

    A model that brings its own Q/DQ, from training with fake quantisation or from another tool, goes through mode int8
    as it is: its scales are kept, nothing else is quantised, and no sample is calibrated.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 3
    takes: ClassVar[Mapping[str, str]] = {"model": "fused"}
    gives: ClassVar[str] = "quantized"
    uses: ClassVar[tuple[str, ...]] = (*CALIBRATION_HOOKS, "metric")
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (CALIBRATION_HOOKS, ("eval_data",))
    env: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir", "onnxruntime")

    mode: Literal["int8", "fp16", "bf16", "none"] = "int8"
    """int8: Q/DQ around layers with weights. fp16, bf16: half precision wherever it is safe. none: passed on as is."""
    rest: Literal["fp32", "fp16", "bf16"] = "fp32"
    """In mode int8, the type of what stays float: TensorRT runs it as it is written."""
    calibrator: Literal["auto", "entropy", "percentile", "minmax", "mse"] = "auto"
    """How the clipping threshold is chosen. auto tries the four others on a few samples and takes, for each value, the
    one with the smallest error at the layers that read it; a layer that keeps less than 10 dB with each of them stays
    float. Softmax, Sigmoid and Clip have known bounds and use these."""
    percentile: float = Field(default=99.99, gt=0, le=100)
    """For calibrator percentile: per cent of the non-zero values that stay inside the range."""
    samples: PositiveInt = 512
    """Calibration samples, spread evenly over the data."""
    batch_size: PositiveInt = 16
    """Samples a run, where the data does not come in batches; more takes more memory."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or Inf in calibration does: stop and name it, or leave it out of the range and say so."""
    per_channel: bool = True
    """One scale for each output channel of a weight."""
    bias_correction: bool = False
    """In mode int8, take what quantisation adds to a channel on average off the bias of its layer; the report says what
    the outputs gain."""
    attention: bool = False
    """Also quantise matrix products of two activations."""
    ops: tuple[str, ...] | None = None
    """Operators to quantise; all that have a rule when left out."""
    skip: tuple[str, ...] = ()
    """What stays float32: value or node names, module paths with everything below them, or globs."""
    max_drop: float | None = Field(default=None, ge=0)
    """Greatest loss of any metric that passes, in the metric's own units."""
    min_db: float = Field(default=10.0)
    """Least SQNR of an output, in dB over calibration samples, that passes where no metric was measured. Below 20 dB a
    warning is given in any case."""

    def hooks(self) -> tuple[str, ...]:
        """The task's hooks it calls: nothing is calibrated where nothing changes."""
        return self.uses if self.mode != "none" else ("eval_data", "metric")

    def check(self, look: Inspection) -> None:
        from layerline.calib import data_check

        with look.item("quantize"):
            inputs = look.need("signature").inputs
            if self.mode != "none":
                asked = self.samples if "samples" in self.model_fields_set else None
                data_check.look_at_calibration(look, inputs, CALIBRATION_HOOKS, asked)
            data_check.look_at_metric(look, inputs, look.need("run"), self.max_drop)
        with look.item("quantize.skip"):
            look.names_something(self.skip, "quantize.skip")
        if self.ops is not None:
            with look.item("quantize.ops"):
                from layerline.graph.quantization import qdq_placement

                qdq_placement.check_ops(self.ops)
                look.ok("quantize.ops", ", ".join(self.ops))
                present = look.need("ops")
                if self.mode == "int8" and not set(self.ops) & present:
                    there = ", ".join(sorted(present & set(qdq_placement.OPS))) or "none with a rule"
                    absent = f"none of {', '.join(self.ops)} is in the model, so nothing would be int8"
                    look.warn("quantize.ops", absent, f"the model has {there}")

    def run(self, work: Work) -> Report:
        from layerline.calib.calibration_survey import Survey
        from layerline.export import probe_files
        from layerline.export.signature import Signature
        from layerline.graph.io import onnx_files

        folder = work.inputs["model"]
        model, feeds = onnx_files.parts(folder / onnx_files.FILE), probe_files.load(folder)
        signature = Signature.load(folder)
        data = _Data(self, work, signature, Survey(signature.inputs), Survey(signature.inputs))
        made = _convert(self, data, model, feeds)
        onnx_files.save(made.model, work.out)
        for name in COPIED:
            shutil.copyfile(folder / name, work.out / name)
        _write(work.out, made)
        report = _report(self, made, feeds)
        scores, gates, notes = _scores(self, data, made, report.records)
        sizes = {"bytes_before": _bytes(folder), "bytes_after": _bytes(work.out)}
        if self.mode != "none":
            report = _as_users_do(self, work, made, report, feeds)
            report = _with_outputs(self, data, made, report, feeds, measured=bool(scores))
        return dataclasses.replace(
            report,
            metrics={**scores, **sizes, **report.metrics},
            gates=(*report.gates, *gates),
            notes=(*report.notes, *_counted(self, data, made, measured=bool(scores)), *notes),
        )


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What the conversion gave.

    Attributes:
        reference: the float model, at the opset of the result.
        model: the artifact.
        measured: what stands for it on onnxruntime: itself, or its emulation in float32.
        plan: what is quantised, and what is not.
        ranges: what calibration saw; None where nothing was calibrated.
        halved: nodes that compute in half precision, by its name.
        notes: for people.
        vanished: stored tensors with numbers that became 0 in half precision: how many of how many.
    """

    reference: Light
    model: Light
    measured: Light
    plan: QuantPlan
    ranges: Ranges | None = None
    halved: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    vanished: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Data:
    """The task's samples, as this model takes them, and what was noted of those that were read."""

    stage: Quantize
    work: Work
    signature: Signature
    survey: Survey
    evaluated: Survey

    def hook(self) -> str | None:
        """Where calibration samples come from."""
        return next((h for h in CALIBRATION_HOOKS if self.work.task.has(h)), None)

    def calibration(self) -> tuple[Samples, tuple[str, ...]]:
        """The samples, and a note where they are not calib_data()'s."""
        hook = self.hook()
        if hook is None:
            raise TaskError(
                f"0 calibration samples: the task defines none of {', '.join(f'{h}()' for h in CALIBRATION_HOOKS)}",
                where=self.work.task.path.name,
                hint="define calib_data(), or use mode: fp16, which needs no data",
            )
        note = () if hook == "calib_data" else (f"no calib_data() in the task: calibrated on {hook}()",)
        return self._samples(hook, "calibration", self.stage.samples), note

    def evaluation(self) -> Samples | None:
        """All of eval_data(), where there is any."""
        return self._samples("eval_data", "evaluation", None) if self.work.task.has("eval_data") else None

    def collect(
        self,
        model: Light,
        names: list[str],
        batches: Samples | list[Batch],
        nonfinite: Literal["stop", "skip"],
    ) -> Ranges:
        """Ranges of the named values."""
        from layerline.backends.onnxruntime import OnnxRuntime
        from layerline.calib.collect import collect

        log, runtime = self.work.log, OnnxRuntime()
        there = len(batches) if isinstance(batches, list) else batches.count()
        total = there or self.stage.samples  # of a reader that doesn't say: as many as are wanted
        return collect(
            lambda taps: runtime.open(model, taps),
            self.survey.through(batches),
            names,
            nonfinite=nonfinite,
            progress=lambda done: log.progress(min(done, total), total),
        )

    def _samples(self, hook: str, purpose: str, limit: int | None) -> Samples:
        from layerline.calib.samples import Samples

        return Samples(
            self.work.task.call(hook),
            self.signature.inputs,
            hook=hook,
            purpose=purpose,
            batch_size=self.stage.batch_size,
            limit=limit,
        )


def _convert(stage: Quantize, data: _Data, model: Light, feeds: list[Feed]) -> _Made:
    from layerline.calib.plan import QuantPlan

    if stage.mode == "int8":
        made = _int8(stage, data, model)
        return made if stage.rest == "fp32" else _half(stage, data, made, feeds, stage.rest)
    made = _Made(reference=model, model=model, measured=model, plan=QuantPlan(values=(), kept=()))
    return made if stage.mode == "none" else _half(stage, data, made, feeds, stage.mode)


def _int8(stage: Quantize, data: _Data, model: Light) -> _Made:
    from layerline.backends.cpu import int8_flag, int8_note
    from layerline.graph.io.opset import raise_opset
    from layerline.graph.quantization import measured_plan, own_qdq, qdq, qdq_placement
    from layerline.graph.quantization import range_choice as tuned

    if own_qdq.present(model):
        own = "the model brings its own Q/DQ: they are kept with their scales, and nothing else is quantised"
        return _Made(
            reference=own_qdq.without(model),
            model=model,
            measured=model,
            plan=own_qdq.read(model),
            notes=(own, int8_note(int8_flag())),
        )
    # Raised before anything else: both sides of the comparison then share an opset, and so a graph.
    model = raise_opset(model, qdq.required_opset(model))
    ops = qdq_placement.OPS if stage.ops is None else stage.ops
    rules = qdq_placement.Rules(ops=ops, skip=stage.skip, per_channel=stage.per_channel, attention=stage.attention)
    placed = qdq_placement.place(model, rules)
    samples, note = data.calibration()
    activations = [w.name for w in placed.wanted if w.role == "activation"]
    ranges = data.collect(model, activations, samples, stage.nonfinite)
    histograms = ranges.histograms
    rules, placed = tuned.apart(model, rules, placed, histograms)
    feeds = [b.feed for b in data.survey.batches()]
    told: tuple[str, ...] = ()
    if stage.calibrator == "auto":
        plan, told = measured_plan.tuned(model, rules, placed, histograms, feeds, percentile=stage.percentile)
    else:
        plan = qdq.plan(model, placed, histograms, stage.calibrator, percentile=stage.percentile)
    quantized = qdq.apply(model, plan)
    if stage.bias_correction:
        quantized, gain = measured_plan.corrected(model, plan, quantized, feeds)
        told = (*told, gain)
    notes = (*note, *ranges.notes, *told, int8_note(int8_flag()))
    return _Made(reference=model, model=quantized, measured=quantized, plan=plan, ranges=ranges, notes=notes)


def _half(stage: Quantize, data: _Data, made: _Made, feeds: list[Feed], mode: str) -> _Made:
    from layerline.calib.plan import QuantPlan
    from layerline.calib.samples import Batch
    from layerline.graph.io.opset import raise_opset
    from layerline.graph.quantization import mixed_precision

    opset = mixed_precision.required_opset(made.model, mode)
    reference, names = raise_opset(made.reference, opset), mixed_precision.float_values(made.reference)
    batches: Samples | list[Batch] = [Batch(dict(feed), None, 1) for feed in feeds]
    note: tuple[str, ...] = (f"the task has no samples: overflow was looked for on {len(feeds)} probe feeds alone",)
    if data.hook() is not None:
        batches, note = data.calibration()
    ranges = data.collect(made.reference, names, batches, "skip")
    amax = {name: histogram.amax for name, histogram in ranges.histograms.items()}
    converted = mixed_precision.to_half(made.model, mode, amax=amax, skip=stage.skip)
    emulated = (
        f"{converted.nodes} nodes compute in {mode}; measured in float32 with every {mode} value rounded, "
        "because onnxruntime's CPU kernels leave that rounding out"
    )
    lost = converted.vanished
    nothing = f"no node computes in {mode}: nothing was converted, and the result is no smaller and no faster"
    return _Made(
        reference=reference,
        model=converted.model,
        measured=mixed_precision.emulate(converted.model),
        plan=QuantPlan(values=made.plan.values, kept=(*made.plan.kept, *converted.kept)),
        ranges=made.ranges,
        halved={mode: converted.nodes},
        notes=(
            *made.notes,
            *(n for n in note if n not in made.notes),
            emulated if converted.nodes else nothing,
            *(
                f"{name}: {n} of {size} numbers are too small for {mode} and became 0"
                for name, (n, size) in lost.items()
            ),
        ),
        vanished={**made.vanished, **lost},
    )


def _write(out: Path, made: _Made) -> None:
    from layerline.calib import collect, plan

    (out / plan.FILE).write_text(made.plan.to_json(), "utf-8")
    if made.ranges is not None:
        (out / collect.FILE).write_text(made.ranges.to_json(), "utf-8")


def _report(stage: Quantize, made: _Made, feeds: list[Feed]) -> Report:
    from layerline.compare.compare_models import compare
    from layerline.compare.threshold_flips import blamed
    from layerline.graph.analysis.rounding_noise import drawn, unjudged
    from layerline.graph.quantization import qdq

    if stage.mode == "none":
        return Report(stage=stage.name, notes=("mode none: the model is passed on as it is",))
    rows = _table(made, qdq.weight_sqnr(made.reference, made.plan))
    graph = made.reference.model.graph
    records = blamed(compare(made.reference, made.measured, feeds, isolated=True), graph)
    return Report(
        stage=stage.name,
        reference="float onnx on onnxruntime",
        candidate=f"{stage.mode} onnx on onnxruntime",
        records=tuple(_with_columns(r, rows, made.plan) for r in records),
        metrics=unjudged(graph, drawn(made.reference.model)) | _counts(stage, made),
        gates=(*_something(stage, made), *_same_on_runtime(stage, made, feeds)),
        notes=made.notes,
        tables={"quantized": list(rows.values()), "stays float": [dataclasses.asdict(k) for k in made.plan.kept]},
    )


def _with_outputs(
    stage: Quantize, data: _Data, made: _Made, report: Report, feeds: list[Feed], *, measured: bool
) -> Report:
    """Adds what became of the outputs: on calibration samples, or the probes where there are none, and by size."""
    from layerline.parity import output_sqnr

    samples = [b.feed for b in data.survey.batches()] or feeds
    found = output_sqnr.outputs(made.reference, made.measured, samples)
    warnings, worst = output_sqnr.warning(found), output_sqnr.least(found)
    for text in warnings:
        data.work.log.say(text)
    sizes = output_sqnr.by_size(made.reference, made.measured, feeds, data.signature)
    return dataclasses.replace(
        report,
        metrics=({} if worst is None else {"output_sqnr_db": worst[1]}) | dict(report.metrics),
        gates=(
            *report.gates,
            *(() if measured else output_sqnr.gate(found, stage.min_db)),
            *(output_sqnr.data_gate(data.survey.peaks, data.evaluated.peaks) if data.hook() else ()),
        ),
        notes=(*warnings, *report.notes, *output_sqnr.unseen(data.survey.shapes, data.signature)),
        tables={**report.tables, **({"outputs by size": sizes} if sizes else {})},
    )


def _counts(stage: Quantize, made: _Made) -> dict[str, Scalar]:
    """How much was converted, and to what."""
    halved: dict[str, Scalar] = {f"{mode}_nodes": nodes for mode, nodes in made.halved.items()}
    if stage.mode != "int8":
        return halved
    done, products = _products(made)
    shares: dict[str, Scalar] = {"int8_products": f"{done} of {products}"}
    return (
        shares
        | {f"quantized_{r}s": sum(v.role == r for v in made.plan.values) for r in ("activation", "weight")}
        | halved
    )


def _products(made: _Made) -> tuple[int, int]:
    """How many matrix products compute in int8, and how many there are."""
    from layerline.graph.quantization.qdq_placement import products

    everything = products(made.reference)
    readers = {reader for value in made.plan.values for reader, _ in value.readers}
    return sum(name in readers for name in everything), len(everything)


def _something(stage: Quantize, made: _Made) -> tuple[Gate, ...]:
    """Fails where a conversion was asked for and nothing was converted, though there is what it is made for."""
    if stage.mode == "int8":
        done, there = _products(made)
        name, expected = "quantisation", "at least one in int8"
        what = f"{done} of {there} matrix products are quantised"
    else:
        done, there = made.halved[stage.mode], _products(made)[1]
        name, expected = "conversion", f"at least one in {stage.mode}"
        what = f"{done} nodes compute in {stage.mode}, of a model with {there} matrix products"
    if done or not there:
        return ()
    reasons = Counter(k.reason for k in made.plan.kept).most_common(2)
    why = "".join(f"; {n} because {reason}" for reason, n in reasons)
    hint = f"`stays float` in the report lists every reason{why}; mode: none passes the model on as it is"
    return (Gate(name, False, what, expected, hint),)


def _table(made: _Made, losses: Mapping[str, WeightLoss]) -> dict[str, dict[str, Scalar]]:
    """One row a quantised value; `clipped` is the share of an activation's elements beyond its range."""
    rows: dict[str, dict[str, Scalar]] = {}
    for value in made.plan.values:
        seen = None if made.ranges is None else made.ranges.histograms.get(value.name)
        loss = losses.get(value.name)
        rows[value.name] = {
            "value": value.name,
            "role": value.role,
            "module": value.module,
            "axis": value.axis,
            "least_scale": min(value.scales),
            "greatest_scale": max(value.scales),
            "calibrator": value.calibrator,
            "clipped": None if seen is None else seen.beyond(value.amax),
            "sqnr_db": loss.sqnr_db if loss else None,
            "worst_channel_db": loss.worst_channel_db if loss else None,
            "why": value.why,
        }
    return rows


def _with_columns(record: LayerDiff, rows: Mapping[str, Mapping[str, Scalar]], plan: QuantPlan) -> LayerDiff:
    """Beside the distances: how much of this value is clipped, and how well the weights behind it are kept."""
    extra: dict[str, Scalar] = dict(record.extra)
    if record.name in rows:
        extra["clipped"] = rows[record.name]["clipped"]
    for value in plan.values:
        if value.role == "weight" and any(reader == record.name for reader, _ in value.readers):
            extra["weight_sqnr_db"] = rows[value.name]["sqnr_db"]
    return dataclasses.replace(record, extra=extra)


def _same_on_runtime(stage: Quantize, made: _Made, feeds: list[Feed]) -> tuple[Gate, ...]:
    """Whether the artifact, run as it is, gives what its emulation gives. onnxruntime has no bfloat16 kernels."""
    from layerline.compare.compare_models import compare

    if made.measured is made.model or "bf16" in (stage.mode, stage.rest):
        return ()
    apart = compare(made.measured, made.model, feeds, pairs={})
    lost = {r.name: r.rel_l2 or 0.0 for r in compare(made.reference, made.measured, feeds, pairs={})}
    judged = [r for r in apart if r.rel_l2 is not None]
    if not judged:  # every output is drawn at random
        return ()
    worst = max(judged, key=lambda r: r.rel_l2 or 0.0)
    # Leaving roundings out moves a result no further than the roundings themselves did, or it is another result.
    allowed = max(0.01, 4 * max(lost.values()))
    passed = all(r.passed for r in apart) and (worst.rel_l2 or 0.0) <= allowed
    seen = f"{worst.name} differs by {worst.rel_l2:.2e} (relative L2)"
    return (Gate("onnxruntime runs it alike", passed, seen, f"at most {allowed:.2e}"),)


def _as_users_do(stage: Quantize, work: Work, made: _Made, report: Report, feeds: list[Feed]) -> Report:
    """Adds what a default onnxruntime session makes of the file. It has no bfloat16 kernels."""
    from layerline.graph.analysis.rounding_noise import drawn
    from layerline.graph.io import onnx_files
    from layerline.parity import default_session

    if "bf16" in (stage.mode, stage.rest):
        return report
    outputs = {o.name for o in made.model.model.graph.output}
    # Kernels that compute in int8 round otherwise here and there: no further than quantisation itself moved the output.
    allowed = {r.name: max(0.01, 2 * (r.rel_l2 or 0.0)) for r in report.records if r.name in outputs}
    random = outputs & drawn(made.model.model).keys()
    found = default_session.check(work.out / onnx_files.FILE, feeds, allowed=allowed, random=random)
    return dataclasses.replace(report, gates=(*report.gates, *found.gates), notes=(*report.notes, *found.notes))


def _scores(
    stage: Quantize, data: _Data, made: _Made, records: Sequence[LayerDiff]
) -> tuple[dict[str, Scalar], tuple[Gate, ...], tuple[str, ...]]:
    """The metric before and after, and the accuracy budget."""
    named, why = _measured(data, made)
    if named is None:
        gate = Gate("accuracy budget", False, "not measured", f"max_drop {stage.max_drop}", why)
        return {}, () if stage.max_drop is None else (gate,), (f"no metric was measured: {why}",)
    before, after = named["float"], named["result"]
    scores: dict[str, Scalar] = {}
    for name in after:
        scores |= {name: after[name], f"{name}_float": before[name]}
    return scores, _budget(stage, before, after, records), ()


def _counted(stage: Quantize, data: _Data, made: _Made, *, measured: bool) -> list[str]:
    """What the numbers of samples mean: fewer than asked for, or so few that one of them exceeds the budget."""
    from layerline.calib.data_check import budget_below_a_sample

    notes: list[str] = []
    if made.ranges is not None:
        used = made.ranges.samples
        fewer = used < stage.samples and "samples" in stage.model_fields_set
        asked = f", of {stage.samples} asked for: {data.hook()}() has no more" if fewer else ""
        notes.append(f"calibrated on {used} samples{asked}")
    rows = data.evaluated.rows
    if measured and rows and stage.max_drop is not None and stage.max_drop < 1 / rows:
        notes.append("max_drop {}; {}".format(*budget_below_a_sample(stage.max_drop, rows)))
    return notes


def _measured(data: _Data, made: _Made) -> tuple[dict[str, dict[str, float]] | None, str]:
    """The metrics of both models, or the reason why there are none."""
    from layerline.backends import evaluate
    from layerline.backends.onnxruntime import OnnxRuntime
    from layerline.pipeline.inputs.metric import accuracy, score

    samples, task, runtime = data.evaluation(), data.work.task, OnnxRuntime()
    if samples is None:
        return None, "the task has no eval_data()"
    models = {"float": made.reference, "result": made.measured}
    sessions = {name: runtime.open(model) for name, model in models.items()}
    found = evaluate.predict(sessions, data.evaluated.through(samples))
    if found.targets is None:
        return None, "eval_data() gives no targets"
    metric = task.get("metric") if task.has("metric") else accuracy
    try:
        return {name: score(metric, outputs, found.targets) for name, outputs in found.outputs.items()}, ""
    except TaskError as error:
        if task.has("metric"):
            raise
        # The default metric fits classifiers alone; whoever has another kind of model has lost nothing.
        return None, f"the task has no metric(), and {error.what}"


def _remedy(records: Sequence[LayerDiff]) -> str:
    """The change of pipe.yaml that takes out the layers that lose most by themselves, fed with exact inputs."""
    measured = {r.name: _own(r) for r in records}
    own = {name: db for name, db in measured.items() if db is not None and math.isfinite(db)}
    worst = sorted(own, key=lambda n: own[n])[:3]
    if not worst:
        return "try another calibrator or more samples"
    told = ", ".join(f"{n} ({own[n]:.1f} dB)" for n in worst)
    names = json.dumps(worst, ensure_ascii=False)
    return (
        f"the layers that lose most by themselves: {told}; keep them float with `skip: {names}` under quantize, or see "
        "all: pipe diff quantize --sort own"
    )


def _own(record: LayerDiff) -> float | None:
    value = record.extra.get("isolated_sqnr_db")
    return float(value) if isinstance(value, int | float) else None


def _budget(
    stage: Quantize, before: Mapping[str, float], after: Mapping[str, float], records: Sequence[LayerDiff]
) -> tuple[Gate, ...]:
    if stage.max_drop is None:
        return ()
    drops = {name: before[name] - after[name] for name in after}
    if not drops:
        return (Gate("accuracy budget", False, "metric() gave no figure", f"a drop of at most {stage.max_drop:g}"),)
    # One part in 10^9 of slack: a drop of exactly max_drop passes whatever the subtraction rounds to.
    limit = stage.max_drop + 1e-9
    hint = _remedy(records)
    return tuple(
        Gate(
            f"{name} budget",
            drop <= limit,
            f"{before[name]:.6g} -> {after[name]:.6g}",
            f"a drop of at most {stage.max_drop:g}",
            "" if drop <= limit else hint,
        )
        for name, drop in drops.items()
    )


def _bytes(folder: Path) -> int:
    """Size of the model with its external data."""
    return sum(p.stat().st_size for p in folder.glob("model.onnx*"))
