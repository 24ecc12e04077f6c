"""A model stays its owner's: what was done to it after an optimizer was made is followed, or refused by name.

A replaced parameter would be trained no more and saved as it was, without a word; a moved one would leave its average
behind. Both are looked for where a step shows it (a gradient that is missing), now and then, and before weights leave.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from layerline.pipeline.errors import ConfigError
from layerline.training import optimizers
from layerline.training.ema import norm_buffers, statistics
from layerline.training.guard import Guard
from layerline.training.names import Slots, named

if TYPE_CHECKING:
    from layerline.training.lane import Lane

_ANEW = "change, move or load the model first (load_state_dict without assign=True), then make ModelOptimizer"


def refresh(lane: Lane, *, warn: bool = True) -> None:
    """Looks the model through and follows what its owner did to it: buffers that are new tensors, other names, layers
    without statistics, half weights that were written to. Warns of parameters that nobody trains.

    Raises:
        ConfigError: a trained parameter is gone, or is another tensor, or of another type or device.
    """
    if lane.peers is not None:
        lane.peers.changed()  # a sharded unit that is whole at the moment holds other tensors
    lane.named = named(lane.model)
    at = {id(p): n for n, p in lane.named.params.items()}
    for name, param, kind in zip(lane.names, lane.params, lane.kinds, strict=True):
        if id(param) not in at:
            there = name in lane.named.params or name in lane.named.aliases
            what = "is another tensor" if there else "is no longer in the model"
            raise ConfigError(f"this parameter {what} since ModelOptimizer was made", where=name, hint=_ANEW)
        if kind != (now := (param.dtype, param.device)):
            was = f"was {kind[0]} on {kind[1]} when ModelOptimizer was made, and is {now[0]} on {now[1]}"
            raise ConfigError(f"this parameter {was}", where=name, hint=_ANEW)
    if (names := [at[id(p)] for p in lane.params]) != lane.names:
        if lane.masks is not None:
            lane.masks.rename(dict(zip(lane.names, names, strict=True)))
        lane.names[:] = names
    lane.frozen = left_out(lane)
    if warn:
        if lane.custom:
            optimizers.check_held(lane.optimizer, lane.params)
        _warn_of_strangers(lane)
    take_over(lane)


def take_over(lane: Lane) -> None:
    """Points average, guard and masters to what the model holds now; not while it holds its averages."""
    if lane.ema is not None and lane.ema.swapped:
        return
    if lane.ema is not None:
        lane.ema.follow(dict(zip(lane.names, lane.stepped, strict=True)), Slots(lane.named, statistics(lane.named)))
    live = Slots(lane.named, norm_buffers(lane.named))
    if not live.names:
        lane.guard = None
    elif lane.guard is None:
        lane.guard = Guard(live)
    else:
        lane.guard.follow(live)
    if lane.masters is not None and lane.masters.follow():
        lane.reach.weights = math.inf


def left_out(lane: Lane) -> list[nn.Parameter]:
    """Parameters of the model that are not trained."""
    trained = {id(p) for p in lane.params}
    return [p for p in lane.named.params.values() if id(p) not in trained and not p.requires_grad]


def _warn_of_strangers(lane: Lane) -> None:
    trained = {id(p) for p in lane.params}
    new = [n for n, p in lane.named.params.items() if p.requires_grad and id(p) not in trained]
    if new:
        them = f"{new[0]} and {len(new) - 1} more require gradients and are" if len(new) > 1 \
            else f"{new[0]} requires a gradient and is"  # fmt: skip
        lane.monitor.warn("strangers", f"{them} not trained: call join()")
