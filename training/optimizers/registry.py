"""The table of optimizers by name, and how they are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import OptimizerConfig
from layerline.training.optimizers import param_groups
from layerline.training.optimizers.foreach import Lamb, Lion
from layerline.training.optimizers.param_groups import Member
from layerline.training.optimizers.strides import fusible


class Several:
    """Optimizers over parts of one model, stepped as one."""

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, in their order."""
        groups: list[dict[str, Any]] = []
        for part in self.parts.values():
            groups += part.param_groups
        return groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter, whichever part steps it."""
        state: dict[Tensor, dict[str, Any]] = {}
        for part in self.parts.values():
            state |= part.state
        return state

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()


TABLE: Mapping[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor, "lamb": Lamb, "lion": Lion, "muon": torch.optim.Muon,
}  # fmt: skip
# Those for which torch has a fused kernel, those with an argument `foreach`, and those that take complex parameters.
_FUSED = ("sgd", "adam", "adamw")
_FOREACH = ("sgd", "rmsprop", "adam", "adamw", "adafactor")
TAKES_COMPLEX = ("sgd", "rmsprop", "adam", "adamw")


def build(config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[nn.Parameter]) -> Optimizer | Several:
    """The optimizer, with one group for each combination of rate, weight decay and other fields. Where
    `optimizer.groups` name other update rules, there is one optimizer for each."""
    if config.name == "custom":
        hint = "ModelOptimizer(model, config, optimizer=…) with step() and zero_grad()"
        raise ConfigError("custom needs the optimizer itself", where="optimizer.name", hint=hint)
    by_rule: dict[str, tuple[list[Member], list[nn.Parameter]]] = {}
    for member, param in zip(members, stepped, strict=True):
        its_members, its_params = by_rule.setdefault(param_groups.rule_name(config, member), ([], []))
        its_members.append(member)
        its_params.append(param)
    if list(by_rule) == [config.name]:
        return _build_rule(config.name, config, members, stepped)
    # The configured rule comes first: its rate is the one that is shown.
    names = sorted(by_rule, key=lambda name: name != config.name)
    return Several({name: _build_rule(name, config, *by_rule[name]) for name in names})


def _build_rule(
    name: str, config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[nn.Parameter]
) -> Optimizer:
    for member, param in zip(members, stepped, strict=True):
        if param.is_complex() and name not in TAKES_COMPLEX:
            raise ConfigError(f"{name} does not support complex parameters such as {member.name}",
                              where="optimizer.name", hint=f"these do: {', '.join(TAKES_COMPLEX)}")  # fmt: skip
        if name == "muon" and param.ndim != 2:
            raise ConfigError(f"muon steps matrices alone, and {member.name} has the shape {tuple(param.shape)}",
                              where="optimizer.name",
                              hint="name: adamw, with groups: [{match: '*', name: muon}] for the matrices")  # fmt: skip
    arguments: dict[str, Any] = {"lr": config.base_lr}
    if name == config.name:
        arguments |= config.arguments
    groups = param_groups.grouped(config, members, stepped)
    # torch's fused SGD fails where a parameter's momentum begins later than that of others in its group.
    momentum = arguments.get("momentum") or any(group.get("momentum") for group in groups)
    fused = name in _FUSED and not momentum
    plain = all(type(p) is nn.Parameter and p.is_floating_point() for p in stepped)
    devices = {p.device.type for p in stepped}
    if fused and plain and devices <= {"cpu", "cuda"} and len(devices) == 1 and fusible(stepped):
        arguments["fused"] = True
    elif name in _FOREACH and plain:
        arguments["foreach"] = True
    return TABLE[name](groups, **arguments)


def part_for(optimizer: Any, config: OptimizerConfig, member: Member) -> Any:
    """The optimizer that a parameter joins."""
    name = param_groups.rule_name(config, member)
    parts: dict[str, Any] = {config.name: optimizer}
    if isinstance(optimizer, Several):
        parts = dict(optimizer.parts)
    if name not in parts:
        raise ConfigError(f"it would be the first parameter of {name}, and joins too late for that", where=member.name,
                          hint="make ModelOptimizer after changing the model")  # fmt: skip
    return parts[name]
