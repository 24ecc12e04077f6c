"""What a checkpoint says of one model, read and checked before anything is written: a failed load changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training.loop.step_engine import Lane
from layerline.training.model import canonical_names
from layerline.training.optimizers import registry
from layerline.training.state import optimizer_state
from layerline.training.state.optimizer_state import WEIGHTS_ALONE
from layerline.training.state.state_tree import unpack

_WEIGHTS = ("online", "masters", "ema")
_PARTS = ("optimizer", "rate", "scale", "window", "guard")
_MAYBE = ("masks", "monitor")


@dataclass(frozen=True)
class Saved:
    """One lane's state.

    Attributes:
        weights: by kind (online, masters, ema), by parameter name.
        parts: what else there is, by name.
        counters: steps and the like.
    """

    weights: Mapping[str, Mapping[str, Tensor]]
    parts: Mapping[str, Any]
    counters: Mapping[str, int]


def read(lane: Lane, saved: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> Saved:
    """The state as `lane` can take it.

    Raises:
        StageError: a tensor that is missing or of another shape, another optimizer; names them.
    """
    if lane.peers is not None:
        tensors = lane.peers.split(tensors, prefix)
    classes = registry.classes(lane.optimizer)
    try:
        there = (*_PARTS, *(m for m in _MAYBE if m in saved))
        parts = {n: unpack(saved[n], f"{prefix}{n}", tensors, classes) for n in there}
        found = Saved({k: _under(f"{prefix}{k}/", tensors) for k in _WEIGHTS}, parts, saved["counters"])
    except KeyError as error:
        raise StageError(f"the checkpoint has no {error.args[0]}", where="checkpoint") from error
    lane.refresh()
    canonical_names.check(lane.model, found.weights["online"])
    expected = {n: tuple(p.shape) for n, p in zip(lane.names, lane.params, strict=True)}
    for kind in ("masters", "ema"):
        _fits(kind, found.weights[kind], {n: tuple(t.shape) for n, t in lane.named.tensors.items()})
    _fits("window", parts["window"]["grads"], expected)
    _fits("masks", parts.get("masks", {}).get("masks", {}), {n: tuple(p.shape) for n, p in lane.named.params.items()})
    optimizer_state.check(lane, parts["optimizer"], expected)
    return found


def of_model(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The online weights of one model, masters in their places, and the same with the averages in theirs.

    Until averaging begins (`ema_start_step`) a checkpoint's averages are the initial weights. They must never ship, so
    that the trained weights are returned in their place.
    """
    prefix = f"{name}/" if name else ""
    online, masters, averages = (_under(f"{prefix}{kind}/", tensors) for kind in _WEIGHTS)
    trained = online | masters
    if not meta["lanes"][name]["counters"]["ema_updates"]:
        return trained, trained
    return trained, trained | averages


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def _fits(kind: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in tensors.items():
        if name not in expected:
            raise StageError(f"the checkpoint has {kind} of a parameter that is not trained here", where=name,
                             hint=f"train the same parameters as when it was written; {WEIGHTS_ALONE}")  # fmt: skip
        if tuple(tensor.shape) != expected[name]:
            raise StageError(
                f"{kind} is {tuple(tensor.shape)} in the checkpoint, expected {expected[name]}", where=name
            )
