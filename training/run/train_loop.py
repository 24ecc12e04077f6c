"""The training loop of the `train` stage. A run may be killed at any moment and resumes bit for bit."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import described
from layerline.pipeline.report import Gate
from layerline.pipeline.stage import Log
from layerline.pipeline.task import Task
from layerline.pipeline.untrusted import launched
from layerline.training.config.sections import Config
from layerline.training.data.batches import Batches, size, to_device
from layerline.training.data.distillation import Distillation, Loss, Taught
from layerline.training.data.loss import counted_labels, default_loss
from layerline.training.distributed import ranks
from layerline.training.loop.accumulation import counted
from layerline.training.loop.step_engine import Lane
from layerline.training.model.canonical_names import named
from layerline.training.model.split_tensors import is_split, whole
from layerline.training.randomness import rng_state
from layerline.training.run.shipping import module_of, train_mode
from layerline.training.run.validation import evaluation_batches, metric_of
from layerline.training.setup.model_optimizer import ModelOptimizer
from layerline.training.state import checkpoint

_FILL: Any = torch.utils.deterministic
_DRAW_EVERY_S = 0.1
# The least time between two saves: this many seconds, and this many times the duration of the last save.
_SAVE_EVERY_S, _SAVE_SHARE = 10.0, 20


@dataclass
class TrainingRun:
    """One training run."""

    task: Task
    model: nn.Module
    mo: ModelOptimizer
    batches: Batches
    loss: Loss  # function that returns a sum and its weight, or a mean over the batch's samples and None
    device: torch.device
    total: int  # optimizer steps to attempt
    initial: dict[str, Tensor]  # the first weights, by canonical name
    before_last: dict[str, Tensor]  # the weights before the last optimizer step; empty until then
    resumed: int | None = None  # the step at which it resumed; None for a new run

    @property
    def lane(self) -> Lane:
        """The one lane of the one model."""
        (lane,) = self.mo.lanes.values()
        return lane

    @property
    def attempted(self) -> int:
        """Optimizer steps so far, accepted or rejected."""
        return self.lane.steps + self.lane.skipped


def prepare(task: Task, config: Config, *, epochs: int, steps: int | None, batch_size: int, seed: int, workers: int = 0,
            device: torch.device, parts: Mapping[str, str] | None = None, model: nn.Module | None = None,
            teacher: nn.Module | None = None) -> TrainingRun:  # fmt: skip
    """Builds model, data and optimizer from the task's hooks. All random draws come from `seed`.

    Args:
        model: trained in place of the task's, by this process alone.
        teacher: in place of the task's.
        parts: the parts of the stage's key. Code and data among them must be the same on every rank.
    """
    # All ranks must run the same code on the same data, or their gradients have no common meaning.
    group = None
    rank, size = 0, 1
    if launched()[1] > 1 and model is None:
        group = ranks.join(config.distributed, device)
    if group is not None:
        rank, size = group.rank, group.size
        group.compare(_code_and_data(parts or {}), "run the same task.py and data files on each rank")
    check_evaluation(task, config)
    rng_state.seed_all(seed)
    if model is None:
        model = module_of(task)
    named(model)  # refuses parameters without a shape, before the model is moved
    if not is_split(model):  # fully_shard has moved its parts to the device
        model.to(device)
    modes = train_mode(model)
    batches = Batches(task.call("train_data"), batch_size=batch_size, seed=seed, workers=workers, rank=rank, ranks=size)
    total = steps or epochs * steps_per_epoch(batches, config.accumulate.steps)
    if config.scheduler.total_steps is None:
        config = config.replace(scheduler={"total_steps": total})
    # The loop saves by itself, between two steps.
    mo = ModelOptimizer(model, config.replace(monitor={"save_interval": 0}))
    mo.register("data", batches)
    if config.monitor.valid_interval:
        # Called once and before the draws of training, which must not depend on when validation begins.
        evaluation = evaluation_batches(task, batch_size)
        mo.validate_with(lambda net: next(iter(metric_of(task, net, evaluation, device=device).values())))
    # Before the first step; the report compares the trained weights with these.
    initial = _copies(named(model).params)
    for text in modes:
        mo.lanes[""].monitor.warn("modes", text)
    loss = loss_of(task, model, config, device, teacher)
    # Draws of the model (dropout) don't depend on how many numbers building it took. Each rank has its own seed.
    seed_parts = [seed, 1]
    if rank:
        seed_parts.append(rank)
    rng_state.seed_all(rng_state.mix(*seed_parts))
    return TrainingRun(task, model, mo, batches, loss, device, total, initial, {})


def check_evaluation(task: Task, config: Config) -> None:
    """Refuses a validation without data. Raises TaskError if there is no eval_data()."""
    if config.monitor.valid_interval and not task.has("eval_data"):
        raise TaskError("there is no such hook, and training.valid_interval asks for the metric over its data",
                        where="eval_data", hint="define eval_data(), or leave valid_interval out")  # fmt: skip


def _code_and_data(parts: Mapping[str, str]) -> list[tuple[str, str]]:
    """The code and data that a training reads, with their digests, for `Ranks.compare`."""
    kinds = {"hook": "{}() and what it reaches", "file": "the file {}", "code": "code of Layerline"}
    lines = []
    for part, digest in parts.items():
        kind, _, name = part.partition(".")
        if kind in kinds:
            lines.append((kinds[kind].format(name), digest[:12]))
    return lines


def train(run: TrainingRun, scratch: Path, log: Log, *, save_every: int = 0) -> None:
    """Runs to the end, from the newest sound checkpoint in `scratch` where there is one. A checkpoint is written every
    `save_every` optimizer steps, every ten seconds or so, and at an interrupt."""
    mo, folder = run.mo, scratch / "checkpoints"
    # Inside the stage's own scratch folder, so that an interrupted training finds them again.
    if mo.best is not None:
        mo.best.folder = scratch / "best"
    if run.lane.monitor.write is not None:
        run.lane.monitor.write = log.say
    run.lane.monitor.speak = log.say
    mo.on_log(log.row)
    run.lane.monitor.loads = run.batches.form != "columns"
    resumable = bool(checkpoint.rotation(folder))
    if mo.ranks is not None:
        resumable = mo.ranks.by_first(lambda: resumable)
    if resumable:
        mo.load_ckpt(folder)
        run.resumed = run.attempted
        run.lane.monitor.replay()
        log.say(f"resuming at step {run.resumed} of {run.total}")
    saved_at = time.perf_counter()
    saving = drawn_at = 0.0
    saved_step = run.attempted
    with _interrupts() as interrupted:
        stream = run.batches.forever()
        while run.attempted < run.total and not mo.should_stop:
            one_batch(run, stream)
            if run.attempted == 0 and run.batches.epoch > 1 and run.lane.window.untouched:
                # Windows of weight 0 are neither accepted nor rejected: this would go on forever.
                what = "a whole epoch of train_data() holds no label that counts, so nothing can be trained"
                hint = "labels of -100 are left out of the loss; loss() may also have given a weight of 0 each time"
                raise TaskError(what, where="train_data", hint=hint)
            now = time.perf_counter()
            done = run.attempted
            due = now - saved_at > max(_SAVE_EVERY_S, _SAVE_SHARE * saving)
            due |= save_every > 0 and done - saved_step >= save_every
            save, stop = _agreed(run, due, bool(interrupted))
            # Not after the last step: the process that ends the run must have measured what it reports on this step.
            if done < run.total and (save or stop):
                checkpoint.save(mo, folder)
                saved_at = time.perf_counter()
                saved_step, saving = done, saved_at - now
            if stop:
                raise KeyboardInterrupt
            if now - drawn_at > _DRAW_EVERY_S:
                drawn_at = now
                _draw(run, log)
        _draw(run, log)


def take_best(run: TrainingRun) -> str:
    """Loads the best checkpoint where `keep_best` keeps one, and returns a note on it."""
    best = run.mo.best
    if best is None or not best.entries:
        return ""
    metric, step, file = best.entries[0]
    last = f"the last step was {run.lane.steps}"
    if run.mo.should_stop:
        last += ", where training stopped"
    if not file:
        return f"the best metric was {metric:.6g} at step {step}; {last}"
    if step != run.lane.steps:
        checkpoint.load(run.mo, best.folder / file)
        run.before_last = {}  # it belongs to another step than the present weights
    return f"the weights are those of step {step} with the best metric, {metric:.6g}; {last}"


def _agreed(run: TrainingRun, save: bool, stop: bool) -> tuple[bool, bool]:
    """Whether to save and to stop now. All ranks must do so at the same step: one asks, and the next step tells all."""
    peers = run.lane.peers
    if peers is None:
        return save, stop
    # The wish travels with the next step's gradients.
    peers.ask = max(float(save), 2.0 * stop)
    asked, peers.asked = peers.asked, 0.0
    return asked >= 1.0, asked >= 2.0


def one_batch(run: TrainingRun, stream: Iterator[Any]) -> Any:
    """Trains on the next batch of `stream` and returns it. The last batch of an epoch ends the window."""
    mo = run.mo
    with run.task.blaming("drawing a batch of train_data()"):
        batch = to_device(next(stream), run.device)
    samples = run.batches.counted

    def forward(part: Any) -> tuple[Tensor, float]:
        count = samples
        if part is not batch:
            count = size(part)
        loss, weight = run.loss(mo.model, part)
        if weight is None:
            return loss * count, float(count)
        if not count:  # a rank without a share of this batch runs a sample of another rank, and adds nothing
            return loss * 0, 0.0
        return loss, weight

    # The last step's relative change is part of the report.
    if run.attempted == run.total - 1:
        run.before_last = _copies(run.lane.named.params)
    run.lane.monitor.waited += run.batches.waited
    run.batches.waited = 0.0
    mo.train_step(batch, forward, samples=samples)
    # The window ends with the epoch: a batch of the next one would weigh differently.
    if run.batches.position == 0:
        mo.flush()
    return batch


def _copies(params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies on the CPU, which take no memory of the device that trains."""
    return {n: whole(p.detach()).to("cpu", copy=True) for n, p in params.items()}


