"""One model and the one optimizer that steps it: the order of a step, in every mode, in one place.

backward, reduce, unscale, finite check, clip, step, masks, EMA, schedule. Counters, schedule, EMA and masks move on
accepted steps only; a rejected step leaves nothing behind but a smaller loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training import memory, norms, optimizers
from layerline.training.accumulate import Window, loss_factor
from layerline.training.config import Config
from layerline.training.ema import Ema, averaged, statistics
from layerline.training.foreach import Sophia
from layerline.training.groups import members
from layerline.training.guard import Guard
from layerline.training.monitors import Monitor
from layerline.training.names import named
from layerline.training.parts import local
from layerline.training.precision import HALF, LossScale, Masters
from layerline.training.rate import Rate

if TYPE_CHECKING:
    from layerline.training.masks import Masks
    from layerline.training.peers import Peers
    from layerline.training.triage import Judge

# Beyond this an unclipped gradient's square overflows float32 and would stay in the optimizer's state as Inf.
_GREATEST_NORM = 1e18
_FEW = 32
_ALONE = nullcontext()


class Lane:
    """A model, its optimizer and all that moves with it.

    Args:
        model: as the user has it, wrapped or not.
        config: the typed configuration.
        optimizer: an object with step() and zero_grad() instead of one from the table.
        shared: whether other lanes' parameters may lie in the same graph (GAN): gradients are then taken for this
            lane's parameters only.

    Attributes:
        steps: accepted optimizer steps.
        skipped: rejected ones; `skipped_in_a_row` without those that a smaller loss scale answers.
        first_rejected: number of the first step that was rejected, of all that were attempted; 0 while none was.
        gradient_bytes: size of the gradients of the first step.
        loss, grad_norm: of the last accepted step, per sample and before clipping; NaN before the first.
        peers: what other ranks contribute to a step; None in a single process.
        masks: put back on after each accepted step.
        judge: told of each rejected step while its gradients are still there; it decides whether to go on.
    """

    def __init__(self, model: nn.Module, config: Config, optimizer: Any = None, *, shared: bool = False) -> None:
        self.model, self.config, self.shared = model, config, shared
        self.named = named(model)
        self.members = members(self.named, config.optimizer.no_decay)
        self.params: list[nn.Parameter] = [m.param for m in self.members]
        self.names = [m.name for m in self.members]
        self.device = self.params[0].device
        self.custom = optimizer is not None
        self.masters = _masters(config, self.params, custom=self.custom)
        self.stepped = [self.masters.stepped(p) for p in self.params] if self.masters else self.params
        if self.custom:
            optimizers.check_custom(optimizer)
        else:
            optimizer = optimizers.build(config.optimizer, self.members, self.stepped)
        self.optimizer: Any = optimizer
        self.sophia = optimizer if isinstance(optimizer, Sophia) else None
        self.rate = Rate(config, optimizer)
        self.scale = LossScale(config.precision)
        self.window = Window()
        self.ema = Ema(averaged(self.named, self.masters), config.ema) if config.ema.on else None
        self.monitor = Monitor(config.monitor, self.names, [local(p) for p in self.stepped])
        self.guard = Guard(live) if (live := statistics(self.named)) else None
        self.peers: Peers | None = None
        self.masks: Masks | None = None
        self.judge: Judge | None = None
        self.gradient_bytes = 0
        self.steps = self.skipped = self.skipped_in_a_row = self.first_rejected = 0
        self.grad_norm = self.loss = math.nan
        if text := norms.warning(model, config.accumulate.steps):
            self.monitor.warn("batch_norm", text)
        self._max_norm = config.clip.max_norm or math.inf

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Adds the gradients of one loss to the window; see Window for the meaning of `weight`."""
        window = self.window
        if self.ema is not None and self.ema.swapped:
            raise ConfigError("the model holds its EMA weights", where="step", hint="call switch_to_online() first")
        if self.scale.on and not window.losses and not window.micro:
            shared = weight if self.peers is None or weight is None else self.peers.agree(weight)
            window.factor = loss_factor(self.scale.value, shared)
        window.add(loss.detach(), weight)
        if window.factor != 1.0:
            loss = loss * window.factor
        with _ALONE if self.peers is None else self.peers.backward():
            self._differentiate(loss)
        if self.masters is not None:
            self.masters.collect()

    def _differentiate(self, loss: Tensor) -> None:
        if self.sophia is not None and self.sophia.wants_curvature():
            self.sophia.backward(loss, self.params)
        elif self.shared:
            torch.autograd.backward(loss, inputs=self.params)
        else:
            torch.autograd.backward(loss)

    def step(self, loss: Tensor | None = None, weight: float | None = None) -> bool:
        """Ends a micro-batch; the last one of a window steps the optimizer. True when the weights moved."""
        if loss is not None:
            self.backward(loss, weight)
        wanted = self.config.accumulate.steps
        moved = self.window.close() >= wanted and self._update(synced=True)
        if self.peers is not None and wanted > 1:
            self.peers.arm(sync=self.window.micro == wanted - 1)
        return moved

    def flush(self) -> bool:
        """Steps on what a short last window holds, divided by what it holds. True when the weights moved."""
        if not self.window.micro and not self.window.losses:
            return False
        if not self.window.micro:
            self.window.close()
        moved = self._update(synced=False)
        if self.peers is not None:
            self.peers.arm(sync=self.config.accumulate.steps == 1)
        return moved

    def join(self) -> list[str]:
        """Takes in trained parameters that the model has gained since; their names.

        Raises:
            ConfigError: the optimizer is the user's own, or the new parameters are half and would need masters.
        """
        self.named = named(self.model)
        known = {id(p) for p in self.params}
        fresh = [m for m in members(self.named, self.config.optimizer.no_decay) if id(m.param) not in known]
        if fresh and (self.custom or _masters(self.config, [m.param for m in fresh], custom=self.custom)):
            raise ConfigError(
                "these parameters can only join at construction: they need masters, or the optimizer is custom",
                where=fresh[0].name,
                hint="construct ModelOptimizer after changing the model",
            )
        if self.peers is not None:
            self.peers.admit(fresh)
        for member in fresh:
            group = {"params": [member.param], "lr": self.rate.base}
            self.optimizer.add_param_group(group if member.decay else {**group, "weight_decay": 0.0})
            self.rate.adopt(self.optimizer.param_groups[-1])
            self.params.append(member.param)
            self.names.append(member.name)
            if self.stepped is not self.params:
                self.stepped.append(member.param)
            if self.ema is not None:
                self.ema.add(member.name, member.param)
        self.members += tuple(fresh)
        return [m.name for m in fresh]

    def forget(self) -> None:
        """Drops the window: its losses, its gradients, its estimate of the curvature."""
        self.window.clear()
        for param in self.stepped:
            param.grad = None
        if self.custom:
            self.optimizer.zero_grad()
        elif self.sophia is not None:
            self.sophia.forget()

    def _update(self, *, synced: bool) -> bool:
        window, peers = self.window, self.peers
        if peers is not None:
            peers.reduce(self, synced=synced)
        grads = [p.grad for p in self.stepped if p.grad is not None]
        if not grads:
            raise StageError("no parameter has a gradient", where="step", hint="pass the loss: mo.step(loss)")
        sizes = torch._foreach_norm(grads) if peers is None else peers.norms(grads)
        # The one synchronisation of a step: everything after it is decided on the CPU.
        raw_norm, weight, total_loss = _total(sizes), window.weight, window.total_loss()
        if peers is not None:
            weight, total_loss = peers.mean(weight, total_loss)
        if weight == 0.0:  # not one sample in the whole window
            self.forget()
            return False
        unscale = 1.0 / (weight * window.factor)
        norm, loss = raw_norm * unscale, total_loss / weight
        if not norm < _GREATEST_NORM:
            norm = _total(torch._foreach_norm(grads, dtype=torch.float64)) * unscale
        if not (math.isfinite(loss) and (norm < _GREATEST_NORM or self._max_norm < norm < math.inf)):
            return self._reject(loss, norm)
        self._accept(grads, norm, loss, unscale, sizes)
        return True

    def _accept(self, grads: list[Tensor], norm: float, loss: float, unscale: float, sizes: Sequence[Tensor]) -> None:
        monitor, number, clipped = self.monitor, self.steps + 1, norm > self._max_norm
        factor = unscale * (self._max_norm / (norm + 1e-6)) if clipped else unscale
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
            if self.sophia is not None:
                self.sophia.rescale(unscale)
        if log := monitor.due(number):
            monitor.before()
        self.optimizer.step()
        if self.masters is not None:
            self.masters.publish()
        if self.masks is not None:
            self.masks.apply()
        self.steps, self.skipped_in_a_row, self.loss, self.grad_norm = number, 0, loss, norm
        if self.ema is not None:
            self.ema.update(number)
        if self.guard is not None:
            self.guard.keep()
        counted = 1.0 / (unscale * self.window.factor)
        monitor.accepted(loss, norm, counted * (self.peers.size if self.peers else 1), clipped=clipped)
        if log:
            layers = [n.item() * unscale for n in sizes] if monitor.per_layer else ()
            monitor.row(step=number, loss=loss, norm=norm, lr=self.rate.current, scale=self.scale.value,
                        skipped=self.skipped, layer_norms=layers,
                        further=self.peers.figures() if self.peers else None)  # fmt: skip
        self.scale.accepted()
        self.rate.set(number)
        if number == 1:
            self.gradient_bytes = sum(g.numel() * g.element_size() for g in grads)
        self.forget()
        if self.config.memory.empty_cache:
            memory.empty_cache(self.device)

    def _reject(self, loss: float, norm: float) -> bool:
        # fp16 gradients overflow as a matter of course while the scale is being found; a loss never should.
        answered = self.scale.on and not self.scale.at_floor and math.isfinite(loss)
        self.skipped += 1
        self.first_rejected = self.first_rejected or self.steps + self.skipped
        self.skipped_in_a_row += not answered
        if self.scale.on:
            self.scale.overflowed()
            self.monitor.scale_fell(self.scale.value, at_floor=self.scale.at_floor)
        try:
            if self.judge is not None and not answered:
                self.judge.rejected(self, loss, norm)
            elif not answered and self.skipped_in_a_row >= (
                1 if self.config.nonfinite.policy == "stop" else self.config.nonfinite.limit
            ):
                raise self.not_finite(loss, norm)
        finally:
            if self.guard is not None:
                self.guard.restore()
            self.forget()
        return False

    def not_finite(self, loss: float, norm: float) -> StageError:
        """The error for a rejected step, naming the first parameter whose gradient is not finite."""
        bad = [n for n, p in zip(self.names, self.stepped, strict=True)
               if p.grad is not None and not torch.isfinite(p.grad).all()]  # fmt: skip
        what = f"the loss is {loss:g}" if not math.isfinite(loss) else f"the gradient norm is {norm:g}"
        where = f"; the first gradient that is not finite is that of {bad[0]}" if bad else ""
        rows = f", {self.skipped_in_a_row} steps in a row" if self.skipped_in_a_row > 1 else ""
        return StageError(
            f"{what} at step {self.steps + 1}{rows}{where}",
            where=bad[0] if bad else "loss",
            hint="lower the learning rate, clip gradients, or look for a division or log of 0 there",
        )


def _masters(config: Config, params: Sequence[nn.Parameter], *, custom: bool) -> Masters | None:
    wanted = config.precision.master_weights
    if wanted is False or not any(p.dtype in HALF for p in params):
        return None
    if custom:
        if wanted:
            raise ConfigError(
                "a custom optimizer holds the parameters themselves and cannot step masters",
                where="precision.master_weights",
            )
        return None
    if config.optimizer.name == "sophia":
        raise ConfigError(
            "sophia does not work on half parameters",
            where="optimizer.name",
            hint="keep parameters in float32 and use precision.amp",
        )
    return Masters(params)


def _total(norms: Sequence[Tensor]) -> float:
    # Reading a few numbers beats launching two kernels; float64 has room for any float32 squared.
    if len(norms) <= _FEW or any(n.device != norms[0].device for n in norms):
        return math.hypot(*[n.item() for n in norms])
    return float(torch.linalg.vector_norm(torch.stack(list(norms))).item())
