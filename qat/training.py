"""Trains a calibrated graph with fake quantisation, and checks that the quantised ONNX computes what was trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.histogram import shortest
from layerline.calib.plan import QuantPlan
from layerline.calib.scales import greatest
from layerline.graph.analysis.ir_queries import values_by_name
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import own_qdq, qdq, rounding
from layerline.graph.quantization.convert import Calibrated
from layerline.graph.quantization.weight_sources import weight_of
from layerline.parity.search_judge import Verdict
from layerline.pipeline.config.qat_options import QatOptions
from layerline.pipeline.errors import StageError, memory_errors
from layerline.pipeline.inputs.batches import described
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Gate, Scalar
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.qat import student
from layerline.qat.graph_module import GraphModule
from layerline.training.config.sections import Config
from layerline.training.data.batches import Batches
from layerline.training.data.distillation import Loss, Taught
from layerline.training.distributed import rendezvous
from layerline.training.run import hook_trial, train_loop

RTOL = 1e-3
"""Greatest difference of an operator between torch and onnxruntime, over the greatest magnitude of its result."""
ATOL = 1e-6
"""Absolute difference that passes in any case: onnxruntime's Sigmoid is that far off near 0."""
NOT_FINITE = (
    "lower quantize.qat.lr and scale_lr, or look at the ranges that training starts from: `pipe plan quantize` shows a "
    "scale that is far too small or too great"
)
"""What to do about a loss or gradient that is not finite: here nothing is half precision, and no field clips."""
SCALES = "graph.quantizers.*"
"""The names of learned scales among a student's parameters."""


@dataclass(frozen=True)
class Trained:
    """The calibrated graph with trained weights and scales, with gates, notes and metrics for the report."""

    calibrated: Calibrated
    gates: tuple[Gate, ...]
    notes: tuple[str, ...]
    metrics: Mapping[str, Scalar]


def check(model: ir.Model, probes: Sequence[Feed]) -> GraphModule:
    """The graph in torch, if torch computes it as onnxruntime does, with gradients; before anything is calibrated.

    Raises:
        StageError: names the value that differs most, or an operator without a gradient; or the model has Q/DQ.
    """
    if own_qdq.present(model):
        raise StageError("training starts from a float model, and this one brings its own Q/DQ", where="quantize.mode",
                         hint="mode: int8 keeps them with their scales")  # fmt: skip
    model = raise_opset(model, qdq.required_opset(model))
    graph = GraphModule(model)
    smallest = min(probes, key=lambda feed: sum(array.size for array in feed.values()))
    outputs = graph.compute({name: torch.as_tensor(array) for name, array in smallest.items()})
    if not any(output.requires_grad for output in outputs.values()):
        raise StageError("no output depends on a weight that can be trained", where="quantize.mode")
    name, ratio = worst(graph, model, probes[:1], {})
    if ratio > 1:
        raise StageError(
            f"torch and onnxruntime differ by {ratio:.3g} times the tolerance in the operator that computes this value",
            where=name,
            hint="mode: int8 quantises the model without training",
        )
    return graph


def try_loss(task: Task, graph: GraphModule, options: QatOptions) -> None:
    """Computes the loss of the float graph on the first batch, before anything is calibrated.

    Raises Unavailable for the device, TaskError for a hook, StageError for a batch that the graph does not take.
    """
    rendezvous.device(options.device, "quantize.qat.device")
    model = student.maker(task, graph.inputs, graph.outputs)(graph)
    batches = Batches(task.call("train_data"), batch_size=options.batch_size, seed=None)
    with task.blaming("drawing a batch of train_data()"):
        batch = next(batches.forever())
    loss = train_loop.loss_of(task, model, Config(), torch.device("cpu"))
    loss(model, batch)


