"""What would ship beside what is trained: switching between them, and measuring both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.training.loop import model_sync
from layerline.training.loop.accumulation import as_float
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.fake_quantization import is_fake_quantized, ranges_kept, without_fake_quantization
from layerline.training.model.precision import wide
from layerline.training.model.split_tensors import is_split, whole
from layerline.training.randomness.rng_state import modes_kept


def switch(lane: LaneState, *, ema: bool) -> None:
    """Puts averages or trained weights into the model, in place; nothing where they are there already."""
    if lane.ema is None or lane.ema.swapped is ema:
        return
    model_sync.refresh(lane)
    lane.ema.swap()
    # The swap was of the masters: the model has rounded copies of them.
    if lane.masters is not None:
        lane.masters.publish()
    if lane.guard is not None:
        lane.guard.hold(swapped=ema)


@contextmanager
def online(lane: LaneState) -> Iterator[None]:
    """The trained weights inside the block, whatever the model held before."""
    swapped = lane.ema is not None and lane.ema.swapped
    switch(lane, ema=False)
    try:
        yield
    finally:
        switch(lane, ema=swapped)


def shipped(lane: LaneState) -> dict[str, Tensor]:
    """Copies of the weights that would ship: averages where there are any, float32, tied tensors once; those of a
    sharded model on the CPU."""
    # A buffer that a forward pass has replaced is another tensor now.
    model_sync.refresh(lane)
    with online(lane):
        tensors = lane.named.tensors
        if lane.ema is not None:
            tensors |= lane.ema.values()
        elif lane.masters is not None:
            tensors |= {n: lane.masters.stepped(p) for n, p in lane.named.params.items()}
        out = {n: wide(whole(t.detach())) for n, t in tensors.items()}
    if is_split(lane.model):
        out = {n: t.cpu() for n, t in out.items()}
    return out


def validate(lane: LaneState, metric: Callable[[nn.Module], float]) -> dict[str, float]:
    """`metric` of the online weights without fake quantisation, and of what would ship; both in eval mode."""
    with modes_kept(lane.model):
        lane.model.eval()
        # In this order: the ranges are put back into the buffers that the model holds at the end.
        with torch.no_grad(), ranges_kept(lane.model), online(lane):
            with without_fake_quantization(lane.model):
                plain = _number(metric(lane.model))
            # Without an average and fake quantisation both are one model, and measured once.
            deploy = plain
            if lane.ema is not None or is_fake_quantized(lane.model):
                switch(lane, ema=True)
                deploy = _number(metric(lane.model))
                switch(lane, ema=False)
    if lane.peers is not None and lane.rate.plateau is not None:
        # Ranks may measure differently (other samples, rounding), and must train at one rate: all follow rank 0.
        plain, deploy = lane.peers.gather((plain, deploy))[0]
    if lane.rate.plateau is not None:
        lane.rate.plateau.observe(deploy)
        lane.rate.set(lane.steps)
    lane.monitor.validated(lane.steps, plain, deploy)
    return {"online": plain, "deploy": deploy, "gap": plain - deploy}


def _number(metric: object) -> float:
    number = as_float(metric)
    if number is not None:
        return number
    kind, hint = f"a {type(metric).__name__}", "give a float"
    if isinstance(metric, Tensor):
        kind = f"a tensor of shape {tuple(metric.shape)}"
    elif isinstance(metric, Mapping):
        hint = f"give one of {', '.join(map(str, metric))}"
    raise ConfigError(f"the metric is one number, got {kind}", where="validate", hint=hint)
