"""The training loop of the `train` stage: a run that can be killed at any moment and goes on bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import described
from layerline.pipeline.stage import Log
from layerline.pipeline.task import Task
from layerline.training.config.sections import Config
from layerline.training.data.batches import Batches, to_device
from layerline.training.data.distillation import Distillation, Loss, Taught
from layerline.training.data.loss import default_loss, valid_labels
from layerline.training.distributed import ranks, rendezvous
from layerline.training.loop.accumulation import counted
from layerline.training.loop.step_engine import Lane
from layerline.training.model.canonical_names import named
from layerline.training.model.modes import train_mode
from layerline.training.model.split_tensors import whole
from layerline.training.model_optimizer import ModelOptimizer
from layerline.training.randomness import rng_state
from layerline.training.run.validation import metric_of
from layerline.training.state import checkpoint

_FILL: Any = torch.utils.deterministic
_DRAW_EVERY_S = 0.1
# Seconds between two saves, at least: so many, and so many times what the last one took.
_SAVE_EVERY_S, _SAVE_SHARE = 10.0, 20


@dataclass
class Run:
    """One training run.

    Attributes:
        initial: the weights it started from, by canonical name.
        before_last: the weights before the last optimizer step; empty until then.
        total: optimizer steps it will attempt.
        resumed: the step it went on from; None when it started anew.
        loss: of a batch: a sum with what it is a sum over, or a mean over the batch's samples with None.
    """

    task: Task
    model: nn.Module
    mo: ModelOptimizer
    batches: Batches
    loss: Callable[[nn.Module, Any], tuple[Tensor, float | None]]
    device: torch.device
    total: int
    initial: dict[str, Tensor]
    before_last: dict[str, Tensor]
    resumed: int | None = None

    @property
    def lane(self) -> Lane:
        """The one lane of the one model."""
        (lane,) = self.mo.lanes.values()
        return lane

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that training may change."""
        return set(self.lane.names)

    @property
    def attempted(self) -> int:
        """Optimizer steps so far, accepted or rejected."""
        return self.lane.steps + self.lane.skipped


def prepare(task: Task, config: Config, *, epochs: int, steps: int | None, batch_size: int, seed: int, workers: int,
            device: torch.device, parts: Mapping[str, str] | None = None) -> Run:  # fmt: skip
    """Builds model, data and optimizer from the task's hooks, all random draws from `seed`.

    Args:
        parts: the parts of the stage's key, of which code and data must be the same on every rank.

    Raises:
        StageError: ranks have other code or data; names the first that differs.
        TaskError: a hook gave the wrong thing.
        ConfigError: the configuration does not fit the model.
    """
    group = ranks.join(config.distributed, device) if rendezvous.environment()[1] > 1 else None
    if group is not None:
        group.compare(_read(parts or {}), "run the same task.py and data files on each rank")
    rank, size = (group.rank, group.size) if group else (0, 1)
    if size > 2 and "overlap" not in config.distributed.model_fields_set:
        config = config.replace(distributed={"overlap": False})  # a killed run must end in the same bytes
    if config.monitor.valid_interval and not task.has("eval_data"):
        raise TaskError("there is no such hook, and training.valid_interval asks for the metric over its data",
                        where="eval_data", hint="define eval_data(), or leave valid_interval out")  # fmt: skip
    rng_state.seed_all(seed)
    model = task.call("model")
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() gave {type(model).__name__}, expected a torch.nn.Module", where="model")
    named(model)  # refuses what has no shape yet, before it is moved
    if group is None or config.distributed.shard == "none":  # a sharded one comes to the GPU layer by layer
        model.to(device)
    modes = train_mode(model)
    batches = Batches(task.call("train_data"), batch_size=batch_size, seed=seed, workers=workers, rank=rank, ranks=size)
    total = steps if steps is not None else epochs * steps_per_epoch(batches, config.accumulate.steps)
    if config.scheduler.total_steps is None:
        config = config.replace(scheduler={"total_steps": total})
    mo = ModelOptimizer(model, config.replace(monitor={"save_interval": 0}))
    mo.register("data", batches)
    mo.validate_with(lambda net: _first(metric_of(task, net, batch_size=batch_size, device=device)))
    initial = _copies(named(model).params)
    for text in modes:
        mo.lanes[""].monitor.warn("modes", text)
    loss = taught(task, model, config, device)
    # The model's own draws (dropout) start here, whatever building it and its data took; each rank has its own.
    rng_state.seed_all(rng_state.mix(seed, 1, *((rank,) if rank else ())))
    return Run(task, model, mo, batches, loss, device, total, initial, {})


