"""An optimizer's part of a checkpoint: how it is written, checked against the optimizer here, and put back.

State is kept by parameter name, so that it does not depend on how the optimizer groups its parameters. The state of a
custom optimizer is kept as its state_dict() gives it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training.loop.step_engine import Lane

WEIGHTS_ALONE = "for the weights alone, layerline.training.state.checkpoint.load_weights(model, path)"


def state(lane: Lane) -> dict[str, Any]:
    """By parameter name for our own optimizers; as it comes for a custom one that has a state_dict."""
    name = _name(lane)
    if lane.custom:
        if not hasattr(lane.optimizer, "state_dict"):
            _say_stateless(lane, f"{name} has no state_dict(): its state is not in the checkpoint")
            return {"name": name, "custom": None}
        return {"name": name, "custom": lane.optimizer.state_dict()}
    name_of = {id(p): n for n, p in zip(lane.names, lane.stepped, strict=True)}
    # Parameters that joined later have taken fewer steps, whatever group a fresh optimizer puts them in.
    steps = {name_of[id(p)]: g["step"] for g in lane.optimizer.param_groups if "step" in g for p in g["params"]}
    by_name = {name_of[id(p)]: dict(s) for p, s in lane.optimizer.state.items()}
    return {"name": name, "state": by_name, "group_steps": steps}


def check(lane: Lane, saved: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a state that the optimizer here cannot go on from, before anything is changed.

    Args:
        expected: shapes of the trained parameters, by name.

    Raises:
        StageError: it is another optimizer's, or of other parameters, or a tensor has another shape.
    """
    custom = "custom" in saved
    if custom is not lane.custom or saved["name"] != _name(lane):
        was, now = (f"{'an optimizer of its own, ' if c else ''}{n}"
                    for c, n in ((custom, saved["name"]), (lane.custom, _name(lane))))  # fmt: skip
        raise StageError(f"the checkpoint was written with {was}; the optimizer here is {now}", where="optimizer",
                         hint=f"take the optimizer it was written with; {WEIGHTS_ALONE}")  # fmt: skip
    if custom:
        _check_custom(lane, saved["custom"])
        return
    if unknown := sorted(set(saved["state"]) - set(expected)):
        raise StageError(f"the checkpoint has optimizer state of parameters that are not trained here: {unknown[:5]}",
                         where="optimizer", hint=f"train the same ones; {WEIGHTS_ALONE}")  # fmt: skip
    config = lane.config.optimizer
    for name, kept in saved["state"].items():
        if config.name == "rmsprop" and config.momentum and "momentum_buffer" not in kept:
            raise StageError("the checkpoint was written without momentum, and rmsprop cannot begin it later",
                             where="optimizer.momentum", hint=f"leave it out; {WEIGHTS_ALONE}")  # fmt: skip
        for key, value in kept.items():
            like = isinstance(value, Tensor) and value.dim() == len(expected[name]) and value.numel() > 1
            if like and key not in ("row_var", "col_var") and tuple(value.shape) != expected[name]:
                raise StageError(f"{key} is {tuple(value.shape)}, the parameter {expected[name]}", where=name)


def restore(lane: Lane, saved: Mapping[str, Any]) -> None:
    """Puts the state of one of our own optimizers back."""
    of_name = dict(zip(lane.names, lane.stepped, strict=True))
    _restore_steps(lane, {id(of_name[n]): step for n, step in saved["group_steps"].items()})
    current = lane.optimizer.state_dict()
    order = {id(p): i for i, p in enumerate(p for g in lane.optimizer.param_groups for p in g["params"])}
    current["state"] = {order[id(of_name[n])]: s for n, s in saved["state"].items()}
    lane.optimizer.load_state_dict(current)


def custom_state(lane: Lane, saved: Mapping[str, Any]) -> Any:
    """What a custom optimizer's load_state_dict() gets; None, with a warning, where it begins without state."""
    if saved["custom"] is not None and hasattr(lane.optimizer, "load_state_dict"):
        return saved["custom"]
    _say_stateless(lane, f"{type(lane.optimizer).__name__} begins without the state it had: "
                         "it was not saved, or it has no load_state_dict()")  # fmt: skip
    return None


def _name(lane: Lane) -> str:
    """The table's name, or the class of a custom one."""
    return type(lane.optimizer).__name__ if lane.custom else lane.config.optimizer.name


def _say_stateless(lane: Lane, text: str) -> None:
    lane.monitor.warn("stateless", text)
    warnings.warn(text, stacklevel=2)


def _check_custom(lane: Lane, state: Any) -> None:
    """What torch's optimizers refuse on loading, which must not come when the weights are changed already."""
    if not isinstance(lane.optimizer, torch.optim.Optimizer) or "param_groups" not in state:
        return
    was, now = ([len(g["params"]) for g in groups] for groups in (state["param_groups"], lane.optimizer.param_groups))
    if was != now:
        raise StageError(f"the optimizer's groups have {was} parameters in the checkpoint, here {now}",
                         where="optimizer", hint="make it over the same parameters")  # fmt: skip


def _restore_steps(lane: Lane, steps: Mapping[int, int]) -> None:
    """Our own rules count steps by group: a group whose parameters have taken different numbers is divided."""
    for group in list(lane.optimizer.param_groups):
        params = group["params"]
        counts = sorted({steps.get(id(p)) for p in params}, key=lambda count: -(count or 0))
        for index, count in enumerate(counts):
            part = [p for p in params if steps.get(id(p)) == count]
            if index == 0:
                group["params"] = part
                target = group
            else:
                lane.rate.part(group)
                lane.optimizer.add_param_group({**group, "params": part})
                target = lane.optimizer.param_groups[-1]
            target.pop("step", None)
            if count is not None:
                target["step"] = count
