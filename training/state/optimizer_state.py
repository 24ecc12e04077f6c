"""The optimizer's part of a checkpoint: written, checked against the present optimizer, and restored. State is stored
by parameter name, so that it does not depend on how the optimizer groups its parameters. The state of a custom
optimizer is stored as its state_dict() returns it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training.loop.step_engine import Lane
from layerline.training.optimizers import param_groups
from layerline.training.optimizers.strides import inner

WEIGHTS_ALONE = "for the weights alone, layerline.training.state.checkpoint.load_weights(model, path)"


def state(lane: Lane) -> dict[str, Any]:
    """State by parameter name for a built-in optimizer; the state_dict() of a custom one that has this method."""
    name = _name(lane)
    if lane.custom:
        if not hasattr(lane.optimizer, "state_dict"):
            warn_stateless(lane, f"{name} has no state_dict(): its state is not in the checkpoint")
            return {"name": name, "custom": None}
        return {"name": name, "custom": lane.optimizer.state_dict()}
    name_of = {id(p): n for n, p in zip(lane.names, lane.stepped, strict=True)}
    saved: dict[str, Any] = {"name": name}
    saved["state"] = {name_of[id(p)]: dict(state) for p, state in lane.optimizer.state.items()}
    rules = _other_rules(lane)
    if rules:
        saved["rules"] = rules
    return saved


def _other_rules(lane: Lane) -> dict[str, str]:
    """The update rules of parameters that have another than the configured one."""
    config = lane.config.optimizer
    rules = {name: param_groups.rule_name(config, m) for name, m in zip(lane.names, lane.members, strict=True)}
    return {name: rule for name, rule in rules.items() if rule != config.name}


def check(lane: Lane, saved: Mapping[str, Any]) -> None:
    """Refuses a state that the optimizer here cannot go on from, before anything is changed."""
    custom = "custom" in saved
    if custom is not lane.custom or saved["name"] != _name(lane):
        kinds = {True: "the custom optimizer ", False: ""}
        what = (
            f"the checkpoint was written with {kinds[custom]}{saved['name']}; "
            f"the optimizer here is {kinds[lane.custom]}{_name(lane)}"
        )
        raise StageError(what, where="optimizer", hint=f"use the optimizer it was written with; {WEIGHTS_ALONE}")
    if custom:
        _check_custom(lane, saved["custom"])
        return
    params = dict(zip(lane.names, lane.params, strict=True))
    saved_rules, rules = saved.get("rules", {}), _other_rules(lane)
    for name in params:
        before, now = saved_rules.get(name, saved["name"]), rules.get(name, saved["name"])
        if before != now:
            raise StageError(f"{before} stepped it when the checkpoint was written, and {now} does here", where=name,
                             hint=f"give it the same rule in optimizer.groups; {WEIGHTS_ALONE}")  # fmt: skip
    needs_momentum = lane.config.optimizer.name == "rmsprop" and lane.config.optimizer.momentum
    for name, state_of_param in saved["state"].items():
        if name not in params:
            what = "the checkpoint has optimizer state of this parameter, which is not trained here"
            raise StageError(what, where=name, hint=f"train the same parameters; {WEIGHTS_ALONE}")
        if needs_momentum and "momentum_buffer" not in state_of_param:
            what = "the checkpoint was written without momentum, and rmsprop cannot begin it later"
            raise StageError(what, where="optimizer.momentum", hint=f"leave it out; {WEIGHTS_ALONE}")
        shape = params[name].shape
        for key, value in state_of_param.items():
            if key in ("row_var", "col_var") or not isinstance(value, Tensor):
                continue  # adafactor's statistics of rows and columns are smaller than the parameter
            if value.dim() == len(shape) and value.numel() > 1 and value.shape != shape:
                raise StageError(f"{key} is {tuple(value.shape)}, the parameter is {tuple(shape)}", where=name)


def restore(lane: Lane, saved: Mapping[str, Any]) -> None:
    """Restores the state of a built-in optimizer."""
    by_name = dict(zip(lane.names, lane.stepped, strict=True))
    for part in inner(lane.optimizer):
        current = part.state_dict()
        # torch numbers parameters in the order of the groups.
        params = [param for group in part.param_groups for param in group["params"]]
        numbers = {id(param): number for number, param in enumerate(params)}
        current["state"] = {}
        for name, state_of_param in saved["state"].items():
            number = numbers.get(id(by_name[name]))
            if number is not None:  # another part of a mixed optimizer has it
                current["state"][number] = state_of_param
        part.load_state_dict(current)  # it casts state to the type and device of its parameter


def _name(lane: Lane) -> str:
    """The table's name, or the class of a custom one."""
    return type(lane.optimizer).__name__ if lane.custom else lane.config.optimizer.name


def warn_stateless(lane: Lane, text: str) -> None:
    lane.monitor.warn("stateless", text)
    warnings.warn(text, stacklevel=2)


def _check_custom(lane: Lane, state: Any) -> None:
    """Refuses what torch's load_state_dict() would refuse later, when the weights have been overwritten already."""
    if not isinstance(lane.optimizer, torch.optim.Optimizer) or "param_groups" not in state:
        return
    saved_sizes = [len(g["params"]) for g in state["param_groups"]]
    sizes = [len(g["params"]) for g in lane.optimizer.param_groups]
    if saved_sizes != sizes:
        what = f"the optimizer's groups have {saved_sizes} parameters in the checkpoint, here {sizes}"
        raise StageError(what, where="optimizer", hint="create the optimizer over the same parameters")