def try_hooks(look: Inspection, options: QatOptions) -> None:
    """Tries the hooks of the training on two samples of the float model, where no earlier stage has tried them."""
    if any(finding.item == "loss()" for finding in look.findings):
        return
    if not look.task.has("model"):
        with look.item("train_data()"):
            look.ok("train_data()", described(next(Batches(look.task.call("train_data"), batch_size=2).forever())))
        return
    # The float model has no scales, and is its own teacher.
    plain = options.model_copy(update={"learned_scales": False, "distill": 0.0})
    hook_trial.try_training_hooks(
        look,
        _config(plain),
        steps=options.steps,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        device=lambda: rendezvous.device(options.device, "quantize.qat.device"),
    )


def train(work: Work, calibrated: Calibrated, options: QatOptions, probes: Sequence[Feed]) -> Trained:
    """Trains on the task's train_data() and loss(), from the weights and the plan of a calibration.

    Resumes an interrupted training from its last checkpoint.

    Raises:
        TaskError: a hook failed, or loss() uses more of the model than calling it.
        StageError: the loss stopped being finite.
    """
    graph = GraphModule(calibrated.model, calibrated.plan, learned=options.learned_scales)
    make_student = student.maker(work.task, graph.inputs, graph.outputs)
    teacher = make_student(GraphModule(calibrated.model)) if options.distill else None
    with train_loop.deterministic(), memory_errors():
        run = train_loop.prepare(
            work.task,
            _config(options),
            epochs=options.epochs,
            steps=options.steps,
            batch_size=options.batch_size,
            seed=options.seed,
            device=rendezvous.device(options.device, "quantize.qat.device"),
            model=make_student(graph),
            teacher=teacher,
        )
        if isinstance(run.loss, Taught) and options.distill_loss == "outputs":
            run.loss.distillation = student.OutputMatching(run.loss.distillation.teacher, weight=options.distill)
        run.loss = _freezing(run.loss, graph, run, round(options.freeze_after * run.total))
        try:
            train_loop.train(run, work.scratch, work.log)
        except StageError as error:
            if not run.lane.skipped:  # not about a loss that is not finite
                raise
            raise StageError(error.what, where=error.where, hint=NOT_FINITE) from error
        if options.ema_decay:
            run.mo.switch_to_ema()
    graph.cpu().eval()  # onnxruntime compares on the CPU
    trained = graph.trained(calibrated.model)
    plan = _with_scales(calibrated.plan, trained, graph.scales())
    result = dataclasses.replace(calibrated, model=trained, plan=plan, shifts={}, rounded=rounding.RoundedWeights())
    # Advice behind a semicolon names fields of the train stage.
    notes = [warning.partition("; nonfinite.")[0] for warning in run.mo.warnings]
    if run.resumed is not None:
        notes.append(f"training resumed at step {run.resumed}")
    accepted = train_loop.accepted(run.lane)
    if not accepted.passed:
        accepted = dataclasses.replace(accepted, hint=NOT_FINITE)
    gates = (accepted, _equal(graph, result, probes))
    metrics: dict[str, Scalar] = {"qat_steps": run.lane.steps, "qat_loss": run.lane.loss}
    return Trained(result, gates, tuple(notes), metrics)


def lost(start: Verdict, end: Verdict, options: QatOptions) -> str:
    """What to say where a training made the model worse; empty where it did not."""
    if end.lack <= start.lack:
        return ""
    result = "the model from before is the result (quantize.qat.keep: trained takes the trained one)"
    if options.keep == "trained":
        result = "the trained model is the result"
    return (
        f"training lost: {start.seen} before it, {end.seen} after it; {result}. Raise quantize.qat.epochs, or lower lr "
        f"({options.lr:g}) and scale_lr ({options.scale_lr:g}): a short training at high rates may end below its start"
    )