def _read(parts: Mapping[str, str]) -> list[tuple[str, str]]:
    """The code and data that a training reads, a line each for `Ranks.compare`."""
    kinds = {"hook": "{}() and what it reaches", "file": "the file {}", "code": "code of Layerline"}
    found = [(*name.partition(".")[::2], value) for name, value in parts.items()]
    return [(kinds[kind].format(rest), value[:12]) for kind, rest, value in found if kind in kinds]


def train(run: Run, scratch: Path, log: Log, *, save_every: int = 0) -> None:
    """Runs to the end, from the newest sound checkpoint in `scratch` where there is one.

    A checkpoint is written every `save_every` optimizer steps, every ten seconds or so, and on an interrupt.

    Raises:
        KeyboardInterrupt: after the checkpoint was written.
        StageError: the loss or the gradients stopped being finite.
    """
    mo, folder = run.mo, scratch / "checkpoints"
    if mo.best is not None:
        mo.best.folder = scratch / "best"
    if run.lane.monitor.write is not None:
        run.lane.monitor.write = log.say
    run.lane.monitor.speak, run.lane.monitor.loads = log.say, run.batches.form != "columns"
    if _resumable(mo, folder):
        mo.load_ckpt(folder)
        run.resumed = run.attempted
        log.say(f"resuming at step {run.resumed} of {run.total}")
    saved_at, saving, drawn_at, saved_step = time.perf_counter(), 0.0, 0.0, run.attempted
    with _interrupts() as interrupted:
        stream = run.batches.forever()
        while run.attempted < run.total and not mo.should_stop:
            one_batch(run, stream)
            now = time.perf_counter()
            done = run.attempted
            due = (save_every and done - saved_step >= save_every) or now - saved_at > max(
                _SAVE_EVERY_S, _SAVE_SHARE * saving
            )
            save, stop = _agreed(run, bool(due), bool(interrupted))
            # Not after the last step: what the report says of it must be measured in the process that ends the run.
            if done < run.total and (save or stop):
                checkpoint.save(mo, folder)
                saved_at, saved_step, saving = time.perf_counter(), done, time.perf_counter() - now
            if stop:
                raise KeyboardInterrupt
            if now - drawn_at > _DRAW_EVERY_S:
                drawn_at = now
                _draw(run, log)
        _draw(run, log)


def take_best(run: Run) -> str:
    """Puts the best checkpoint's state in place of the last one's where `keep_best` asks for it; a note about it."""
    best = run.mo.best
    if best is None or not best.entries:
        return ""
    metric, step, file = best.entries[0]
    stopped = ", where training stopped" if run.mo.should_stop else ""
    last = run.lane.steps
    if not file:
        return f"the best metric was {metric:.6g} at step {step}; the last step is {last}{stopped}"
    if step != last:
        checkpoint.load(run.mo, best.folder / file)
        run.before_last = {}  # of another step than the weights now
    return f"the weights are those of step {step} with the best metric, {metric:.6g}; the last step was {last}{stopped}"


def _resumable(mo: ModelOptimizer, folder: Path) -> bool:
    if mo.ranks is None:
        return bool(checkpoint.rotation(folder))
    return mo.ranks.by_first(lambda: bool(checkpoint.rotation(folder)))


def _agreed(run: Run, save: bool, stop: bool) -> tuple[bool, bool]:
    """Whether to save and whether to stop now. All ranks must at the same step: one asks, at the next step all know."""
    peers = run.lane.peers
    if peers is None:
        return save, stop
    peers.ask = 2.0 if stop else float(save)
    asked, peers.asked = peers.asked, 0.0
    return asked >= 1.0, asked >= 2.0


