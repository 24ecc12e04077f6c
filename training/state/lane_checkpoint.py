"""One model's part of a checkpoint: weights, averages, optimizer, open window and counters, collected and put back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training.loop import ema_swap, model_sync
from layerline.training.loop.masks import Masks
from layerline.training.loop.step_engine import Lane
from layerline.training.model import canonical_names
from layerline.training.model.state_tree import Tensors, pack, unpack
from layerline.training.optimizers import custom
from layerline.training.state import optimizer_state
from layerline.training.state.optimizer_state import WEIGHTS_ALONE

_WEIGHTS = ("online", "masters", "ema")
# In the order in which a checkpoint holds them.
PARTS = ("optimizer", "rate", "scale", "window", "guard")
OPTIONAL_PARTS = ("masks", "monitor")


@dataclass(frozen=True)
class Saved:
    """One lane's state."""

    weights: Mapping[str, Mapping[str, Tensor]]  # tensors by kind (online, masters, ema) and parameter name
    parts: Mapping[str, Any]  # state of the optimizer, schedule, loss scale and so on, by name
    counters: Mapping[str, int]  # numbers of steps


def prefix_of(model_name: str) -> str:
    """What the names of a model's tensors begin with; a model that is the only one has the empty name."""
    return f"{model_name}/" if model_name else ""


