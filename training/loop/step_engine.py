"""One model and the one optimizer that steps it: the order of a step, in every mode, in one place. Backward passes,
policies before the step, finite check, unscale and clip, optimizer, policies after the step. The order of the policies
is that of `Lane.policies`. A rejected step leaves nothing behind but a smaller loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.loop import batch_norm as norms
from layerline.training.loop import closure as closures
from layerline.training.loop import loop_mistakes, model_sync, rejected_steps
from layerline.training.loop.accumulation import check_loss, counted, loss_factor, witness
from layerline.training.loop.lane_state import LaneState, passes
from layerline.training.model.canonical_names import unwrap
from layerline.training.model.hooks import Attached
from layerline.training.model.policy import Policy
from layerline.training.optimizers import custom, gradient_norm

# Beyond this an unclipped gradient's square overflows float32 and would stay in the optimizer's state as Inf.
_GREATEST_NORM = 1e18
# From so many bytes on, gradients are kept until the next backward pass: freed at the end of a step, their memory would
# go back to the system and be fetched again, page by page. Less is used again at once, while it is in the CPU's cache.
_LARGE = 2**22
# The model is searched for changes before steps 1, 2, 4, … 64, then every 64: it takes some microseconds a layer.
_CHECK_EVERY = 64
_TRAINED = attrgetter("requires_grad")


class Lane(LaneState):
    """Steps one model; `LaneState` has its attributes and arguments."""

    def __init__(self, model: nn.Module, config: Config, optimizer: Any = None, *, shared: bool = False) -> None:
        super().__init__(model, config, optimizer, shared=shared)
        self._evaluation: closures.LossClosure | None = None
        # Copied from the configuration: after a forward pass its objects are no longer in the CPU's cache.
        self._max_norm = config.clip.max_norm or math.inf
        self._max_value = config.clip.value
        self._window_size = config.accumulate.steps
        self.next_model_check = 0  # the step before which the model is checked again
        # Gradients of the last step, whose memory the next backward pass takes
        self._spent: list[Tensor] = []
        self._keeps_gradients = self.device.type == "cpu" and sum(p.nbytes for p in self.stepped) >= _LARGE
        self._counts: set[int] = set()  # how many gradients a step had, where it was not all of them
        # The model tells of weights that are loaded into it, without keeping an optimizer that is gone.
        reference = WeakMethod(self._loaded)

        def loaded(_: Any) -> None:
            method = reference()
            if method is not None:
                method()

        unwrap(model).register_load_state_dict_post_hook(Attached(loaded))  # type: ignore[no-untyped-call]
        dependence = norms.warning(model, config.accumulate.steps)
        if dependence:
            self.monitor.warn("batch_norm", dependence)
        loop_mistakes.warn_of_slow_average(self.monitor, config)
        loop_mistakes.watch_autocast(model, self.monitor, config, self.device)
        applied = {id(member.rule) for member in self.members}
        for index, rule in enumerate(config.optimizer.groups):
            if id(rule) not in applied:
                text = f"optimizer.groups.{index} ({rule.match!r}) holds for no parameter: earlier rules come first"
                if rule.name == "muon":
                    text += ", and muon takes matrices alone"
                self.monitor.warn(f"rule {index}", text)
        if self.custom:
            idle = custom.idle(optimizer, self.names, self.params)
            if idle:
                self.monitor.warn("idle", f"{idle[0]} is trained by nobody: the optimizer does not hold it")

    def _loaded(self) -> None:
        """Weights were loaded into the model: before the first step, training starts from those."""
        if self.steps == 0 and not (self.ema is not None and self.ema.swapped):
            if self.masks is not None:
                self.masks.weights_were_loaded()
            if self.ema is not None:
                self.ema.begin(buffers=True)
            if self.guard is not None:
                self.guard.keep()

    def backward(self, loss: Tensor, weight: float | None = None, *, share: float = 1.0) -> None:
        """Adds the gradients of one loss to the window; see Window for the meaning of `weight`. A loss without weight
        counts by `share` where it is the mean of a part of a micro-batch."""
        self._add(loss, weight, share)
        self.window.witness = witness(self.stepped)

    def _add(self, loss: Tensor, weight: float | None, share: float = 1.0) -> None:
        window = self.window
        if self.ema is not None and self.ema.swapped:
            self.refuse_averages("step")
        check_loss(loss)
        if weight is not None:
            weight = counted(weight)
        if not self.steps:
            loop_mistakes.warn_of_changed_loss(self.monitor, loss, weight, self._window_size)
        try:
            if self.own_passes != passes.number:
                loop_mistakes.settle_foreign(self)
            if window.weighted is not None:
                window.check(weight, self.stepped)
            if self.scale.on and window.untouched:
                window.factor = self._loss_factor(weight)
            if share != 1.0:
                loss = loss * share
            window.add(loss.detach(), weight)
            if window.factor != 1.0:
                loss = loss * window.factor
            self._spent = []
            self._differentiate(loss)
            passes.number += 1
            self.own_passes = passes.number
            if self.masters is not None:
                self.masters.collect()
            window.witness = None  # of an earlier call: this one has written to it
        except ConfigError:
            raise
        except BaseException as error:
            self.forget()  # a part of the gradients may have been added
            loop_mistakes.explain_backward(self, error)
            raise

    def _loss_factor(self, weight: float | None) -> float:
        if self.peers is not None and weight is not None:
            weight = self.peers.agree(weight)  # all ranks must scale alike
        return loss_factor(self.scale.value, weight)

    def _differentiate(self, loss: Tensor) -> None:
        # Of several models that share a graph, only the parameters of this one get gradients.
        inputs = self.params if self.shared else None
        if self.peers is None:
            torch.autograd.backward(loss, inputs=inputs)
        else:
            with self.peers.backward():
                torch.autograd.backward(loss, inputs=inputs)

    def step(self, loss: Tensor | None = None, weight: float | None = None, samples: int | None = None) -> bool:
        """Ends a micro-batch; the last one of a window steps the optimizer. True when the weights moved."""
        if self.needs_closure:
            raise loop_mistakes.no_closure(self.optimizer)
        if loss is not None:
            self._add(loss, weight)
        else:
            loop_mistakes.check_begun(self)
        if samples is not None:  # a loss that was refused leaves the window as it was
            self.window.samples += samples
        if self.window.close() >= self._window_size:
            return self._update()
        self.window.witness = witness(self.stepped)
        return False

    def step_closure(self, closure: Callable[[], Tensor]) -> tuple[bool, Tensor]:
        """A step of an optimizer that evaluates the loss itself: whether the weights moved, and the first loss."""
        self.refuse_averages("step")
        closures.check(self)
        self._evaluation = evaluation = closures.LossClosure(self, closure)
        self.window.add(evaluation.loss, None)
        self.window.close()
        try:
            return self._update(), evaluation.loss
        finally:
            self._evaluation = None

    def flush(self) -> bool:
        """Steps on a short last window, divided by the micro-batches or weights in it. True if the weights moved."""
        if self.window.untouched:
            return False
        self.refuse_averages("flush")
        if self.window.open:
            self.window.close()
        return self._update()

    def _update(self) -> bool:
        """The step at the end of a window. Whatever it raises drops the window."""
        try:
            return self._attempt()
        except BaseException as error:
            sparse = None
            for name, param in zip(self.names, self.stepped, strict=True):
                if param.grad is not None and param.grad.layout is not torch.strided:
                    sparse = name
                    break
            self.forget()
            loop_mistakes.explain_step(self, error, sparse)
            raise

    def _attempt(self) -> bool:
        window, peers = self.window, self.peers
        if window.witness is not None:
            loop_mistakes.check_window(self)
        if self._went_back():
            return False
        policies = self.policies()
        for policy in policies:
            policy.before_step()
        grads = self._gradients()
        if len(grads) != len(self.stepped) and len(grads) not in self._counts:
            self._counts.add(len(grads))
            model_sync.refresh(self)  # a parameter that was replaced has no gradient any more
        if not grads:
            raise loop_mistakes.no_gradient(self)
        # The one synchronisation of a step: everything after it is decided on the CPU.
        weight, total_loss = window.weight, window.total_loss()
        has_loss = window.has_loss
        if peers is None and self.small:
            raw_norm = gradient_norm.norm(grads)
        else:
            raw_norm = gradient_norm.total_norm(self._norms(grads))
        if peers is not None:
            weight, total_loss = peers.mean(weight, total_loss)
        if weight == 0.0:  # not one sample in the whole window
            rejected_steps.drop(self)
            return False
        unscale = 1.0 / (weight * window.factor)
        norm, loss = raw_norm * unscale, total_loss / weight
        if not norm < _GREATEST_NORM:
            norm = gradient_norm.total_norm(self._norms(grads, torch.float64)) * unscale
        if not (math.isfinite(loss) and (norm < _GREATEST_NORM or self._max_norm < norm < math.inf)):
            rejected_steps.reject(self, loss, norm)
            return False
        if not has_loss:  # gradients of the loop's own backward pass come without one: none is logged
            loss = math.nan
        self._accept(policies, grads, norm, loss, unscale)
        return True

    def _went_back(self) -> bool:
        """Checks the model now and then. True if its weights were spoilt and the last checkpoint was put back."""
        if self.steps >= self.next_model_check:
            if self.steps and rejected_steps.weights_spoilt(self):
                return True
            model_sync.refresh(self)
            self.next_model_check = self.steps + min(self.steps + 1, _CHECK_EVERY)
        elif self.frozen and any(map(_TRAINED, self.frozen)):
            model_sync.refresh(self)
        return False

    def _gradients(self) -> list[Tensor]:
        for param in self.empty:
            param.grad = None
        grads = [p.grad for p in self.stepped if p.grad is not None]
        if self.strides is not None and not self.strides.settled(grads):
            self.strides.settle()
            grads = [p.grad for p in self.stepped if p.grad is not None]
        return grads

    def _accept(
        self, policies: Sequence[Policy], grads: list[Tensor], norm: float, loss: float, unscale: float
    ) -> None:
        monitor, peers, number = self.monitor, self.peers, self.steps + 1
        due = monitor.due(number)
        if due:
            rate, scale = self.rate.current, self.scale.value  # of this step: policies set those of the next one
            more: dict[str, float] = {}
            if monitor.per_layer:
                # Apart from the norm that clips, so that watching changes nothing.
                norms = gradient_norm.numbers(self._norms(grads))
                names = [n for n, p in zip(self.names, self.stepped, strict=True) if p.grad is not None]
                more = {f"grad_norm/{name}": part * unscale for name, part in zip(names, norms, strict=True)}
            monitor.before(number)
        self._scale_and_clip(grads, norm, unscale)
        if self._evaluation is None:
            self.optimizer.step()
        else:
            self.optimizer.step(self._evaluation)
        self._check_schedule(number)
        for policy in policies:
            policy.after_accepted(number)
        self.steps, self.skipped_in_a_row, self.loss, self.grad_norm = number, 0, loss, norm
        # Without a count of samples the weight stands for them: micro-batches, or what the user weighs by.
        samples = self.window.samples or 1.0 / (unscale * self.window.factor)
        if peers is not None:
            samples *= peers.size
        monitor.accepted(loss, norm, samples, clipped=norm > self._max_norm)
        if due:
            if peers is not None:
                more |= peers.figures()
            monitor.row(number, loss, norm, rate, scale, self.skipped, more)
        self.forget()
        if self._keeps_gradients and peers is None and not math.isnan(loss):
            self._spent = grads

    def _scale_and_clip(self, grads: list[Tensor], norm: float, unscale: float) -> None:
        factor = unscale
        if norm > self._max_norm:
            factor *= self._max_norm / (norm + 1e-6)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        if self._max_value is not None:
            torch._foreach_clamp_min_(grads, -self._max_value)
            torch._foreach_clamp_max_(grads, self._max_value)

    def _check_schedule(self, number: int) -> None:
        """Warns of a second schedule, and of a step past the end of the configured one."""
        if number < _CHECK_EVERY and self.rate.moved_by_others():
            text = (
                f"another scheduler changes the rate that the configured one ({self.config.scheduler.name}) sets at "
                "each step: leave it out, or configure `scheduler: {name: constant}`"
            )
            self.monitor.warn("two_schedules", text)
        if self.rate.end is None or number <= self.rate.end:
            return
        text = (
            f"step {number} lies past scheduler.total_steps ({self.rate.end}), where the schedule ends: the rate stays "
            f"at {self.rate.current:g}; set total_steps to the number of optimizer steps in the whole run"
        )
        self.monitor.warn("past_end", text)

    def _norms(self, grads: list[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
        """The norm of each gradient, summed up in `dtype`; of split ones that of the whole."""
        if self.peers is not None:
            return self.peers.norms(grads, dtype)
        norms: Sequence[Tensor] = torch._foreach_norm(grads, dtype=dtype)
        return norms
