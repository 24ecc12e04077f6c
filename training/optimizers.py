"""Every optimizer by name in one explicit table: which class, which fields it takes, which fast path it has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from layerline.pipeline.errors import ConfigError
from layerline.training.config import OptimizerConfig
from layerline.training.foreach import Lamb, Lion, Sophia
from layerline.training.groups import Member


class Steps(Protocol):
    """All that is asked of an optimizer the user brings."""

    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


@dataclass(frozen=True)
class Rule:
    """One optimizer.

    Attributes:
        make: the class; called with parameter groups and keyword arguments.
        fields: configuration fields it takes besides lr and weight_decay -> name of its argument.
        fused: torch has a fused kernel for it.
        foreach: it takes foreach=True.
        states: tensors of a parameter's size that it keeps for each one.
        complex: it takes complex parameters.
    """

    make: type[torch.optim.Optimizer]
    fields: Mapping[str, str]
    fused: bool = False
    foreach: bool = True
    states: int = 2
    complex: bool = False


TABLE: Mapping[str, Rule] = {
    "sgd": Rule(torch.optim.SGD, {"momentum": "momentum", "nesterov": "nesterov"}, fused=True, states=1,
                complex=True),
    "rmsprop": Rule(torch.optim.RMSprop, {"alpha": "alpha", "eps": "eps", "momentum": "momentum"}, states=1,
                    complex=True),
    "adam": Rule(torch.optim.Adam, {"betas": "betas", "eps": "eps"}, fused=True, complex=True),
    "adamw": Rule(torch.optim.AdamW, {"betas": "betas", "eps": "eps"}, fused=True, complex=True),
    "adafactor": Rule(torch.optim.Adafactor, {}, states=0),
    "lamb": Rule(Lamb, {"betas": "betas", "eps": "eps"}, foreach=False),
    "lion": Rule(Lion, {"betas": "betas"}, foreach=False, states=1),
    "sophia": Rule(Sophia, {"betas": "betas", "eps": "eps", "rho": "rho", "update_interval": "update_interval"},
                   foreach=False),
}  # fmt: skip
_OWN_FIELDS = ("betas", "eps", "momentum", "nesterov", "alpha", "rho", "update_interval")


def build(config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over a decaying and a sparing group; `stepped` are the members' parameters or their masters.

    Raises:
        ConfigError: `custom` without an optimizer, a field that this optimizer has not, or complex parameters that it
            cannot take.
    """
    rule = rule_of(config)
    complex_ones = [m.name for m, s in zip(members, stepped, strict=True) if s.is_complex()]
    if complex_ones and not rule.complex:
        can = ", ".join(name for name, r in TABLE.items() if r.complex)
        raise ConfigError(f"{config.name} is not defined for complex parameters, as {complex_ones[0]} is",
                          where="optimizer.name", hint=f"these are: {can}")  # fmt: skip
    arguments: dict[str, Any] = {"lr": config.scaled_lr}
    for name in _OWN_FIELDS:
        if (value := getattr(config, name)) is not None:
            arguments[rule.fields[name]] = value
    decay = config.weight_decay
    groups = []
    for wanted in (True, False):
        params = [s for m, s in zip(members, stepped, strict=True) if m.decay is wanted]
        if params:
            group: dict[str, Any] = {"params": params}
            if not wanted:
                group["weight_decay"] = 0.0
            elif decay is not None:
                group["weight_decay"] = decay
            groups.append(group)
    # torch's fused SGD fails on a momentum that begins later: of a layer left out so far, of a parameter that joins.
    fused = rule.fused and not config.momentum
    return rule.make(groups, **arguments, **_fast_path(stepped, fused=fused, foreach=rule.foreach))


def rule_of(config: OptimizerConfig) -> Rule:
    """The table's row for this configuration.

    Raises:
        ConfigError: as `build`.
    """
    if config.name == "custom":
        raise ConfigError(
            "custom needs the optimizer itself",
            where="optimizer.name",
            hint="ModelOptimizer(model, config, optimizer=…) with step() and zero_grad()",
        )
    rule = TABLE[config.name]
    for name in _OWN_FIELDS:
        if getattr(config, name) is not None and name not in rule.fields:
            takes = ", ".join(("lr", "weight_decay", *rule.fields))
            raise ConfigError(f"{config.name} has no {name}; it takes {takes}", where=f"optimizer.{name}")
    return rule


def check_custom(optimizer: Any) -> None:
    """Refuses an object that cannot step, or not by itself.

    Raises:
        ConfigError: names the method that is missing, or the argument that nobody can give.
    """
    for method in ("step", "zero_grad"):
        if not callable(getattr(optimizer, method, None)):
            raise ConfigError(
                f"{type(optimizer).__name__} has no {method}()",
                where="optimizer",
                hint="any object with step() and zero_grad() will do",
            )
    if needed := _needed(optimizer.step):
        raise ConfigError(
            f"{type(optimizer).__name__}.step() needs {needed}, and gradients are given to it, not computed by it",
            where="optimizer",
            hint="use an optimizer whose step() takes nothing",
        )


def _needed(call: Any) -> str:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # not written in Python: it doesn't say
        return ""
    return next((p.name for p in parameters
                 if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)), "")  # fmt: skip


def _fast_path(params: Sequence[nn.Parameter], *, fused: bool, foreach: bool) -> dict[str, Any]:
    plain = all(type(p) is nn.Parameter and p.is_floating_point() for p in params)
    devices = {p.device.type for p in params}
    if fused and plain and devices <= {"cpu", "cuda"} and len(devices) == 1:
        return {"fused": True}
    return {"foreach": True} if foreach and plain else {}