def one_batch(run: Run, stream: Iterator[Any]) -> Any:
    """Trains on the next batch of `stream`, and gives it back; the last one of an epoch ends a window."""
    mo = run.mo
    with run.task.blaming("drawing a batch of train_data()"):
        batch = to_device(next(stream), run.device)
    samples = run.batches.counted
    with mo.autocast():
        loss, weight = run.loss(mo.model, batch)
    if weight is None:
        loss, weight = loss * samples, float(samples)
    elif not samples:  # a rank without a share of this batch runs a sample of another rank, and adds nothing
        loss, weight = loss * 0, 0.0
    if run.attempted == run.total - 1:
        run.before_last = _copies(run.lane.named.params)
    run.lane.monitor.waited, run.batches.waited = run.lane.monitor.waited + run.batches.waited, 0.0
    mo.step(loss, weight=weight, samples=samples)
    if run.batches.position == 0:
        mo.flush()
    return batch


def _copies(params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """For the report, out of the way of what trains on the device."""
    return {n: whole(p.detach()).to("cpu", copy=True) for n, p in params.items()}


def _default_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, float | None]:
    """Batches and ranks are weighed by the labels that count, so that any split gives the mean over all labels."""
    with task.blaming("the model", on=lambda: described(batch)):
        labels = valid_labels(batch)
        if labels is None:
            return default_loss(model, batch), None
        return default_loss(model, batch, reduction="sum"), float(labels)


def _own_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, float | None]:
    """What the task's loss() gives: a mean over the samples of the batch, or (sum, weight).

    Raises:
        TaskError: it is neither.
    """
    result = task.get("loss")(model, batch)
    loss, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(
            f"loss() gave {shape}, expected a scalar tensor with a gradient",
            where="loss",
            hint="return the mean over the batch, or (sum, weight): the sum over labels or tokens, and their number",
        )
    return loss, None if weight is None else counted(weight)


def _first(metric: dict[str, float]) -> float:
    return next(iter(metric.values()))


def loss_of(task: Task) -> Callable[[nn.Module, Any], tuple[Tensor, float | None]]:
    """The task's loss of a model on a batch, and its weight; None where the samples of the batch are that."""
    return partial(_own_loss if task.has("loss") else _default_loss, task)


def taught(task: Task, model: nn.Module, config: Config, device: torch.device) -> Loss:
    """The task's loss, with that of its teacher where the section `distillation` asks for one.

    Raises:
        TaskError: there is no teacher(), or it gives no module.
    """
    settings = config.distillation
    if not settings.alpha:
        return loss_of(task)
    if not task.has("teacher"):
        raise TaskError("there is no such hook, and distillation.alpha asks for it", where="teacher",
                        hint="define teacher(): it returns the trained network, with its weights loaded")  # fmt: skip
    teacher = task.call("teacher")
    if not isinstance(teacher, nn.Module):
        raise TaskError(f"teacher() gave {type(teacher).__name__}, expected a torch.nn.Module", where="teacher")
    teacher.to(device).requires_grad_(False)
    distillation = Distillation(teacher, temperature=settings.temperature, weight=settings.alpha, axis=settings.axis)
    return Taught(loss_of(task), model, distillation, partial(task.blaming, "teacher()"))


def steps_per_epoch(batches: Batches, accumulate: int) -> int:
    """Optimizer steps that a pass over the data takes.

    Raises:
        TaskError: the data does not tell its length.
    """
    if batches.per_epoch is None:
        raise TaskError(
            "train_data() does not tell its length, so epochs cannot be counted",
            where="train_data",
            hint="set `steps:` under train in pipe.yaml, or give the iterable a __len__",
        )
    return -(-batches.per_epoch // accumulate)


def _draw(run: Run, log: Log) -> None:
    mo = run.mo
    lane = run.lane
    figures = {"loss": lane.loss, "lr": mo.current_lr, "grad_norm": mo.grad_norm, **lane.monitor.speed()}
    log.progress(run.attempted, run.total, **figures)


@contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms that give the same bits each time, where torch has them; it warns where it has none.

    The number of threads and the machine still matter: sums are split by them.
    """
    before, fill = torch.are_deterministic_algorithms_enabled(), _FILL.fill_uninitialized_memory
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
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
