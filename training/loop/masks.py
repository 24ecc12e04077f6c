"""Pruning masks of one model, put back on after every accepted step. The masked weights and those of the average are
zero after each step, so what is measured is what would ship."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.loop import ema_swap
from layerline.training.loop.lane_state import LaneState
from layerline.training.loop.mask_choice import Gradual, channels, magnitude
from layerline.training.model.policy import Policy
from layerline.training.model.split_tensors import like, whole

__all__ = ["Gradual", "Masks", "channels", "magnitude"]


class Masks(Policy):
    """The masks of one model, and when they change. What is masked once stays so, whatever is added."""

    name = "masks"

    def __init__(self, lane: LaneState, masks: Mapping[str, Tensor] | Gradual) -> None:
        self._lane = lane
        self.gradual: Gradual | None = None
        self._chosen: int | None = None  # the step of the schedule that the masks are of
        self.masks: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}  # those among them that no schedule has chosen
        self._targets: list[Tensor] = []
        self._factors: list[Tensor] = []
        self.add(masks)

    def add(self, masks: Mapping[str, Tensor] | Gradual) -> None:
        """Masks besides those there are: a weight stays where all of them leave it. A second schedule takes the place
        of the first."""
        if self._lane.peers is not None:
            # Ranks with different masks would train different models.
            contents = self._lane.peers.gather(_content(masks))
            for rank, content in enumerate(contents):
                if content != contents[0]:
                    what = f"rank {rank} has other masks than rank 0"
                    raise StageError(what, where="masks", hint="give every rank the same ones")
        if isinstance(masks, Gradual):
            self.gradual, self._chosen = masks, None
            self._follow(self._lane.steps)
        else:
            self._set(masks)
            self._fixed = self._together(self._fixed, masks)

    def weights_were_loaded(self) -> None:
        """Before the first step: a schedule chooses from the loaded weights, and masks hold in them."""
        self.masks, self._chosen = {}, None
        self._set(self._fixed)
        self._follow(self._lane.steps)

    def after_accepted(self, step: int) -> None:
        """Zeroes what is masked, in one foreach call, or chooses anew."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_mul_(self._targets, self._factors)
        self._follow(step)  # what the step has brought back counts as zero there
        if self._lane.masters is not None:
            self._lane.masters.settled()

    def rename(self, names: Mapping[str, str]) -> None:
        """Follows parameters that have other names now: old name -> new name."""
        self.masks = {names.get(n, n): m for n, m in self.masks.items()}
        self._fixed = {names.get(n, n): m for n, m in self._fixed.items()}

    @property
    def complete_at(self) -> int:
        """The step at which a gradual schedule reaches its share; 0 without one."""
        if self.gradual is None:
            return 0
        return self.gradual.end

    def state_dict(self) -> dict[str, Any]:
        gradual = None
        if self.gradual is not None:
            gradual = asdict(self.gradual)
        return {"masks": dict(self.masks), "gradual": gradual}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        self.gradual = self._chosen = None
        if state["gradual"]:
            self.gradual = Gradual(**{**state["gradual"], "skip": tuple(state["gradual"]["skip"])})
            # The saved masks are those of this step of the schedule: they are not chosen again.
            self._chosen = self.gradual.latest(step)
        self.masks = {}
        self._set({name: mask.clone() for name, mask in state["masks"].items()})
        self._fixed = self.masks

    def _follow(self, step: int) -> None:
        """Chooses masks where the schedule has moved on, whether or not it was asked at that very step."""
        if self.gradual is None:
            return
        latest = self.gradual.latest(step)
        if latest is None or latest == self._chosen:
            return
        with ema_swap.online(self._lane):
            self._set(self.gradual.choose(self._lane.model, latest))
        self._chosen = latest

    @torch.no_grad()
    def _set(self, masks: Mapping[str, Tensor]) -> None:
        """Adds masks, and looks up the tensors that they hold for: each parameter, its master and its average."""
        lane = self._lane
        self.masks = self._together(self.masks, masks)
        self._targets, self._factors = [], []
        with ema_swap.online(lane):  # the weights themselves, not what holds their place meanwhile
            for name, kept in self.masks.items():
                param = lane.named.params[name]
                targets: list[Tensor] = [param]
                if lane.masters is not None and lane.masters.has(param):
                    targets.append(lane.masters.stepped(param))
                if lane.ema is not None and name in lane.ema.names:
                    targets.append(lane.ema.shadow[lane.ema.names.index(name)])
                self._targets += targets
                self._factors += [like(target, kept.to(target.dtype)) for target in targets]
            if self._targets:
                torch._foreach_mul_(self._targets, self._factors)

    def _together(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What both sets of masks leave, by canonical name."""
        lane, out = self._lane, dict(old)
        for key, mask in new.items():
            name = lane.named.aliases.get(key, key)
            kept = mask.detach().to(_masked(lane, name, mask).device, torch.bool)
            if name in out:
                kept = out[name] & kept
            out[name] = kept
        return out


def apply(lane: LaneState, masks: Mapping[str, Tensor] | Gradual, *, replace: bool) -> None:
    """Adds masks to those of a model, or puts them in their place."""
    if lane.peers is not None:
        # A sharded unit that is whole at the moment holds other tensors.
        lane.peers.release()
    if isinstance(lane.masks, Masks) and not replace:
        lane.masks.add(masks)
    else:
        lane.masks = Masks(lane, masks)


def _content(masks: Mapping[str, Tensor] | Gradual) -> str:
    if isinstance(masks, Gradual):
        return repr(masks)
    digest = hashlib.sha256()
    for name, mask in masks.items():
        digest.update(f"{name} {tuple(mask.shape)}".encode())
        # Masks may be of any type: what counts is where they are zero.
        digest.update((whole(mask.detach()) != 0).cpu().numpy().tobytes())
    return digest.hexdigest()


def _masked(lane: LaneState, name: str, mask: Tensor) -> nn.Parameter:
    param = lane.named.params.get(name)
    if param is None:
        raise ConfigError("no parameter is called so", where=name, hint=f"the first ones are {lane.names[:3]}")
    if mask.shape != param.shape:
        raise ConfigError(f"the mask is {tuple(mask.shape)}, the parameter {tuple(param.shape)}", where=name)
    if not ((mask == 0) | (mask == 1)).all():
        raise ConfigError("a mask holds 0 and 1 only", where=name)
    return param
