"""The functions of the library that work on ONNX models: what the stages of `pipe` do, without a project.

`import layerline` loads this module on first use, so that it needs neither torch nor onnx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from layerline import backends
from layerline.backends.base import Feed, Session
from layerline.calib import collect
from layerline.calib.calibration_survey import Survey
from layerline.calib.hold_out import HoldOut
from layerline.calib.plan import QuantPlan
from layerline.calib.sample_screen import SampleScreen
from layerline.calib.samples import Batch
from layerline.compare.compare_models import compare
from layerline.export import probe_files
from layerline.export.signature import signature
from layerline.graph.fusion import fuse as fusing
from layerline.graph.fusion import fuse as fusion
from layerline.graph.io import onnx_files
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import calibration_data, measured_plan, qdq, qdq_placement, targets
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff

Model: TypeAlias = str | Path | onnx.ModelProto
"""A model in memory, or the path of a model file; external data is read from beside the file."""
Feeds: TypeAlias = Sequence[Mapping[str, npt.NDArray[Any]]]
"""Inputs of several runs: arrays by input name."""
Calibrator: TypeAlias = Literal["auto", "entropy", "percentile", "minmax", "mse"]


@dataclass(frozen=True, kw_only=True)
class FusedModel:
    """What `fuse` made.

    Attributes:
        model: the fused model.
        rewrites: the rules that fired, in order, each with the value that it made: ("batchnorm", "relu_3").
        undone: rewrites that failed their proof and were undone, in the same form.
        notes: sentences for people.
    """

    model: onnx.ModelProto
    rewrites: tuple[tuple[str, str], ...]
    undone: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """What `quantize` made.

    Attributes:
        model: the model with QuantizeLinear and DequantizeLinear nodes.
        plan: the scale of every quantised value, and why the other values stay float; `plan.to_json()` is plan.json.
        notes: sentences for people.
    """

    model: onnx.ModelProto
    plan: QuantPlan
    notes: tuple[str, ...]


def open_session(model: Model, backend: str = "onnxruntime", *, taps: Sequence[str] = ()) -> Session:
    """Loads a model on a backend; `session.run(feed)` takes and returns arrays by name.

    Args:
        model: the model.
        backend: "onnxruntime", "openvino", "tensorrt", "tensorrt-rtx", "torch", or one that another package registers
            under the entry point `layerline.backends`.
        taps: inner values to return beside the outputs.

    Raises:
        ConfigError: there is no such backend.
        Unavailable: the backend can't run on this machine.
        StageError: the backend refuses the model.
    """
    source = Path(model) if isinstance(model, str | Path) else model.SerializeToString()
    return backends.get(backend).open(source, taps)


def load_probes(folder: str | Path) -> list[Feed]:
    """The inputs that a stage's model is verified on: arrays by input name, of several sizes where axes are dynamic.

    Args:
        folder: a stage's input (`work.inputs["model"]`), or what `pipe path` prints.

    Raises:
        StageError: the folder has no probes, or the file is damaged.
    """
    return probe_files.load(Path(folder))


def compare_models(
    reference: Model, candidate: Model, feeds: Feeds, *, isolated: bool = False
) -> tuple[LayerDiff, ...]:
    """Runs two models on the same inputs and compares the values of the same name, and the outputs by position.

    Args:
        reference: the model to compare with.
        candidate: the model that is measured.
        feeds: the inputs.
        isolated: whether to measure each layer by itself too, fed with the values of the reference:
            `extra["isolated_sqnr_db"]` of its row.

    Returns:
        One row per value, in the order of the reference's graph.

    Raises:
        StageError: onnxruntime refuses a model or a feed, or there is no feed.
    """
    return compare(_read(reference), _read(candidate), feeds, isolated=isolated)


def fuse(model: Model, feeds: Feeds, *, rules: Mapping[str, bool] | None = None) -> FusedModel:
    """Applies the fusion rules and keeps the rewrites that are proved on the feeds.

    Args:
        model: the model; it is not changed.
        feeds: real inputs, of several sizes where axes are dynamic.
        rules: rules to switch off by name, {"batchnorm": False}; docs/fusion.md lists them.

    Raises:
        ConfigError: there is no such rule.
        StageError: the model can't be run, or there is no feed.
    """
    chosen = fusion.select(rules or {})
    prepared, notes = prepare(_read(model))
    fused = fusing.fuse(prepared, feeds, rules=chosen)
    return FusedModel(
        model=ir.to_proto(fused.model),
        rewrites=tuple((p.firing.site.rule, p.firing.site.value) for p in fused.proofs),
        undone=tuple((p.firing.site.rule, p.firing.site.value) for p in fused.undone),
        notes=(*notes, *fused.notes),
    )


def quantize(
    model: Model,
    feeds: Feeds,
    *,
    calibrator: Calibrator = "auto",
    skip: Sequence[str] = (),
    ops: Sequence[str] = targets.OPS,
    per_channel: bool = True,
    percentile: float = 99.99,
) -> QuantizedModel:
    """Quantises a float model to int8 with ranges that are calibrated on the feeds.

    Calibrator auto is judged on samples that it is not fitted on, and leaves out outliers, as the stage does.

    Args:
        model: the model; it is not changed.
        feeds: calibration samples, batched or one by one.
        calibrator: how the clipping threshold is chosen; see `quantize.calibrator` in docs/config.md.
        skip: what stays float: names of values or nodes, module paths, or globs of either.
        ops: operators to quantise.
        per_channel: one scale per output channel of a weight, not one per weight.
        percentile: for calibrator "percentile", per cent of the non-zero values that stay inside the range.

    Raises:
        ConfigError: an operator without a rule, or a name in `skip` that matches nothing.
        StageError: there is no feed, the model has Q/DQ nodes already, or an activation is not finite.
    """
    if not feeds:
        raise StageError("there is no sample to calibrate on", where="feeds")
    prepared, notes = prepare(_read(model))
    light = raise_opset(prepared, qdq.required_opset(prepared))
    rules = qdq_placement.Rules(ops=ops, skip=skip, per_channel=per_channel)
    placed = qdq_placement.place(light, rules)
    batches = [Batch({k: np.asarray(v) for k, v in feed.items()}, None, _rows(feed)) for feed in feeds]
    inputs = signature(light).inputs
    fitted, judged = Survey(inputs), Survey(inputs)
    hold_out = HoldOut(fitted, judged)
    screen = SampleScreen(
        fitted,
        "stop",
        lambda feed: calibration_data.session(light, ()).run(feed),
        every=False,
        drops_outliers=calibrator == "auto",
    )
    read = hold_out.through(screen.through(batches))
    ranges = collect.collect(lambda taps: calibration_data.session(light, taps), read, placed.activations)
    hold_out.finish()
    tuned = measured_plan.tuned(
        light,
        rules,
        placed,
        ranges.histograms,
        [batch.feed for batch in fitted.batches()],
        [batch.feed for batch in judged.batches()],
        calibrator=calibrator,
        percentile=percentile,
    )
    all_notes = (*notes, *ranges.notes, *screen.notes(int), *tuned.notes)
    quantized = ir.to_proto(qdq.apply(light, tuned.plan))
    return QuantizedModel(model=quantized, plan=tuned.plan, notes=all_notes)


def _read(model: Model) -> ir.Model:
    if isinstance(model, onnx.ModelProto):
        return as_ir(model)
    return onnx_files.read_model(Path(model))


def _rows(feed: Mapping[str, npt.NDArray[Any]]) -> int:
    first = np.asarray(next(iter(feed.values())))
    return int(first.shape[0]) if first.ndim else 1
