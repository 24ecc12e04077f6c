"""ModelOptimizer: the two lines that a training loop replaces."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config import aliases
from layerline.training.config.sections import Config
from layerline.training.loop import ema_swap, halving, loop_mistakes, model_sync, monitors
from layerline.training.loop import masks as masks_of
from layerline.training.loop.best_checkpoints import FOLDER, Best
from layerline.training.loop.halving import Forward
from layerline.training.loop.mask_choice import Gradual, configured
from layerline.training.loop.step_engine import Lane
from layerline.training.loop.step_result import StepResult, step_result
from layerline.training.model import precision
from layerline.training.model.canonical_names import check_apart
from layerline.training.model.recompute import Checkpointed
from layerline.training.optimizers import custom
from layerline.training.setup import capabilities, members
from layerline.training.setup.plan import Plan, plan, plan_all
from layerline.training.state import checkpoint
from layerline.training.state.prove_resume import ResumeProof, prove


class ModelOptimizer:
    """Adds policies to a training loop; model, loss and loop stay yours.

        mo = ModelOptimizer(model, {"optimizer": {"name": "adamw", "lr": 2e-3}, "training": {"ema_decay": 0.999}})
        for x, y in batches:
            with mo.autocast():
                loss = criterion(model(x), y)
            mo.step(loss)

    By default it steps the optimizer and watches. Everything else is off until the configuration asks for it.

    Args:
        model: a module, wrapped (compile, DDP) or not; or modules by name, each with an optimizer of its own (GAN).
        config: a dict in either of the shapes of `layerline.training.config.aliases`, a YAML file, or a `Config`.
        optimizer: any object with step() and zero_grad() (by name for several models) instead of one from the table;
            or the section of that name as a dict.
        fields: sections (`precision={"amp": "bf16"}`) and single fields (`log_interval=10`) in place of a dict.

    Raises:
        ConfigError: a wrong field or value, fields that contradict each other, or a model without parameters to train.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        optimizer: Any = None,
        **fields: Any,
    ) -> None:
        if isinstance(optimizer, Mapping) and not isinstance(model, Mapping):
            # The section of the configuration: optimizers themselves are given by the names of several models.
            fields = {"optimizer": optimizer, **fields}
            optimizer = None
        if config is None:
            config = {}
        self.config = aliases.load(config, keywords=fields, whole=True)
        models, optimizers = members.by_name(model, optimizer, self.config)
        self.checkpointed: list[Checkpointed] = []
        if self.config.memory.checkpointing:
            every = self.config.memory.checkpoint_interval
            self.checkpointed = [Checkpointed(module, every) for module in models.values()]
        self.ranks = capabilities.enlist(models.values(), self.config, custom=optimizers.values())
        self.lanes: dict[str, Lane] = {}
        for name, module in models.items():
            self.lanes[name] = Lane(module, self.config, optimizers.get(name), shared=len(models) > 1)
        self._main = next(iter(self.lanes.values()))  # what calls without `only` are about
        self.extras: dict[str, Any] = {}  # by the names of register()
        self._halves = self.config.accumulate.on_oom == "halve"
        self.saved: Path | None = None  # what a rollback goes back to
        for name, lane in self.lanes.items():
            capabilities.attach(lane, self.ranks, partial(checkpoint.roll_back, self, name))
            if self._halves:
                halving.check(lane)
            gradual = configured(lane.model, self.config)
            if gradual is not None:
                lane.masks = masks_of.Masks(lane, gradual)
        self.best: Best | None = None
        if self.config.monitor.keep_best or self.config.monitor.early_stop:
            self.best = Best(self.config, Path(self.config.monitor.save_dir) / FOLDER)
            self.register("best", self.best)
        self._metric: Callable[[nn.Module], float] | None = None
        self._validated: str | None = None  # name of the model that `_metric` is about
        # The last steps at which `save_interval` saved, and at which intervals were looked at.
        self._saved_at = self._served = -1
        self._autocast = precision.autocast(self.config.precision, self._main.device)

    @property
    def model(self) -> nn.Module:
        """The model; of several models the first one."""
        return self._main.model

    # Stepping.

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for the forward pass: torch.autocast in the type of `precision.amp`, or nothing in fp32."""
        return self._autocast()

    def backward(self, loss: Tensor, *, weight: float | None = None, only: str | None = None) -> None:
        """Adds the gradients of `loss`; step() then ends the micro-batch. The arguments are those of `step`."""
        self._lane(only, "backward").backward(loss, weight)

    def step(
        self,
        loss: Tensor | None = None,
        *,
        weight: float | None = None,
        samples: int | None = None,
        closure: Callable[[], Tensor] | None = None,
        only: str | None = None,
    ) -> StepResult:
        """Ends a micro-batch (after backward, where a loss is given); every `accumulate.steps`-th steps the optimizer.

        The gradient of a window is Σ grad(loss) / Σ weight, however its samples are split into micro-batches. An error
        of the backward pass or of the step drops the window.

        Args:
            loss: a mean over the micro-batch, or with `weight` a sum over that many samples or tokens.
            weight: the number of samples or tokens. Without it each micro-batch counts the same.
            samples: number of samples, for the speed in the log (`samples_s`), if `weight` counts something else.
            closure: in place of the loss, for optimizers that evaluate it themselves (LBFGS, SAM).
            only: name of the model, if there are several. All methods take it.

        Returns:
            A number, the loss, that is true if the weights were updated.

        Raises:
            ConfigError: something that is no loss or weight, or the model holds its averages.
            StageError: too many rejected steps in a row, no gradient, or gradients that were cleared in the window.
        """
        lane = self._lane(only, "step")
        if closure is not None:
            if loss is not None or weight is not None:
                raise ConfigError("the closure gives the loss", where="step", hint="mo.step(closure=f) alone")
            moved, loss = lane.step_closure(closure)
        else:
            moved = lane.step(loss, weight, samples)
            if self._halves:
                lane.monitor.warn("on_oom", "accumulate.on_oom: halve needs mo.train_step(batch, forward)")
        return step_result(self._after(moved), loss, weight, lane.window.last_read)

    def train_step(
        self, batch: Any, forward: Forward, *, samples: int | None = None, only: str | None = None
    ) -> StepResult:
        """Forward pass, backward pass and step() of one micro-batch.

            mo.train_step((x, y), lambda batch: criterion(model(batch[0]), batch[1]))

        `forward` gets the batch (tensors in lists, tuples and mappings, with the samples along axis 0), or with
        `accumulate.on_oom: halve` a part of it, under autocast. It returns a mean loss, or a sum and its weight.
        """
        lane = self._lane(only, "train_step")
        if self._halves:
            models = [other.model for other in self.lanes.values()]
            loss, weight, parts = halving.accumulate(lane, batch, forward, self.autocast, models)
            moved = lane.step(None, samples=samples)
            read = None
            if parts == 1:
                read = lane.window.last_read
            return step_result(self._after(moved), loss, weight, read)
        try:
            with self.autocast():
                result = forward(batch)
        except Exception as error:
            loop_mistakes.explain_memory(lane, error)
            raise
        loss, weight = result if isinstance(result, tuple) else (result, None)
        return self.step(loss, weight=weight, samples=samples, only=only)

    def flush(self) -> bool:
        """Ends an epoch: steps on a short last window, divided by the micro-batches or weights that it has."""
        moved = [lane.flush() for lane in self.lanes.values()]
        return self._after(any(moved))

    def _after(self, moved: bool) -> bool:
        """Validates and saves where an interval ends, once for all models."""
        step, config = self.global_step, self.config.monitor
        if not moved or step == self._served:  # of several models the first that reaches a step
            return moved
        self._served = step
        if config.valid_interval and step % config.valid_interval == 0:
            if self._metric is None:
                text = f"valid_interval is {config.valid_interval}, but there is no metric: mo.validate_with(metric)"
                self._main.monitor.warn("valid", text)
            else:
                self.validate(self._metric, only=self._validated)
        if config.save_interval and step % config.save_interval == 0:
            self.save_ckpt(config.save_dir)
            self._saved_at = step
        return moved

    def _lane(self, only: str | None, method: str) -> Lane:
        if only is None and len(self.lanes) > 1:
            raise ConfigError(f"which of {sorted(self.lanes)}?", where=method, hint=f"mo.{method}(…, only=…)")
        if only is None:
            return self._main
        if only not in self.lanes:
            raise ConfigError(f"no model is called {only!r}; there are {sorted(self.lanes)}", where="only")
        return self.lanes[only]

    def __getitem__(self, name: str) -> Lane:
        return self._lane(name, "[]")

    # What a loop reads.

    @property
    def optimizer(self) -> Any:
        """The optimizer, for a scheduler or rate finder of your own; of several models the first one's."""
        return self._main.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; of several models those of all."""
        return [group for lane in self.lanes.values() for group in custom.own_groups(lane.optimizer)]

    @property
    def grad_norm(self) -> float:
        """Total norm of the last accepted gradient, before clipping."""
        return self._main.grad_norm

    @property
    def current_lr(self) -> float:
        """Learning rate of the next step."""
        return self._main.rate.current

    @property
    def loss_scale(self) -> float:
        """The loss scale of fp16; 1.0 in other formats."""
        return self._main.scale.value

    @property
    def global_step(self) -> int:
        """Number of accepted optimizer steps; of several models the largest number."""
        return max(lane.steps for lane in self.lanes.values())

    @property
    def warnings(self) -> list[str]:
        """The warnings so far, one sentence each."""
        texts: list[str] = []
        for name, lane in self.lanes.items():
            texts += [f"{name}: {text}".removeprefix(": ") for text in lane.monitor.warnings]
        return texts

    # EMA.

    def switch_to_ema(self) -> None:
        """Puts the averaged weights into the model, in place; a second call changes nothing."""
        self._switch(ema=True)

    def switch_to_online(self) -> None:
        """Puts the trained weights back, bit for bit."""
        self._switch(ema=False)

    @contextmanager
    def ema(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights."""
        swapped = any(lane.ema is not None and lane.ema.swapped for lane in self.lanes.values())
        self.switch_to_ema()
        try:
            yield
        finally:
            if not swapped:
                self.switch_to_online()

    def _switch(self, *, ema: bool) -> None:
        for lane in self.lanes.values():
            if lane.ema is None:
                hint = "set it, for example to 0.999"
                raise ConfigError("there is no average: EMA is off", where="training.ema_decay", hint=hint)
            ema_swap.switch(lane, ema=ema)

    @contextmanager
    def _online(self) -> Iterator[None]:
        """A context in which the models hold their trained weights."""
        with ExitStack() as stack:
            for lane in self.lanes.values():
                stack.enter_context(ema_swap.online(lane))
            yield

    # State.

    def register(self, name: str, thing: Any) -> None:
        """Makes `thing`, an object with state_dict() and load_state_dict(), a part of every checkpoint."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise ConfigError(f"{type(thing).__name__} has no {method}()", where=f"register {name!r}")
        self.extras[name] = thing

    def save_ckpt(self, path: str | Path) -> Path:
        """Writes everything that a resumed run needs, atomically: a `.safetensors` file, or a new one in the folder
        `path`, which keeps the newest `monitor.keep`. Returns the file's path."""
        return checkpoint.save(self, Path(path))

    def load_ckpt(self, path: str | Path) -> Path:
        """Loads a checkpoint, or the newest sound one of a folder (a damaged file is skipped), and returns its path.

        Raises:
            StageError: there is no sound checkpoint, or it does not fit. Nothing is changed then.
        """
        return checkpoint.load(self, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint holds. Tensors are not copied. With several ranks, all must call it."""
        with self._online():
            tensors, meta = checkpoint.state(self)
        return {"tensors": tensors, "meta": meta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict()`. Raises ConfigError if it is none, and StageError if it does not fit; then nothing is
        changed."""
        parts = state if isinstance(state, Mapping) else {}
        if not all(isinstance(parts.get(name), Mapping) for name in ("tensors", "meta")):
            raise ConfigError("this is not what mo.state_dict() returned", where="load_state_dict",
                              hint="for the weights of a model alone: model.load_state_dict(state)")  # fmt: skip
        checkpoint.restore(self, {n: t.clone() for n, t in state["tensors"].items()}, state["meta"])

    def export(self) -> dict[str, Tensor]:
        """Copies of the weights that would ship, by canonical name: float32, and averages if there are any. A tied
        tensor has each of its names. With a split model, all ranks must call it."""
        out: dict[str, Tensor] = {}
        for model, lane in self.lanes.items():
            tensors = ema_swap.shipped(lane)
            tensors |= {alias: tensors[name] for alias, name in lane.named.aliases.items()}
            out |= {f"{model}.{name}".removeprefix("."): tensor for name, tensor in tensors.items()}
        return out

    def export_metrics(self, path: str | Path) -> None:
        """Writes the log as CSV. Several models get a file each, `<stem>-<name>.csv`. Only rank 0 writes."""
        if self.ranks is None or self.ranks.rank == 0:
            monitors.export({name: lane.monitor for name, lane in self.lanes.items()}, Path(path))

    # Pruning.

    def apply_mask(
        self, masks: Mapping[str, Tensor] | Gradual, *, replace: bool = False, only: str | None = None
    ) -> None:
        """Sets weights to zero, now and after every accepted step: in the model, the masters and the average.

        Args:
            masks: by parameter name, True or 1 where a weight stays; or `Gradual`, which chooses them during training.
            replace: drop the earlier masks first (`{}` drops all). Otherwise a weight stays only if all masks keep it.
        """
        masks_of.apply(self._lane(only, "apply_mask"), masks, replace=replace)

    # Validation.

    def validate_with(self, metric: Callable[[nn.Module], float], *, only: str | None = None) -> None:
        """Calls `validate(metric)` every `monitor.valid_interval` steps from now on, before a checkpoint is written."""
        self._lane(only, "validate_with")
        self._metric, self._validated = metric, only

    def validate(self, metric: Callable[[nn.Module], float], *, only: str | None = None) -> dict[str, float]:
        """Measures the online weights and those that would ship, in eval mode: `online`, `deploy` and their difference
        `gap`. A plateau schedule follows `deploy`. A checkpoint of this step is written again, with the result."""
        figures = ema_swap.validate(self._lane(only, "validate"), metric)
        # Until pruning reaches its share and SWA begins, the model is of another kind than the one that will ship.
        complete = [lane.masks.complete_at for lane in self.lanes.values() if isinstance(lane.masks, masks_of.Masks)]
        if self.best is not None and self.global_step >= max(self.config.swa_start, *complete, 0):
            deployed = figures["deploy"]
            if self.ranks is not None:  # all ranks must decide alike
                deployed = self.ranks.by_first(lambda: figures["deploy"])
            newest = self.saved
            self.best.observe(deployed, self.global_step, self.save_ckpt)
            self.saved = newest  # what a rollback goes back to is the newest checkpoint, not the best
        if self._saved_at == self.global_step:
            self.save_ckpt(self.config.monitor.save_dir)
        return figures

    @property
    def should_stop(self) -> bool:
        """Whether the metric has not improved for `monitor.early_stop` validations."""
        return self.best is not None and self.best.should_stop

    def on_log(self, call: Callable[[dict[str, float]], object], *, only: str | None = None) -> None:
        """Calls `call` (such as `wandb.log`) with each new row of the log. With several ranks, only rank 0 does."""
        self._lane(only, "on_log").monitor.track(call)

    # What it does.

    def plan(self, only: str | None = None) -> Plan:
        """Groups, learning-rate curve and notes; print() it."""
        if only is None:
            return plan_all(self.lanes)
        return plan(self._lane(only, "plan"))

    def prove_resume(self, steps: int, make: str, *, start: str | Path | None = None) -> ResumeProof:
        """Compares a run that is resumed in a second process with one in a single process, bit for bit. This object is
        not used or changed.

        Args:
            steps: calls of step() in each process.
            make: `module:function` or `file.py:function`; the function returns (ModelOptimizer, step).
            start: a checkpoint to begin from.
        """
        return prove(make, steps, start=start)

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the loader's batches and measures how long the loop waits for them (`wait_rate`, and a warning)."""
        start = time.perf_counter()
        for batch in loader:
            for lane in self.lanes.values():
                lane.monitor.waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def join(self) -> list[str]:
        """Trains parameters that were added to the model, such as a new head, from now on; returns their names."""
        check_apart({name: lane.model for name, lane in self.lanes.items()})
        return [name for lane in self.lanes.values() for name in model_sync.join(lane)]

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelOptimizer:
        """A ModelOptimizer over copies of the models, in the same state. It shares nothing with this one."""
        with self._online():
            models, optimizers, frozen = members.copies(self, memo)
            twin = ModelOptimizer(models, self.config, optimizer=optimizers or None)
            for param in frozen:
                param.requires_grad_(False)
            for name, lane in self.lanes.items():  # a registered scheduler moves the rates of the copied optimizer
                memo[id(lane.optimizer)] = twin.lanes[name].optimizer
            extras = {name: thing for name, thing in self.extras.items() if thing is not self.best}
            twin.extras |= copy.deepcopy(extras, memo)
            twin.load_state_dict(self.state_dict())
        twin._metric, twin._validated, twin.saved = self._metric, self._validated, self.saved
        return twin

    def __reduce__(self) -> str:
        # The hooks in the model and the optimizer belong to this process. copy.copy would share them.
        raise ConfigError("a ModelOptimizer can be neither pickled nor copied by copy.copy", where="pickle",
                          hint="use mo.save_ckpt(path), mo.state_dict() or copy.deepcopy(mo)")  # fmt: skip