def _default_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, float | None]:
    """Weighs batches and ranks by the labels that count, so that any split gives the mean over all labels."""
    with task.blaming("the model", on=lambda: described(batch)):
        labels = counted_labels(batch)
        if labels is None:
            return default_loss(model, batch), None
        return default_loss(model, batch, reduction="sum"), float(labels.sum())


def _own_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, float | None]:
    """The result of the task's loss(): a mean over the samples of the batch, or (sum, weight)."""
    loss = task.get("loss")(model, batch)
    weight = None
    # (sum, weight), so that any split of the data gives one gradient.
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, weight = loss
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        returned = type(loss).__name__
        if isinstance(loss, Tensor):
            returned = f"a tensor of shape {tuple(loss.shape)}"
        hint = "return the mean over the batch, or (sum, weight): the sum over labels or tokens, and their number"
        raise TaskError(f"loss() gave {returned}, expected a scalar tensor with a gradient", where="loss", hint=hint)
    if weight is not None:
        weight = counted(weight)
    return loss, weight


def loss_of(
    task: Task, model: nn.Module, config: Config, device: torch.device, teacher: nn.Module | None = None
) -> Loss:
    """A function for the task's loss of a model on a batch and its weight; None stands for the number of samples. Where
    the section `distillation` asks for it, the loss of the teacher is added: the task's, if none is given."""
    has_loss = task.has("loss")
    loss: Loss = partial(_default_loss, task)
    if has_loss:
        loss = partial(_own_loss, task)
    settings = config.distillation
    if not settings.alpha:
        return loss
    if teacher is None and not task.has("teacher"):
        raise TaskError("there is no such hook, and distillation.alpha asks for it", where="teacher",
                        hint="define teacher(): it returns the trained network, with its weights loaded")  # fmt: skip
    if teacher is None:
        teacher = module_of(task, "teacher")
    teacher.to(device).requires_grad_(False)
    distillation = Distillation(teacher, temperature=settings.temperature, weight=settings.alpha, axis=settings.axis)
    blaming = partial(task.blaming, "teacher()")
    return Taught(loss, model, distillation, blaming, skips_ignored=not has_loss)


