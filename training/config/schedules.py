"""The learning rate as a pure function of the step number: resuming needs the number and nothing else.
`multiplier(step)` is what the base rate is multiplied by for the update after `step` accepted ones (0 is the first).
Warm-up is linear: update `step` of `w` runs at (step + 1) / w, so that no update is lost to a rate of 0.
`warmup_start: 0` gives step / w, as in transformers and timm; 1/(w + 1) gives (step + 1) / (w + 1), as in nanoGPT."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerline.pipeline.errors import ConfigError
from layerline.training.config.checks import warmup_steps
from layerline.training.config.sections import SchedulerConfig

Schedule = Callable[[int], float]
# Momentum at the highest and at the lowest rate of one_cycle (Smith & Topin 2018; torch's defaults).
LEAST_MOMENTUM, GREATEST_MOMENTUM = 0.85, 0.95


def build(config: SchedulerConfig, lr: float) -> Schedule:
    """The schedule; `lr` is the base rate, which `min_lr` is measured against."""
    floor = floor_ratio(config, lr)
    if config.name == "one_cycle":
        first = 1 / config.div_factor
        return _one_cycle(config, first, 1.0, max(first / config.final_div_factor, floor))  # a lowest rate is its end
    warmup = warmup_steps(config)
    decay = _decay(config, config.total_steps or 0, warmup, floor)
    start = config.warmup_start

    def multiplier(step: int) -> float:
        if step >= warmup:
            return decay(step)
        if start is None:
            return (step + 1) / warmup
        return start + (1 - start) * step / warmup

    return multiplier


def momentum(config: SchedulerConfig) -> Schedule | None:
    """The momentum that goes with the rate; None where the schedule leaves it alone."""
    if config.name != "one_cycle" or not config.cycle_momentum:
        return None
    return _one_cycle(config, GREATEST_MOMENTUM, LEAST_MOMENTUM, GREATEST_MOMENTUM)


def floor_ratio(config: SchedulerConfig, lr: float) -> float:
    """The lowest rate as a share of the base rate."""
    if config.min_lr is None or config.min_lr_ratio is not None:
        return config.min_lr_ratio or 0.0
    if config.min_lr > lr:
        raise ConfigError(f"min_lr {config.min_lr:g} is above the base rate {lr:g}", where="scheduler.min_lr")
    return config.min_lr / lr


def _decay(config: SchedulerConfig, total: int, warmup: int, floor: float) -> Schedule:
    span = max(total - warmup, 1)
    origin = warmup
    if config.count_warmup or (config.count_warmup is None and config.name in ("step", "multistep")):
        origin = 0

    def left(step: int) -> float:
        return 1.0 - min(max((step - warmup) / span, 0.0), 1.0)

    if config.name == "cosine":
        return lambda step: floor + (1 - floor) * 0.5 * (1 - math.cos(math.pi * left(step)))
    if config.name == "polynomial":
        return lambda step: floor + (1 - floor) * left(step) ** config.power
    if config.name == "inverse_sqrt":
        return lambda step: max(floor, math.sqrt(max(warmup, 1) / max(step, warmup, 1)))
    if config.name == "step":
        size, gamma = config.step_size or 1, config.gamma or 0.1
        return lambda step: max(floor, gamma ** ((step - origin) // size))
    if config.name == "multistep":
        drop, milestones = config.gamma or 0.1, sorted(config.milestones or ())
        return lambda step: max(floor, drop ** bisect_right(milestones, step - origin))
    if config.name == "exponential":
        rate = config.gamma or 0.999
        return lambda step: max(floor, rate ** (step - origin))
    if config.name == "cosine_restarts":
        return lambda step: _cosine_between(1.0, floor, _phase(step - warmup, config.period or 1, config.period_mult))
    if config.name == "wsd":
        # Warm-up, stable, decay (Hu et al. 2024): the decay ends at total_steps.
        falling = max(round(config.decay_ratio * total), 1)
        return lambda step: 1.0 + (floor - 1.0) * min(max((step - (total - falling)) / falling, 0.0), 1.0)
    return lambda _: 1.0  # constant; plateau multiplies it


def _phase(step: int, period: int, factor: int) -> float:
    """How far the current period has come, from 0 at a restart to 1 (SGDR, Loshchilov & Hutter 2017)."""
    if factor == 1:
        return step % period / period
    while step >= period:
        step -= period
        period *= factor
    return step / period


def _one_cycle(config: SchedulerConfig, first: float, peak: float, last: float) -> Schedule:
    """Cosine flanks as in torch.optim.lr_scheduler.OneCycleLR (Smith & Topin 2018)."""
    total = config.total_steps or 1
    rising: float = 0.3 * total
    if config.warmup_steps is not None:
        rising = config.warmup_steps
    elif config.warmup_ratio is not None:
        rising = config.warmup_ratio * total
    at_peak = rising - 1.0  # the update that runs at the peak

    def value(step: int) -> float:
        if step > at_peak:
            return _cosine_between(peak, last, min((step - at_peak) / max(total - 1 - at_peak, 1e-9), 1.0))
        if at_peak <= 0:
            return peak
        return _cosine_between(first, peak, step / at_peak)

    return value


def _cosine_between(start: float, end: float, t: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * t) + 1)


@dataclass
class Plateau:
    """Multiplies the rate by `factor` once `patience` validations in a row brought no improvement."""

    config: SchedulerConfig
    floor: float = 0.0
    higher: bool = True
    best: float | None = None
    waited: int = 0
    scale: float = 1.0

    def observe(self, metric: float) -> None:
        """Takes in one validation; NaN counts as no improvement."""
        if self._better(metric):
            self.best, self.waited = metric, 0
            return
        self.waited += 1
        if self.waited > self.config.patience:
            self.scale, self.waited = max(self.scale * self.config.factor, self.floor), 0

    def _better(self, metric: float) -> bool:
        if math.isnan(metric):
            return False
        if self.best is None:
            return True
        margin = self.config.threshold * abs(self.best)
        if self.higher:
            return metric > self.best + margin
        return metric < self.best - margin

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.scale = state["best"], state["waited"], state["scale"]
