"""quantize: converts the fused model to a smaller format, and reports the reasons and the loss of each layer."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from layerline.pipeline.config.budgets import MaxDrop
from layerline.pipeline.config.qat_options import QatOptions
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import CONVERGENCE, RESCALED, Report, Scalar
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import EXAMPLE_HOOKS

if TYPE_CHECKING:
    from layerline.backends.base import Feed
    from layerline.backends.light import Light
    from layerline.graph.quantization.calibration_data import CalibrationData
    from layerline.graph.quantization.convert import Calibrated, Converted
    from layerline.graph.quantization.layer_formats import LayerFormats
    from layerline.graph.quantization.qdq_placement import Rules
    from layerline.parity.accuracy_budget import Evaluation
    from layerline.parity.format_search import Make
    from layerline.parity.output_sqnr import Bounds

FORMATS = ("int8", "fp8", "int4", "nvfp4")
"""The modes that quantise: the formats of graph/quantization/targets.py."""
COPIED = ("signature.json", "probes.safetensors")
SEARCH_DROP, SEARCH_DB = "0.5%", 25.0
"""The budget of a search where pipe.yaml sets none."""
CALIBRATION_HOOKS = ("calib_data", "train_data", "eval_data")


class Quantize(Stage):
    """Quantisation after TensorRT's rules, with or without training, or a conversion to half precision.

    A model that brings its own Q/DQ, from training with fake quantisation or from another tool, goes through mode int8
    or fp8 as it is: its scales are kept, nothing else is quantised, and no sample is calibrated.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 13
    takes: ClassVar[Mapping[str, str]] = {"model": "fused"}
    gives: ClassVar[str] = "quantized"
    uses: ClassVar[tuple[str, ...]] = (*CALIBRATION_HOOKS, "metric", "show")
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (CALIBRATION_HOOKS, ("eval_data",))
    env: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir", "onnxruntime")

    mode: Literal["int8", "fp8", "int4", "nvfp4", "qat", "fp16", "bf16", "none"] = "int8"
    """int8: Q/DQ around layers with weights. fp8: the same in float8 e4m3, for compute capability 8.9 and later. int4,
    nvfp4: weights of Gemm and MatMul alone, in blocks; nvfp4 for 10.0 and later. qat: int8 or fp8, with
    weights and scales trained under fake quantisation. fp16, bf16: half precision wherever it is safe. none: passed on
    as is."""
    target: Literal["tensorrt", "onnxruntime", "openvino"] = "tensorrt"
    """The runtime whose rules say which layers are quantised, and how. The engine stage takes tensorrt alone."""
    rest: Literal["fp32", "fp16", "bf16"] = "fp32"
    """In modes that quantise, the type of what stays float: TensorRT runs it as it is written."""
    calibrator: Literal["auto", "entropy", "percentile", "minmax", "mse"] = "auto"
    """How the clipping threshold is chosen. auto tries the four others on a few samples and takes, for each value, the
    one with the smallest error at the layers that read it; a layer that keeps less than 10 dB with each of them stays
    float. Where the outputs keep clearly more with one calibrator for all values, that one is taken. Softmax, Sigmoid
    and Clip have known bounds and use these. Choices are judged on calibration samples that are held out of the ranges:
    of eight and more, a quarter. fp8 takes the greatest value, or the percentile where that is set."""
    percentile: float = Field(default=99.99, gt=0, le=100)
    """For calibrator percentile: per cent of the non-zero values that stay inside the range."""
    samples: PositiveInt = 512
    """Calibration samples at most."""
    selection: Literal["even", "stratified", "coverage"] = "even"
    """Which samples calibrate. even: spread evenly over the data. stratified: the same number of each `slice`, or else
    of each label, and rare ones whole. coverage: of eight times as many, those whose activations differ most; these are
    extremes, so take it for rare inputs that must not be clipped."""
    stop_early: PositiveFloat | None = None
    """Stop calibrating when the samples doubled twice and no range moved by more than this, in per cent. The report
    shows how ranges move."""
    batch_size: PositiveInt = 16
    """Samples a run, where the data does not come in batches; more takes more memory."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or Inf in calibration does: stop and name it, or leave it out of the range and say so."""
    per_channel: bool = True
    """One scale for each output channel of a weight."""
    bias_correction: bool = False
    """In mode int8 or fp8, take what quantisation adds to a channel on average off the bias of its layer, if the
    outputs gain on held-out samples; the report says how much."""
    repairs: tuple[Literal["equalize", "smooth", "awq", "adaround", "gptq"], ...] = ()
    """In modes that quantise, what is tried before any training to lose less; each stays where the outputs gain on
    samples that it was not fitted on, which takes eight calibration samples at least. For int8 layers: equalize:
    channels that share a scale are evened out between layers with at most a Relu in between; in float that changes
    roundings alone. smooth: the same behind normalisations (SmoothQuant). adaround: ranges of weights, and whether each
    is rounded up or down, by the error of their layer's output. For int4 and nvfp4 layers: awq: inputs of large
    magnitude are scaled down, and their weights up, by the error of the layers' outputs. gptq: weights are rounded one
    input after another, and those that follow make up for the error."""
    attention: bool = False
    """Also quantise matrix products of two activations."""
    ops: tuple[str, ...] | None = None
    """Operators to quantise; all that have a rule when left out."""
    skip: tuple[str, ...] = ()
    """What stays float32: value or node names, module paths with everything below them, or globs."""
    layers: dict[str, Literal["int8", "fp8", "int4", "nvfp4", "fp16", "bf16", "fp32", "skip"]] = Field(
        default_factory=dict
    )
    """The format of single layers, by the name of a module with everything below it, of a value that the layer
    computes, of its weight or of its node, or by a glob: `{"encoder.*.fc2": fp16, head: skip}`. skip is fp32; int8,
    fp8, int4 and nvfp4 also hold where skip or auto would keep the layer float. Of several patterns the last
    decides."""
    block_size: Literal[16, 32, 64, 128] = 32
    """Numbers of an int4 weight that share a scale; nvfp4 always has 16."""
    dynamic: bool = False
    """Layers in nvfp4 also read activations in nvfp4, quantised in blocks while running. Only TensorRT runs that; its
    operator stands in the model."""
    max_drop: MaxDrop | None = None
    """Greatest loss of any metric that passes, in the metric's own units; `0.5%` is that part of the float model's
    value. Or by metric: `{accuracy: 0.5%, mse: {rise: 5%}}`, and the others are only shown. Judged by the point
    estimate on eval_data(), beside which its 95 % interval is shown."""
    min_db: float = Field(default=10.0)
    """Least SQNR of an output, in dB over samples of eval_data(), else of calibration, that passes where no metric was
    measured; 25 with search. Below 20 dB a warning is given in any case."""
    min_cosine: float | None = Field(default=None, ge=-1, le=1)
    """Least cosine between an output and the float model's, where no metric was measured."""
    search: bool = False
    """In modes that quantise, find the cheapest formats that keep max_drop (0.5% of each metric, if it is not set), or
    min_db without a metric: layers that the budget needs stay float, in fp16 where that holds too and `rest` is not
    set. Tries bias_correction and repairs before (all for the mode, if repairs is not set). `pipe tune` sets it."""

    qat: QatOptions | None = None
    """For mode qat, how it trains."""

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: str, info: ValidationInfo) -> str:
        mode = info.data.get("mode", "int8")
        if mode == "qat" and target != "tensorrt":
            raise ValueError("expected tensorrt with mode qat")
        if mode in FORMATS and mode not in _formats_of(target):
            raise ValueError(f"expected a target that takes {mode}; {target} takes {', '.join(_formats_of(target))}")
        return target

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, size: int, info: ValidationInfo) -> int:
        if "int4" not in (info.data.get("mode", "int8"), *info.data.get("layers", {}).values()):
            raise ValueError("expected int4 as the mode or in layers with it")
        return size

    @field_validator("dynamic")
    @classmethod
    def _check_dynamic(cls, dynamic: bool, info: ValidationInfo) -> bool:
        if dynamic and "nvfp4" not in (info.data.get("mode", "int8"), *info.data.get("layers", {}).values()):
            raise ValueError("expected nvfp4 as the mode or in layers with it")
        return dynamic

    @field_validator("qat")
    @classmethod
    def _check_qat(cls, qat: QatOptions | None, info: ValidationInfo) -> QatOptions | None:
        if info.data.get("mode") != "qat" and qat is not None:
            raise ValueError("expected mode: qat with it")
        return qat

    @field_validator("bias_correction")
    @classmethod
    def _check_correction(cls, correction: bool, info: ValidationInfo) -> bool:
        mode = info.data.get("mode", "int8")
        if correction and mode == "qat":
            raise ValueError("expected false in mode qat, where training moves the biases")
        if correction and mode not in FORMATS:
            raise ValueError(f"expected mode: {' or '.join(FORMATS)} with it")
        return correction

    @field_validator("repairs")
    @classmethod
    def _check_repairs(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if names and info.data.get("mode", "int8") not in (*FORMATS, "qat"):
            raise ValueError(f"expected mode: {' or '.join((*FORMATS, 'qat'))} with it")
        return names

    @field_validator("search")
    @classmethod
    def _check_search(cls, search: bool, info: ValidationInfo) -> bool:
        if search and info.data.get("mode", "int8") not in FORMATS:
            raise ValueError(f"expected mode: {' or '.join(FORMATS)} with it")
        return search

    @field_validator("skip")
    @classmethod
    def _name_originals(cls, skip: tuple[str, ...]) -> tuple[str, ...]:
        """A report names a value that a repair scaled otherwise than the float model does."""
        return tuple(pattern.removesuffix(RESCALED) for pattern in skip)

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, layers: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        """Refuses formats that the mode does not have, and two half types in one model."""
        mode, rest = info.data.get("mode", "int8"), info.data.get("rest", "fp32")
        allowed = {"fp16", "bf16", "fp32", "skip"}
        if mode == "qat":
            allowed |= {"int8", "fp8"}
        elif mode in FORMATS:
            allowed |= set(_formats_of(info.data.get("target", "tensorrt")))
        else:
            allowed = {mode, "fp32", "skip"}
        for pattern, wanted in layers.items():
            if mode == "none" or wanted not in allowed:
                raise ValueError(f"expected a format that mode {mode} has for {pattern}")
        half_types = {wanted for wanted in (*layers.values(), rest) if wanted in ("fp16", "bf16")}
        if len(half_types) > 1:
            raise ValueError("expected one half type, fp16 or bf16, in layers and rest together")
        return {pattern.removesuffix(RESCALED): wanted for pattern, wanted in layers.items()}

    def hooks(self) -> tuple[str, ...]:
        """The task's hooks that it calls. Mode none calibrates nothing."""
        if self.mode == "none":
            return ("eval_data", "metric")
        if self.mode == "qat":
            return tuple(dict.fromkeys((*self.uses, "train_data", "loss", "model", *EXAMPLE_HOOKS)))
        return self.uses

    def rows(self) -> tuple[tuple[str, ...], ...]:
        if self.mode == "qat":
            return (*self.first_of, EXAMPLE_HOOKS, ("train_data",))
        return self.first_of

    def facts(self) -> tuple[str, ...]:
        return (*self.env, "torch") if self.mode == "qat" else self.env

    def check(self, look: Inspection) -> None:
        from layerline.calib import data_check

        with look.item("quantize"):
            inputs = look.need("signature").inputs
            # Half precision and blocks of weights need no ranges, but what the task gives is looked at.
            wanted = {self._format, *self.layers.values(), *self.repairs}
            calibrates = self.dynamic or bool({"int8", "fp8", "awq", "gptq"} & wanted)
            if self.mode != "none" and (calibrates or any(map(look.task.has, CALIBRATION_HOOKS))):
                requested = self.samples if "samples" in self.model_fields_set else None
                data_check.check_calibration(look, inputs, CALIBRATION_HOOKS, requested)
            data_check.check_metric(look, inputs, look.need("run"), self.max_drop)
        if self.mode == "qat":
            self._check_training(look)
        look.shared["formats"] = [name for name in FORMATS if name in (self._format, *self.layers.values())]
        with look.item("quantize.skip"):
            look.names_something(self.skip, "quantize.skip")
        with look.item("quantize.layers"):
            look.names_something(tuple(self.layers), "quantize.layers")
        if self.ops is not None:
            with look.item("quantize.ops"):
                self._check_ops(self.ops, look)

    def _check_ops(self, ops: tuple[str, ...], look: Inspection) -> None:
        from layerline.graph.quantization.qdq_placement import check_ops
        from layerline.graph.quantization.targets import OPS

        check_ops(ops)
        look.ok("quantize.ops", ", ".join(ops))
        present = look.need("ops")
        if self._format in FORMATS and not set(ops) & present:
            quantizable = ", ".join(sorted(present & set(OPS))) or "none with a rule"
            absent = f"none of {', '.join(ops)} is in the model, so nothing would be {self._format}"
            look.warn("quantize.ops", absent, f"the model has {quantizable}")

    @property
    def _format(self) -> str:
        """The mode, or the format that it trains."""
        return self._training.format if self.mode == "qat" else self.mode

    @property
    def _training(self) -> QatOptions:
        return self.qat or QatOptions()

    def _check_training(self, look: Inspection) -> None:
        from layerline.qat import training

        with look.item("quantize.qat"):
            training.try_hooks(look, self._training)

    def run(self, work: Work) -> Report:
        from layerline.export import probe_files
        from layerline.export.signature import Signature
        from layerline.graph.io import onnx_files
        from layerline.graph.quantization import layer_formats, own_qdq, rescaled_names
        from layerline.graph.quantization.calibration_data import CalibrationData
        from layerline.parity import accuracy_budget, output_sqnr, quantization_report

        folder = work.inputs["model"]
        model = onnx_files.parts(folder / onnx_files.FILE)
        probes = probe_files.load(folder)
        signature = Signature.load(folder)
        data = CalibrationData(
            work,
            signature.inputs,
            hooks=CALIBRATION_HOOKS,
            samples=self.samples,
            batch_size=self.batch_size,
            choice=self.selection,
            stop_early=self.stop_early and self.stop_early / 100,
            percentile=100.0 if self.calibrator == "minmax" else self.percentile,
            holds_out=self.calibrator == "auto" or self.bias_correction or bool(self.repairs) or self.search,
        )
        evaluation = accuracy_budget.Evaluation(data)
        # Names first: what follows may take minutes.
        if self.mode != "none" and not own_qdq.present(model):
            layer_formats.refuse_unknown(model, self.skip, self.layers)
        evaluation.refuse_unknown(model, self.max_drop)
        converted, complete = self._convert(work, model, data, probes, evaluation)
        converted = rescaled_names.apply(converted)
        onnx_files.save(converted.model, work.out)
        for name in COPIED:
            shutil.copyfile(folder / name, work.out / name)
        _write_plan(work.out, converted)
        # Layers are compared with the float model whose weights they quantise; outputs and metrics with the one given.
        same_weights = converted
        if converted.trained is not None:
            same_weights = dataclasses.replace(converted, reference=converted.trained)
        report = quantization_report.layer_report(self.name, same_weights, probes, mode=self._format)
        # Without a metric a search judges the outputs: there its own budget for metrics means nothing.
        measured = evaluation.measure(converted)
        max_drop = self.max_drop if measured is None else self._max_drop()
        if self.mode != "none":
            feeds = output_sqnr.samples(data, probes)
            report = quantization_report.with_samples(report, same_weights, feeds)
        accuracy = accuracy_budget.measure(converted, evaluation, report.records, max_drop)
        if self.mode != "none":
            if quantization_report.runs_on_onnxruntime(converted):
                path = work.out / onnx_files.FILE
                samples = data.calibration_feeds
                report = quantization_report.with_default_session(report, converted, path, probes, samples)
            bounds = None if accuracy.metrics else self._bounds()
            report = quantization_report.with_outputs(report, converted, data, probes, signature, bounds=bounds)
        sizes = {"bytes_before": _bytes(folder), "bytes_after": _bytes(work.out)}
        report = dataclasses.replace(
            report,
            metrics={**accuracy.metrics, **sizes, **report.metrics},
            gates=(*report.gates, *accuracy.gates),
            notes=(*report.notes, *self._sample_notes(converted, data), *accuracy.notes),
            tables={**accuracy.tables, **report.tables, **_curve(converted)},
        )
        return complete(report)

    def _convert(
        self, work: Work, model: Light, data: CalibrationData, probes: list[Feed], evaluation: Evaluation
    ) -> tuple[Converted, Callable[[Report], Report]]:
        """The model, and what adds to its report how a search, repairs or training came to it."""
        from layerline.graph.quantization import convert, layer_formats, own_qdq, repairs
        from layerline.parity import format_search, repair_steps, search_judge

        unchanged = convert.unchanged(model)
        if self.mode == "none":
            return unchanged, _as_it_is
        formats = layer_formats.resolve(model, self.layers)
        if self._format not in FORMATS:
            greatest = convert.greatest_values(model, data, probes)
            return convert.to_half(unchanged, greatest, self.mode, skip=self.skip, single=formats.single), _as_it_is
        if self.mode == "qat":
            from layerline.qat import training

            training.try_loss(work.task, training.check(model, probes), self._training)
        if own_qdq.present(model):
            return convert.with_own_qdq(model, self._rules(formats)), _as_it_is
        calibrated = self._calibrated(model, data, formats)
        names: Sequence[str] = self.repairs
        if names and data.hook() is None:
            data.calibration()  # says that there are no samples
        if self.search and "repairs" not in self.model_fields_set and data.hook() is not None:
            names = repairs.of_format(self._format)
        train = functools.partial(self._train, work, formats=formats, data=data, probes=probes, evaluation=evaluation)
        if not calibrated.layers() or not (names or self.search):
            if self.mode == "qat" and calibrated.layers():
                return train(calibrated)
            return self._finished(calibrated, formats, data, probes)[1], _as_it_is
        budget = self._max_drop() or SEARCH_DROP
        judge = search_judge.judge(evaluation, data, probes, budget, self._bounds())
        repaired = repair_steps.run(
            calibrated,
            repairs.in_order(names),
            repairer=repairs.Repairer(lambda light: self._calibrated(light, data, formats), data.fitting),
            finish=lambda each: self._finished(each, formats, data, probes),
            judge=judge,
            stop=self.search,
            log=data.log.say,
        )
        if self.mode == "qat":
            converted, complete = train(repaired.calibrated, plain=repaired.plain)
            return converted, lambda report: repaired.added_to(complete(report))
        if not self.search:
            return repaired.converted, repaired.added_to
        half_type = "" if "rest" in self.model_fields_set else formats.half_type or "fp16"
        search = format_search.Search(
            start=repaired,
            make=self._maker(repaired.calibrated, formats, data, probes),
            judge=judge,
            float_format=self.rest,
            half_type=half_type,
            log=data.log.say,
        )
        outcome = search.run()
        return outcome.converted, lambda report: outcome.added_to(report, model, self.layers)

    def _calibrated(self, model: Light, data: CalibrationData, formats: LayerFormats) -> Calibrated:
        from layerline.graph.quantization import convert

        return convert.calibrate(
            model,
            data,
            self._rules(formats),
            calibrator=self.calibrator,
            percentile=self.percentile,
            nonfinite=self.nonfinite,
        )

    def _finished(
        self, calibrated: Calibrated, formats: LayerFormats, data: CalibrationData, probes: list[Feed]
    ) -> tuple[Calibrated, Converted]:
        """With its biases corrected, where that is wanted, and the model with all of it quantised."""
        if self.bias_correction or self.search:
            calibrated = calibrated.corrected()
        return calibrated, self._maker(calibrated, formats, data, probes)((), ())

    def _train(
        self,
        work: Work,
        calibrated: Calibrated,
        formats: LayerFormats,
        data: CalibrationData,
        probes: list[Feed],
        evaluation: Evaluation,
        plain: Converted | None = None,
    ) -> tuple[Converted, Callable[[Report], Report]]:
        """Trains what was calibrated, with fake quantisation where its plan quantises."""
        from layerline.graph.quantization import rescaled_names
        from layerline.parity import search_judge
        from layerline.qat import outcome, training

        judge = search_judge.judge(evaluation, data, probes, self._max_drop() or SEARCH_DROP, self._bounds())
        before = self._maker(calibrated, formats, data, probes)((), ())
        models = {outcome.PTQ: before}
        start_name = outcome.PTQ
        if plain is not None and calibrated.repairs:
            start_name = outcome.REPAIRED
            models = {outcome.PTQ: plain, start_name: before}
        start = judge(before)
        trained = training.train(work, calibrated, self._training, probes)
        after = self._maker(trained.calibrated, formats, data, probes)((), ())
        # Compared with the float model that training started from.
        after = dataclasses.replace(after, reference=before.reference, trained=after.reference)
        end = judge(after)
        note = training.lost(start, end, self._training)
        models[outcome.QAT] = after
        measured = {name: evaluation.measure(converted) for name, converted in models.items()}
        models = {name: rescaled_names.apply(converted) for name, converted in models.items()}
        result_name = outcome.QAT
        if note and self._training.keep == "better":
            result_name = start_name
        result = outcome.QatOutcome(
            trained=trained, models=models, measured=measured, result=result_name, note=note, data=data, probes=probes
        )
        return models[result_name], result.added_to

    def _rules(self, formats: LayerFormats) -> Rules:
        from layerline.graph.quantization.qdq_placement import Rules
        from layerline.graph.quantization.targets import OPS

        return Rules(
            target=self.target,
            format=self._format,
            formats=formats.quantized,
            ops=OPS if self.ops is None else self.ops,
            skip=self.skip,
            per_channel=self.per_channel,
            attention=self.attention,
            int4_block=self.block_size,
            dynamic=self.dynamic,
            keep=formats.kept,
            forced=formats.quantized,
        )

    def _maker(self, calibrated: Calibrated, formats: LayerFormats, data: CalibrationData, probes: list[Feed]) -> Make:
        """Makes the model in which further layers stay float, or are half precision."""
        from layerline.graph.quantization import convert

        greatest = functools.cache(lambda: convert.greatest_values(calibrated.model, data, probes))

        def make(kept: Collection[str], half: Collection[str]) -> Converted:
            converted = calibrated.converted(dict.fromkeys(kept, f"search: in {self._format} the budget fails"))
            if self.rest != "fp32":
                return convert.to_half(converted, greatest(), self.rest, skip=self.skip, single=formats.single)
            in_half = {*formats.half, *half}
            if in_half:
                return convert.to_half(converted, greatest(), formats.half_type or "fp16", skip=(), only=in_half)
            return converted

        return make

    def _max_drop(self) -> MaxDrop | None:
        if self.search and self.max_drop is None:
            return SEARCH_DROP
        return self.max_drop

    def _bounds(self) -> Bounds:
        from layerline.parity.output_sqnr import Bounds

        min_db = self.min_db
        if self.search and "min_db" not in self.model_fields_set:
            min_db = SEARCH_DB
        return Bounds(min_db, self.min_cosine)

    def _sample_notes(self, converted: Converted, data: CalibrationData) -> list[str]:
        """How many samples were used, and whether that is fewer than requested."""
        if converted.ranges is None or not converted.ranges.samples:
            return []
        held_out = data.held_out.rows
        note = f"calibrated on {converted.ranges.samples} samples"
        if held_out:
            note += f"; {held_out} more were held out, to judge choices on"
        fewer = converted.ranges.samples + held_out < self.samples and not converted.ranges.stopped
        if fewer and "samples" in self.model_fields_set:
            note += f"; {self.samples} were asked for, and {data.hook()}() has no more"
        return [note]


def _curve(converted: Converted) -> dict[str, Sequence[Mapping[str, Scalar]]]:
    """The scales against the number of samples, where any were calibrated."""
    if converted.ranges is None or len(converted.ranges.convergence) < 2:
        return {}
    return {CONVERGENCE: converted.ranges.convergence}


def _as_it_is(report: Report) -> Report:
    return report


def _formats_of(target: str) -> list[str]:
    """The formats that any operator of a target takes."""
    from layerline.graph.quantization.targets import TARGETS

    taken = set[str]().union(*TARGETS[target].formats.values())
    return [name for name in FORMATS if name in taken]


def _write_plan(out: Path, converted: Converted) -> None:
    from layerline.calib import collect, plan

    (out / plan.FILE).write_text(converted.plan.to_json(), "utf-8")
    if converted.ranges is not None:
        (out / collect.FILE).write_text(converted.ranges.to_json(), "utf-8")


def _bytes(folder: Path) -> int:
    """Size of the model with its external data."""
    return sum(p.stat().st_size for p in folder.glob("model.onnx*"))
