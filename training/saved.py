"""What a checkpoint says of one model, read and checked before anything is written: a failed load changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training import names
from layerline.training.lane import Lane
from layerline.training.tree import unpack

_PARTS = ("optimizer", "rate", "scale", "window", "guard")
_MAYBE = ("masks", "monitor")
_WEIGHTS = "for the weights alone, layerline.training.checkpoint.load_weights(model, path)"


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
    try:
        parts = {n: unpack(saved[n], f"{prefix}{n}", tensors) for n in (*_PARTS, *(m for m in _MAYBE if m in saved))}
        found = Saved({k: _under(f"{prefix}{k}/", tensors) for k in ("online", "masters", "ema")}, parts,
                      saved["counters"])  # fmt: skip
    except KeyError as error:
        raise StageError(f"the checkpoint has no {error.args[0]}", where="checkpoint") from error
    lane.refresh()
    names.check(lane.model, found.weights["online"])
    expected = {n: tuple(p.shape) for n, p in zip(lane.names, lane.params, strict=True)}
    for kind in ("masters", "ema"):
        _fits(kind, found.weights[kind], {n: tuple(t.shape) for n, t in lane.named.tensors.items()})
    _fits("window", parts["window"]["grads"], expected)
    _fits("masks", parts.get("masks", {}).get("masks", {}), {n: tuple(p.shape) for n, p in lane.named.params.items()})
    _check_optimizer(lane, parts["optimizer"], expected)
    return found


def optimizer_name(lane: Lane) -> str:
    """What a checkpoint calls the optimizer: the table's name, or the class of one's own."""
    return type(lane.optimizer).__name__ if lane.custom else lane.config.optimizer.name


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def _fits(kind: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in tensors.items():
        if name not in expected:
            raise StageError(f"the checkpoint has {kind} of a parameter that is not trained here", where=name,
                             hint=f"train the same parameters as when it was written; {_WEIGHTS}")  # fmt: skip
        if tuple(tensor.shape) != expected[name]:
            raise StageError(
                f"{kind} is {tuple(tensor.shape)} in the checkpoint, expected {expected[name]}", where=name
            )


def _check_optimizer(lane: Lane, saved: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> None:
    own = "custom" in saved
    if own is not lane.custom or saved["name"] != optimizer_name(lane):
        was, now = (f"{'an optimizer of its own, ' if c else ''}{n}"
                    for c, n in ((own, saved["name"]), (lane.custom, optimizer_name(lane))))  # fmt: skip
        raise StageError(f"the checkpoint was written with {was}; the optimizer here is {now}", where="optimizer",
                         hint=f"take the optimizer it was written with; {_WEIGHTS}")  # fmt: skip
    if own:
        _check_own(lane, saved["custom"])
        return
    if unknown := sorted(set(saved["state"]) - set(expected)):
        raise StageError(f"the checkpoint has optimizer state of parameters that are not trained here: {unknown[:5]}",
                         where="optimizer", hint=f"train the same ones; {_WEIGHTS}")  # fmt: skip
    for name, state in saved["state"].items():
        if (
            lane.config.optimizer.name == "rmsprop"
            and lane.config.optimizer.momentum
            and "momentum_buffer" not in state
        ):
            raise StageError("the checkpoint was written without momentum, and rmsprop cannot begin it later",
                             where="optimizer.momentum", hint=f"leave it out; {_WEIGHTS}")  # fmt: skip
        for key, value in state.items():
            like = isinstance(value, Tensor) and value.dim() == len(expected[name]) and value.numel() > 1
            if like and key not in ("row_var", "col_var") and tuple(value.shape) != expected[name]:
                raise StageError(f"{key} is {tuple(value.shape)}, the parameter {expected[name]}", where=name)


def _check_own(lane: Lane, state: Any) -> None:
    """What torch's optimizers refuse on loading, which must not come when the weights are changed already."""
    if not isinstance(lane.optimizer, torch.optim.Optimizer) or not isinstance(state, Mapping):
        return
    was, now = ([len(g["params"]) for g in groups] for groups in (state["param_groups"], lane.optimizer.param_groups))
    if was != now:
        raise StageError(f"the optimizer's groups have {was} parameters in the checkpoint, here {now}",
                         where="optimizer", hint="make it over the same parameters")  # fmt: skip
