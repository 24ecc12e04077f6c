"""Sets the learning rates of the optimizer's groups from the schedule; writes to them only when the rate changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from layerline.training.config import schedules
from layerline.training.config.checks import NEED_TOTAL, warmup_steps
from layerline.training.config.sections import Config
from layerline.training.model.policy import Policy
from layerline.training.optimizers.custom import own_groups


class Rate(Policy):
    """The learning rate of one optimizer. With a constant schedule the rates belong to the optimizer: a user's
    scheduler may change them, and a checkpoint restores them."""

    name = "rate"

    def __init__(self, config: Config, optimizer: Any, *, custom: bool = False) -> None:
        self._optimizer = optimizer
        self._bases = [float(g["lr"]) for g in self._groups]
        self.base = config.optimizer.base_lr
        if custom and self._bases:
            self.base = self._bases[0]
        self.schedule = schedules.build(config.scheduler, self.base)
        self.plateau: schedules.Plateau | None = None
        if config.scheduler.name == "plateau":
            floor = schedules.floor_ratio(config.scheduler, self.base)
            self.plateau = schedules.Plateau(config.scheduler, floor, config.higher_is_better)
        plain = config.scheduler.name == "constant" and not warmup_steps(config.scheduler)
        self._constant = plain and config.swa.lr is None
        self._averaged_from, self._averaged_lr = config.swa_start, config.swa.lr
        self._multiplier = 1.0
        self._momentum = schedules.momentum(config.scheduler)
        # The number of the update at which the schedule ends.
        self.end: int | None = None
        if config.scheduler.name in NEED_TOTAL:
            self.end = config.scheduler.total_steps
        self.set(0)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        # Not stored: loading a state replaces an optimizer's groups.
        return _with_rates(self._optimizer)

    def after_accepted(self, step: int) -> None:
        if not self._constant:
            self.set(step)

    def set(self, step: int) -> None:
        """Sets the rates for the update after `step` accepted ones."""
        multiplier = self._scheduled(step)
        if self.plateau is not None:
            multiplier *= self.plateau.scale
        if self._momentum is not None:
            # The first beta, or the momentum where the optimizer uses one, as torch's OneCycleLR does.
            value = self._momentum(step)
            for group in self._groups:
                if "betas" in group:
                    group["betas"] = (value, *group["betas"][1:])
                elif group.get("momentum"):
                    group["momentum"] = value
        if multiplier == self._multiplier:
            return
        self._multiplier = multiplier
        # A group that the user added later has its full rate.
        self._bases += [float(g["lr"]) for g in self._groups[len(self._bases) :]]
        _write(self._groups, [base * multiplier for base in self._bases])

    def _scheduled(self, step: int) -> float:
        """The schedule's multiple of the base rate; SWA holds the rate while it averages."""
        if not self._averaged_from or step + 1 < self._averaged_from:
            return self.schedule(step)
        if self._averaged_lr is not None:
            return self._averaged_lr / self.base
        return self.schedule(self._averaged_from - 1)

    def moved_by_others(self) -> bool:
        """Whether other code has changed a rate, as a scheduler of the user's beside the configured one does."""
        if self._constant:
            return False
        # A group that the user has added since has no base yet.
        for group, base in zip(self._groups, self._bases, strict=False):
            if not math.isclose(float(group["lr"]), base * self._multiplier, rel_tol=1e-6):
                return True
        return False

    def rewind(self, copied: Any) -> None:
        """Sets a copy of the optimizer to the base rates, which a new schedule over it is multiplied with."""
        _write(_with_rates(copied), self._bases)

    def adopt(self, group: dict[str, Any]) -> None:
        """Takes in a new group of the optimizer that has its full rate, and applies the schedule to it."""
        place = list(map(id, self._groups)).index(id(group))
        self._bases.insert(place, float(group["lr"]))
        group["lr"] *= self._multiplier

    def at(self, step: int) -> float:
        """The rate after `step` accepted steps, with the present plateau factor."""
        rate = self.base * self._scheduled(step)
        if self.plateau is not None:
            rate *= self.plateau.scale
        return rate

    @property
    def current(self) -> float:
        """The rate of the coming update, of the first group: the configured rate, unless rules match all parameters."""
        for group in getattr(self._optimizer, "param_groups", ()):
            if isinstance(group, dict) and "lr" in group:
                return float(group["lr"])
        return self.base * self._multiplier

    def state_dict(self) -> dict[str, Any]:
        rates = [float(g["lr"]) for g in self._groups]
        plateau = None
        if self.plateau is not None:
            plateau = self.plateau.state_dict()
        return {"plateau": plateau, "bases": self._bases, "rates": rates}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        if self.plateau is not None and state["plateau"] is not None:
            self.plateau.load_state_dict(state["plateau"])
        if self._constant:
            if state.get("bases") == self._bases:  # otherwise another rate is configured now
                _write(self._groups, state["rates"])
            return
        # No multiplier equals it: set() writes the rates in any case.
        self._multiplier = math.nan
        self.set(step)


def _with_rates(optimizer: Any) -> list[dict[str, Any]]:
    return [group for group in own_groups(optimizer) if "lr" in group]


def _write(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    for group, rate in zip(groups, rates, strict=False):
        # Optimizers that are captured or compiled hold the rate as a tensor, which must stay the same one.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
