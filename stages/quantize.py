"""quantize: converts the fused model to a smaller format, and reports the reasons and the loss of each layer."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from layerline.pipeline.config.quantize_fields import FORMATS, QuantizeFields
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import CONVERGENCE, Report, Scalar
from layerline.pipeline.stage import Work
from layerline.pipeline.task import EXAMPLE_HOOKS

if TYPE_CHECKING:
    from layerline.export.signature import Signature
    from layerline.graph.quantization.calibration_data import CalibrationData
    from layerline.graph.quantization.convert import Converted
    from layerline.parity.conversion import Conversion, ConversionResult

COPIED = ("signature.json", "probes.safetensors")
CALIBRATION_HOOKS = ("calib_data", "train_data", "eval_data")


class Quantize(QuantizeFields):
    """Quantisation after TensorRT's rules, with or without training, or a conversion to half precision.

    A model that brings its own Q/DQ, from training with fake quantisation or from another tool, goes through mode int8
    or fp8 as it is: its scales are kept, nothing else is quantised, and no sample is calibrated.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 27
    takes: ClassVar[Mapping[str, str]] = {"model": "fused"}
    gives: ClassVar[str] = "quantized"
    uses: ClassVar[tuple[str, ...]] = (*CALIBRATION_HOOKS, "metric", "show")
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (CALIBRATION_HOOKS, ("eval_data",))
    env: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir", "onnxruntime")

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
        if self.mode == "qat":
            return (*self.env, "torch")
        return self.env

    def check(self, look: Inspection) -> None:
        from layerline.calib import data_check

        with look.item("quantize"):
            inputs = look.need("signature").inputs
            # Half precision and blocks of weights need no ranges, but what the task gives is looked at.
            wanted = {self.format, *self.layers.values(), *self.repairs}
            calibrates = self.dynamic or bool({"int8", "fp8", "awq", "gptq"} & wanted)
            if self.mode != "none" and (calibrates or any(map(look.task.has, CALIBRATION_HOOKS))):
                requested = self.samples if "samples" in self.model_fields_set else None
                # Without samples a run fails as soon as it meets a layer whose inputs are quantised.
                required = calibrates and not self.skip and self._quantizes_inputs(look)
                data_check.check_calibration(look, inputs, CALIBRATION_HOOKS, requested, required=required)
            data_check.check_metric(look, inputs, look.need("run"), self.max_drop)
        if self.mode == "qat":
            self._check_training(look)
        look.shared["formats"] = [name for name in FORMATS if name in (self.format, *self.layers.values())]
        with look.item("quantize.skip"):
            look.names_something(self.skip, "quantize.skip")
        with look.item("quantize.layers"):
            look.names_something(tuple(self.layers), "quantize.layers")
        if self.ops is not None:
            with look.item("quantize.ops"):
                self._check_ops(self.ops, look)

    def _quantizes_inputs(self, look: Inspection) -> bool:
        """Whether the model has layers with weights, and no Q/DQ of its own."""
        from layerline.graph.quantization.targets import WEIGHTED

        present = set(look.need("ops"))
        ops: tuple[str, ...] = WEIGHTED
        if self.ops is not None:
            ops = self.ops
        return not present.isdisjoint(ops) and "DequantizeLinear" not in present

    def _check_ops(self, ops: tuple[str, ...], look: Inspection) -> None:
        from layerline.graph.quantization.qdq_placement import check_ops
        from layerline.graph.quantization.targets import OPS

        check_ops(ops)
        look.ok("quantize.ops", ", ".join(ops))
        present = look.need("ops")
        if self.format in FORMATS and not set(ops) & present:
            quantizable = ", ".join(sorted(present & set(OPS))) or "none with a rule"
            absent = f"none of {', '.join(ops)} is in the model, so nothing would be {self.format}"
            look.warn("quantize.ops", absent, f"the model has {quantizable}")

    def _check_training(self, look: Inspection) -> None:
        from layerline.qat import training

        with look.item("quantize.qat"):
            training.try_hooks(look, self.training)

    def run(self, work: Work) -> Report:
        from layerline.export import probe_files
        from layerline.export.signature import Signature
        from layerline.graph.io import onnx_files
        from layerline.graph.quantization import layer_formats, own_qdq, rescaled_names
        from layerline.parity.accuracy_budget import Evaluation
        from layerline.parity.conversion import Conversion

        folder = work.inputs["model"]
        model = onnx_files.read_model(folder / onnx_files.FILE)
        probes = probe_files.load(folder)
        signature = Signature.load(folder)
        data = self._data(work, signature)
        evaluation = Evaluation(data)
        # Names first: what follows may take minutes.
        if self.mode != "none" and not own_qdq.present(model):
            layer_formats.refuse_unknown(model, self.skip, self.layers)
        evaluation.refuse_unknown(model, self.max_drop)
        conversion = Conversion(fields=self, model=model, data=data, probes=probes, evaluation=evaluation)
        result = self._convert(work, conversion)
        converted = rescaled_names.apply(result.converted)
        onnx_files.save(converted.model, work.out)
        for name in COPIED:
            shutil.copyfile(folder / name, work.out / name)
        _write_plan(work.out, converted)
        report = self._report(converted, conversion, signature, work)
        for addition in result.additions:
            report = addition(report)
        return report

    def _data(self, work: Work, signature: Signature) -> CalibrationData:
        """The samples: to calibrate on, to judge choices on, and to evaluate on."""
        from layerline.graph.quantization.calibration_data import CalibrationData

        # Of fp8 no range is chosen, so that there is nothing to judge.
        chooses = self.calibrator == "auto" and "int8" in (self.format, *self.layers.values())
        percentile = self.percentile
        if self.calibrator == "minmax":
            percentile = 100.0
        return CalibrationData(
            work,
            signature.inputs,
            hooks=CALIBRATION_HOOKS,
            samples=self.samples,
            batch_size=self.batch_size,
            selection=self.selection,
            stop_early=self.stop_early and self.stop_early / 100,
            percentile=percentile,
            holds_out=chooses or self.bias_correction or bool(self.repairs) or self.search,
            drops_outliers=self.calibrator == "auto",
        )

    def _convert(self, work: Work, conversion: Conversion) -> ConversionResult:
        """Converts the model in the way that its mode asks for, or its own Q/DQ."""
        from layerline.graph.quantization import convert, own_qdq
        from layerline.parity.conversion import ConversionResult

        model = conversion.model
        if self.mode == "none":
            return ConversionResult(convert.unchanged(model))
        if self.format not in FORMATS:
            return conversion.half()
        if self.mode == "qat":
            from layerline.qat import training

            # A loss() that fails is refused before the calibration, which may take minutes.
            training.try_loss(work.task, training.check(model, conversion.probes), self.training)
        if own_qdq.present(model):
            return conversion.own_qdq()
        if self.mode == "qat":
            return self._trained(work, conversion)
        return conversion.quantized()

    def _trained(self, work: Work, conversion: Conversion) -> ConversionResult:
        """Trains what was calibrated, with fake quantisation where its plan quantises."""
        from layerline.graph.quantization import rescaled_names
        from layerline.parity.conversion import ConversionResult
        from layerline.qat import outcome, training

        calibrated = conversion.calibrated(conversion.model)
        if not calibrated.layers():
            return ConversionResult(conversion.finished(calibrated)[1])
        additions: list[Callable[[Report], Report]] = []
        models: dict[str, Converted] = {}
        start_name = outcome.PTQ
        if self.repairs:
            repaired = conversion.repaired(calibrated)
            calibrated = repaired.calibrated
            additions.append(repaired.added_to)
            if calibrated.repairs:
                models[outcome.PTQ] = repaired.plain
                start_name = outcome.REPAIRED
        before = conversion.maker(calibrated)((), {})
        models[start_name] = before
        start = conversion.judge(before)
        trained = training.train(work, calibrated, self.training, conversion.probes)
        after = conversion.maker(trained.calibrated)((), {})
        # Compared with the float model that training started from.
        after = dataclasses.replace(after, reference=before.reference, trained=after.reference)
        note = training.lost(start, conversion.judge(after), self.training)
        if note:
            work.log.say(note)
        models[outcome.QAT] = after
        measured = {name: conversion.evaluation.measure(converted) for name, converted in models.items()}
        models = {name: rescaled_names.apply(converted) for name, converted in models.items()}
        result_name = outcome.QAT
        if note and self.training.keep == "better":
            result_name = start_name
        qat = outcome.QatOutcome(
            trained=trained,
            models=models,
            measured=measured,
            result=result_name,
            note=note,
            data=conversion.data,
            probes=conversion.probes,
        )
        return ConversionResult(models[result_name], (qat.added_to, *additions))

    def _report(self, converted: Converted, conversion: Conversion, signature: Signature, work: Work) -> Report:
        """What the conversion costs: by layer, at the outputs, and of the task's metric."""
        from layerline.graph.io import onnx_files
        from layerline.parity import accuracy_budget, output_sqnr, quantization_report, quantized_session

        data, probes, evaluation = conversion.data, conversion.probes, conversion.evaluation
        # Layers are compared with the float model whose weights they quantise; outputs and metrics with the one given.
        same_weights = converted
        if converted.trained is not None:
            same_weights = dataclasses.replace(converted, reference=converted.trained)
        report = quantization_report.layer_report(self.name, same_weights, probes, mode=self.format)
        # Without a metric a search judges the outputs: there its own budget for metrics means nothing.
        max_drop = self.budget
        if evaluation.measure(converted) is None:
            max_drop = self.max_drop
        if self.mode != "none":
            # Samples of eval_data() are there once the metric was measured.
            feeds = output_sqnr.samples(data, probes)
            report = quantization_report.with_samples(report, same_weights, feeds)
        accuracy = accuracy_budget.measure(converted, evaluation, report.records, max_drop)
        if self.mode != "none":
            if quantization_report.runs_on_onnxruntime(converted):
                path = work.out / onnx_files.FILE
                report = quantized_session.with_default_session(report, converted, path, probes, data.calibration_feeds)
            bounds = None if accuracy.metrics else conversion.bounds
            report = quantization_report.with_outputs(report, converted, data, probes, signature, bounds=bounds)
        sizes = {"bytes_before": _bytes(work.inputs["model"]), "bytes_after": _bytes(work.out)}
        if self.mode in FORMATS and sizes["bytes_after"] >= sizes["bytes_before"]:
            note = "the file is no smaller: the weights that became smaller, if any, saved less than Q/DQ nodes took"
            report = dataclasses.replace(report, notes=(*report.notes, f"{note}; `pipe plan` lists what stays float"))
        return dataclasses.replace(
            report,
            metrics={**accuracy.metrics, **sizes, **report.metrics},
            gates=(*report.gates, *accuracy.gates),
            notes=(*report.notes, *self._sample_notes(converted, data), *accuracy.notes),
            tables={**accuracy.tables, **report.tables, **_curve(converted)},
        )

    def _sample_notes(self, converted: Converted, data: CalibrationData) -> list[str]:
        """How many samples were used, and whether that is fewer than requested."""
        if converted.ranges is None or not converted.ranges.samples:
            return []
        held_out = data.held_out.rows
        note = f"calibrated on {converted.ranges.samples} samples"
        if held_out:
            note += f"; choices were not fitted on {held_out} of them, but judged on these"
        if data.hook() == "eval_data" or not data.evaluated.batches():
            # The final ranges are those of all samples, held-out ones too.
            note += "; the outputs are compared on samples that the ranges include, and fresh ones may do worse"
        fewer = converted.ranges.samples + data.left_out < self.samples and not converted.ranges.stopped
        if fewer and "samples" in self.model_fields_set:
            note += f"; {self.samples} were requested, and {data.hook()}() has no more"
        return [note]


def _curve(converted: Converted) -> dict[str, Sequence[Mapping[str, Scalar]]]:
    """The scales against the number of samples, where any were calibrated."""
    if converted.ranges is None or len(converted.ranges.convergence) < 2:
        return {}
    return {CONVERGENCE: converted.ranges.convergence}


def _write_plan(out: Path, converted: Converted) -> None:
    from layerline.calib import collect, plan

    (out / plan.FILE).write_text(converted.plan.to_json(), "utf-8")
    if converted.ranges is not None:
        (out / collect.FILE).write_text(converted.ranges.to_json(), "utf-8")


def _bytes(folder: Path) -> int:
    """Size of the model with its external data."""
    return sum(p.stat().st_size for p in folder.glob("model.onnx*"))