def worst(graph: GraphModule, model: ir.Model, probes: Sequence[Feed], steps: Mapping[str, float]) -> tuple[str, float]:
    """The value in which torch and onnxruntime differ most, and the difference as a multiple of its tolerance.

    Each operator in torch gets the inputs that onnxruntime computed. So an element half-way between two steps, which
    may round to either side, counts at one operator and not at all that follow.

    Args:
        model: what onnxruntime runs; it has the graph's values under their names.
        steps: the tolerance of each quantised value by name; the others have `RTOL` and `ATOL`.
    """
    names = [name for step in graph.steps for name in step.outputs if name]
    session = OnnxRuntime(few_runs=True).open(model, [n for n in names if n not in graph.outputs])
    ratios: dict[str, float] = {"": 0.0}

    def watch(name: str, in_torch: Tensor) -> Tensor:
        if name not in by_onnxruntime:
            return in_torch
        expected = torch.as_tensor(by_onnxruntime[name])
        ratios[name] = max(_distance(in_torch, expected, steps.get(name)), ratios.get(name, 0.0))
        return expected  # the next operator starts from what onnxruntime computed

    for feed in probes:
        by_onnxruntime = session.run(feed)
        with torch.no_grad():
            graph.compute({name: torch.as_tensor(feed[name]) for name in graph.inputs}, watch)
    return max(ratios.items(), key=lambda entry: entry[1])


def _distance(actual: Tensor, expected: Tensor, step: float | None) -> float:
    """The greatest difference of two tensors, as a multiple of the tolerance: one step, or `RTOL` and `ATOL`."""
    if actual.shape != expected.shape:
        return float("inf")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    difference = float(torch.where(same, 0.0, (actual.double() - expected.double()).abs()).amax())
    if not math.isfinite(difference):
        return float("inf")
    if step is not None:
        return difference / step
    magnitude = float(torch.where(expected.isfinite(), expected.abs(), 0.0).amax())
    return difference / (RTOL * magnitude + ATOL)


def _equal(graph: GraphModule, result: Calibrated, probes: Sequence[Feed]) -> Gate:
    """Whether the quantised ONNX computes what the trained module does, within one step of each scale."""
    steps = {value.name: min(value.scales) for value in result.plan.values if value.role == "activation"}
    name, ratio = worst(graph, qdq.apply(result.model, result.plan), probes, steps)
    actual = "no difference"
    if name in steps:
        actual = f"{name} differs by {ratio:.2g} steps of its scale"
    elif name:
        actual = f"{name} differs by {ratio:.2g} times the tolerance"
    return Gate("quantised as trained", ratio <= 1, actual, "at most one step of the scale, in each value")


def _freezing(loss: Loss, graph: GraphModule, run: train_loop.TrainingRun, step: int) -> Loss:
    """The same loss; from that optimizer step on the scales get no gradient, also after a resume."""

    def frozen_in_time(model: Any, batch: Any) -> Any:
        for fake in graph.quantizers.children():
            fake.frozen = run.attempted >= step  # type: ignore[assignment]
        return loss(model, batch)

    return frozen_in_time


def _config(options: QatOptions) -> Config:
    sections: dict[str, Any] = {
        "optimizer": {"name": "adamw", "lr": options.lr, "weight_decay": 0.0},
        "scheduler": {"name": "cosine", "warmup_ratio": 0.05},
    }
    if options.learned_scales:
        sections["optimizer"]["groups"] = [{"match": SCALES, "lr": options.scale_lr}]
    if options.ema_decay:
        sections["ema"] = {"decay": options.ema_decay, "warmup": True}
    if options.distill:
        sections["distillation"] = {"alpha": options.distill}
    return Config.model_validate(sections)


def _with_scales(plan: QuantPlan, model: ir.Model, scales: Mapping[tuple[str, str], np.ndarray[Any, Any]]) -> QuantPlan:
    """The same plan with trained scales."""
    stored = values_by_name(model.graph)
    values = []
    for item in plan.values:
        numbers = tuple(shortest(scale) for scale in scales[item.name, item.dtype])
        # An activation keeps the range that calibration saw; trained weights have another.
        ends = item.seen
        weight = weight_of(stored[item.name])
        if item.role == "weight" and weight is not None:
            ends = (shortest(weight.min()), shortest(weight.max()))
        amax = shortest(greatest(item.dtype) * max(numbers))
        values.append(dataclasses.replace(item, scales=numbers, amax=amax, seen=ends, calibrator="qat"))
    return dataclasses.replace(plan, values=tuple(values))