def accepted(lane: Lane) -> Gate:
    """Steps were accepted, the last one among them. A step that only lowered the fp16 loss scale does not count."""
    actual = f"{lane.steps} accepted, {lane.skipped} rejected"
    if lane.skipped_in_a_row:
        actual += f", the last {lane.skipped_in_a_row} in a row"
    # A run that ends in rejected steps has stopped learning.
    if lane.steps > 0 and not lane.skipped_in_a_row and math.isfinite(lane.loss):
        return Gate("steps accepted", True, actual, "some, and the last one")
    hint = f"the first rejected step is {lane.first_rejected}: look for a division or log of 0, or lower the rate"
    if not lane.config.nonfinite.triage:
        hint += "; `nonfinite: {triage: true}` under train names the operator and the samples"
    return Gate("steps accepted", False, actual, "some, and the last one", hint)


def steps_per_epoch(batches: Batches, accumulate: int) -> int:
    """Optimizer steps per epoch. Raises TaskError if the data has no length."""
    if batches.per_epoch is None:
        what = "train_data() does not tell its length, so epochs cannot be counted"
        hint = "set `steps:` under train in pipe.yaml, or give the iterable a __len__"
        raise TaskError(what, where="train_data", hint=hint)
    return -(-batches.per_epoch // accumulate)


def _draw(run: TrainingRun, log: Log) -> None:
    lane = run.lane
    figures = {"loss": lane.loss, "lr": run.mo.current_lr, "grad_norm": run.mo.grad_norm, **lane.monitor.speed()}
    log.progress(run.attempted, run.total, **figures)


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch uses deterministic algorithms, and warns where it has none. The machine and the number of threads
    still decide how sums are split."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = _FILL.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's condition; it reads it when CUDA starts
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    _FILL.fill_uninitialized_memory = False  # it costs a pass over every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        _FILL.fill_uninitialized_memory = fill


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of striking in the middle of a step; a second one strikes at once."""
    interrupts: list[int] = []
    # Only the main thread may set a signal handler.
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _frame: Any) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