def read(lane: Lane, saved: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> Saved:
    """The state in the form that `lane` loads."""
    if lane.peers is not None:
        tensors = lane.peers.split(tensors, prefix)
    classes = custom.classes(lane.optimizer)
    part_names = [*PARTS, *(name for name in OPTIONAL_PARTS if name in saved)]
    try:
        parts = {name: unpack(saved[name], f"{prefix}{name}", tensors, classes) for name in part_names}
        weights = {kind: _under(f"{prefix}{kind}/", tensors) for kind in _WEIGHTS}
        state = Saved(weights, parts, saved["counters"])
    except KeyError as error:
        raise StageError(f"the checkpoint has no {error.args[0]}", where="checkpoint") from error
    model_sync.refresh(lane)
    canonical_names.check(lane.model, weights["online"])
    trained = dict(zip(lane.names, lane.params, strict=True))
    _check_shapes("masters", weights["masters"], lane.named.tensors)
    _check_shapes("ema", weights["ema"], lane.named.tensors)
    _check_shapes("window", parts["window"]["grads"], trained)
    _check_shapes("masks", parts.get("masks", {}).get("masks", {}), lane.named.params)
    optimizer_state.check(lane, parts["optimizer"])
    return state


def of_model(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One model's trained weights, in float32 where there are masters, and the same with averages in their places.
    Until averaging begins (`ema_start_step`) a checkpoint's averages are the initial weights. They must never ship, so
    the trained weights are returned instead."""
    prefix = prefix_of(name)
    trained = _under(f"{prefix}online/", tensors) | _under(f"{prefix}masters/", tensors)
    if not meta["lanes"][name]["counters"]["ema_updates"]:
        return trained, trained
    return trained, trained | _under(f"{prefix}ema/", tensors)


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def _check_shapes(kind: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name not in expected:
            raise StageError(f"the checkpoint has {kind} of a parameter that is not trained here", where=name,
                             hint=f"train the same parameters as when it was written; {WEIGHTS_ALONE}")  # fmt: skip
        if tensor.shape != expected[name].shape:
            what = f"{kind} is {tuple(tensor.shape)} in the checkpoint, expected {tuple(expected[name].shape)}"
            raise StageError(what, where=name)


def collect(lane: Lane, prefix: str, tensors: Tensors, *, timings: bool) -> dict[str, Any]:
    """The lane's part of the JSON entry; its tensors are added to `tensors` under names that begin with `prefix`."""
    model_sync.refresh(lane)
    for name, tensor in lane.named.tensors.items():
        tensors[f"{prefix}online/{name}"] = tensor.detach()
    for name, param in zip(lane.names, lane.params, strict=True):
        if lane.masters is not None and lane.masters.has(param):
            tensors[f"{prefix}masters/{name}"] = lane.masters.stepped(param)
    ema_updates = 0
    if lane.ema is not None:
        ema_updates = lane.ema.updates
        tensors |= {f"{prefix}ema/{n}": average for n, average in zip(lane.ema.names, lane.ema.shadow, strict=True)}
    window = _window_state(lane)
    tensors |= {f"{prefix}online/{name}": mean for name, mean in _statistics_of_all(lane, window).items()}
    parts: dict[str, Any] = {"optimizer": optimizer_state.state(lane), "window": window, "guard": {}}
    for policy in lane.policies():
        if policy.name:
            parts[policy.name] = policy.state_dict()
    if timings:
        parts["monitor"] = lane.monitor.state_dict()
    counters = {"steps": lane.steps, "skipped": lane.skipped, "in_a_row": lane.skipped_in_a_row,
                "first_rejected": lane.first_rejected, "ema_updates": ema_updates,
                "loss": _finite(lane.loss), "grad_norm": _finite(lane.grad_norm)}  # fmt: skip
    if lane.largest_part is not None:
        counters["largest_part"] = lane.largest_part
    classes = custom.classes(lane.optimizer)
    saved: dict[str, Any] = {"counters": counters, "aliases": lane.named.aliases}
    for name in (*PARTS, *OPTIONAL_PARTS):
        if name in parts:
            saved[name] = pack(parts[name], f"{prefix}{name}", tensors, classes)
    return saved


def _window_state(lane: Lane) -> dict[str, Any]:
    grads = {}
    for name, stepped in zip(lane.names, lane.stepped, strict=True):
        if stepped.grad is not None:
            grads[name] = stepped.grad
    window: dict[str, Any] = lane.window.state_dict()
    if lane.peers is not None:
        window = lane.peers.shared_window(window)
        grads = lane.peers.mean_by_name(grads)
    return {**window, "grads": grads}


def _statistics_of_all(lane: Lane, window: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """In an open window of several ranks, the mean of their running statistics: those of rank 0, which writes the file,
    would leave out the others' micro-batches."""
    if lane.peers is None:
        return {}
    return lane.peers.mean_statistics(window)


def _finite(number: float) -> float | None:
    """The number, or None for NaN and Inf, which JSON has not."""
    return number if math.isfinite(number) else None


def _number(saved: float | None) -> float:
    """The inverse of `_finite`: 0 is a number."""
    return math.nan if saved is None else saved


def restore(lane: Lane, state: Saved) -> None:
    """Puts a checked state into a lane."""
    ema_swap.switch(lane, ema=False)
    if lane.peers is not None:
        lane.peers.release()  # whole copies of sharded units would hide what is loaded
    weights, parts, counters = state.weights, state.parts, state.counters
    masks, lane.masks = lane.masks, None  # masks of other weights must not touch those that are loaded
    canonical_names.load(lane.model, weights["online"])
    model_sync.refresh(lane)  # a buffer that was resized may be another tensor
    if lane.masters is not None:
        saved = weights["masters"] or weights["online"]
        with_master = [n for n, p in zip(lane.names, lane.params, strict=True) if lane.masters.has(p)]
        lane.masters.adopt([saved[name] for name in with_master])
    lane.steps = lane.next_model_check = counters["steps"]
    lane.skipped, lane.skipped_in_a_row = counters["skipped"], counters["in_a_row"]
    lane.first_rejected = counters["first_rejected"]
    lane.loss, lane.grad_norm = _number(counters["loss"]), _number(counters["grad_norm"])
    lane.largest_part = counters.get("largest_part")
    if lane.ema is not None:
        lane.ema.load(weights["ema"], counters["ema_updates"])
    if not lane.custom:
        optimizer_state.restore(lane, parts["optimizer"])
    if lane.strides is not None:  # fused kernels read state in the order of memory of its parameter
        lane.strides.settle(anew=True)
    lane.window.load_state_dict(parts["window"])
    for name, param in zip(lane.names, lane.stepped, strict=True):
        grad = parts["window"]["grads"].get(name)
        # The file may come from a model of another number format, whose weights are converted as well.
        param.grad = None if grad is None else grad.to(param.device, param.dtype)
    lane.masks = masks
    if "masks" in parts:
        lane.masks = masks or Masks(lane, {})
    elif masks is not None:
        masks.weights_were_loaded()
    for policy in lane.policies():
        if policy.name in parts:
            policy.load_state_dict(parts[policy.name], lane.steps)
    if "monitor" in parts:
        lane.monitor.load_state_dict(parts["monitor"])
