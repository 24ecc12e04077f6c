"""Reads and checks one model's part of a checkpoint before anything is changed, so that a failed load is harmless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training.loop.step_engine import Lane
from layerline.training.model import canonical_names
from layerline.training.optimizers import custom
from layerline.training.state import optimizer_state
from layerline.training.state.optimizer_state import WEIGHTS_ALONE
from layerline.training.state.state_tree import unpack

_WEIGHTS = ("online", "masters", "ema")
# In the order in which a checkpoint holds them.
PARTS = ("optimizer", "rate", "scale", "window", "guard")
OPTIONAL_PARTS = ("masks", "monitor")


@dataclass(frozen=True)
class Saved:
    """One lane's state.

    Attributes:
        weights: tensors by kind (online, masters, ema) and parameter name.
        parts: state of the optimizer, schedule, loss scale and so on, by name.
        counters: numbers of steps.
    """

    weights: Mapping[str, Mapping[str, Tensor]]
    parts: Mapping[str, Any]
    counters: Mapping[str, int]


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
    lane.refresh()
    canonical_names.check(lane.model, weights["online"])
    trained = _shapes(dict(zip(lane.names, lane.params, strict=True)))
    for kind in ("masters", "ema"):
        _check_shapes(kind, weights[kind], _shapes(lane.named.tensors))
    _check_shapes("window", parts["window"]["grads"], trained)
    _check_shapes("window", parts["window"].get("curvature", {}), trained)
    _check_shapes("masks", parts.get("masks", {}).get("masks", {}), _shapes(lane.named.params))
    optimizer_state.check(lane, parts["optimizer"], trained)
    return state


def of_model(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One model's trained weights, in float32 where there are masters, and the same with averages in their places.

    Until averaging begins (`ema_start_step`) a checkpoint's averages are the initial weights. They must never ship, so
    the trained weights are returned instead.
    """
    prefix = prefix_of(name)
    online = _under(f"{prefix}online/", tensors)
    masters = _under(f"{prefix}masters/", tensors)
    averages = _under(f"{prefix}ema/", tensors)
    trained = online | masters
    if not meta["lanes"][name]["counters"]["ema_updates"]:
        return trained, trained
    return trained, trained | averages


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_shapes(kind: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in tensors.items():
        if name not in expected:
            raise StageError(f"the checkpoint has {kind} of a parameter that is not trained here", where=name,
                             hint=f"train the same parameters as when it was written; {WEIGHTS_ALONE}")  # fmt: skip
        if tuple(tensor.shape) != expected[name]:
            raise StageError(
                f"{kind} is {tuple(tensor.shape)} in the checkpoint, expected {expected[name]}", where=name
            )
