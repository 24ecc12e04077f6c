"""Every optimizer by name in one explicit table: which class, which fast path it has."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import RULE_FIELDS, OptimizerConfig
from layerline.training.optimizers import group_rules
from layerline.training.optimizers.foreach import Lamb, Lion, Sophia
from layerline.training.optimizers.param_groups import Member
from layerline.training.optimizers.strides import fusible, inner
from layerline.training.state.state_tree import is_compound, pack, unpack


class Steps(Protocol):
    """All that is asked of an optimizer the user brings."""

    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


@dataclass(frozen=True)
class Rule:
    """One optimizer.

    Attributes:
        make: the class; called with parameter groups and keyword arguments.
        fused: torch has a fused kernel for it.
        foreach: it takes foreach=True.
        states: tensors of a parameter's size that it keeps for each one.
        complex: it takes complex parameters.
    """

    make: type[torch.optim.Optimizer]
    fused: bool = False
    foreach: bool = True
    states: int = 2
    complex: bool = False


TABLE: Mapping[str, Rule] = {
    "sgd": Rule(torch.optim.SGD, fused=True, states=1, complex=True),
    "rmsprop": Rule(torch.optim.RMSprop, states=1, complex=True),
    "adam": Rule(torch.optim.Adam, fused=True, complex=True),
    "adamw": Rule(torch.optim.AdamW, fused=True, complex=True),
    "adafactor": Rule(torch.optim.Adafactor, states=0),
    "lamb": Rule(Lamb, foreach=False),
    "lion": Rule(Lion, foreach=False, states=1),
    "sophia": Rule(Sophia, foreach=False),
}


def build(config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over a group for each rate and weight decay; `stepped` are the members' parameters or masters.

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
    arguments |= {name: value for name in RULE_FIELDS if (value := getattr(config, name)) is not None}
    groups = group_rules.grouped(config, members, stepped)
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
    if name := config.ignored:
        raise ConfigError(f"{config.name} has no {name}; it takes {config.takes}", where=f"optimizer.{name}")
    return TABLE[config.name]


def check_custom(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuses an object that cannot step, or not by itself, or that steps what is not the model's.

    Raises:
        ConfigError: names the method that is missing, or the argument that nobody can give; else as `check_held`.
    """
    for method in ("step", "zero_grad"):
        if not callable(getattr(optimizer, method, None)):
            raise ConfigError(
                f"{type(optimizer).__name__} has no {method}()",
                where="optimizer",
                hint="any object with step() and zero_grad() will do",
            )
    # torch's schedulers replace the method on the instance: the class has the true signature.
    step = getattr(type(optimizer), "step", None)
    needed = [n for n in _needed(optimizer.step if step is None else step.__get__(optimizer)) if n != "closure"]
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__}.step() needs {', '.join(needed)}, which nobody can give it",
            where="optimizer",
            hint="use an optimizer whose step() takes nothing, or a closure",
        )
    check_held(optimizer, params)


def needs_closure(optimizer: Any) -> bool:
    """Whether step() can't be called without a closure, as that of LBFGS."""
    step = getattr(type(optimizer), "step", None)
    return "closure" in _needed(optimizer.step if step is None else step.__get__(optimizer))


def check_held(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuses an optimizer with a parameter whose gradient nobody would divide, unscale, clip and save.

    Raises:
        ConfigError: names its place and shape.
    """
    known = {id(p) for p in params}
    for index, held in enumerate(_held(optimizer)):
        if held.requires_grad and id(held) not in known:
            raise ConfigError(
                f"parameter {index} of {type(optimizer).__name__}, of shape {tuple(held.shape)}, is not the model's",
                where="optimizer",
                hint="make it a part of the model first (a loss's own too); what is one by now joins by join()",
            )


def idle(optimizer: Any, names: Sequence[str], params: Sequence[nn.Parameter]) -> list[str]:
    """Parameters that a custom optimizer leaves out; none where it does not say what it holds."""
    held = {id(p) for p in _held(optimizer)}
    return [n for n, p in zip(names, params, strict=True) if id(p) not in held] if held else []


def own_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of any optimizer; none where it does not keep any."""
    return [g for g in getattr(optimizer, "param_groups", ()) if isinstance(g, dict) and "params" in g]


def check_unread(config: OptimizerConfig, optimizer: Any) -> None:
    """Refuses fields beside a custom optimizer, which has its own values; a rate is read where its groups have none.

    Raises:
        ConfigError: names the field.
    """
    read = {"name"} if config.name == "custom" else set()
    if not any("lr" in g for g in own_groups(optimizer)):
        read |= {"lr", "lr_scaling", "batch_size", "base_batch_size", "lr_range"}
    for field in sorted(config.model_fields_set - read, key=list(type(config).model_fields).index):
        raise ConfigError(
            f"{type(optimizer).__name__} is given, and does not read {field}: {getattr(config, field)!r}",
            where=f"optimizer.{field}",
            hint="leave it out, or leave optimizer= out; `name: custom` says that the optimizer is given",
        )


def copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, also of what torch's own copy of an optimizer drops: all but its state and groups.

    A function of the instance is left out where it holds on to the original, as a scheduler's wrapper of step() does.
    """
    parts = inner(optimizer)
    for part in parts:
        memo[id(part)] = object.__new__(type(part))
    for held in tree_leaves([list(part.state.values()) for part in parts]):
        if is_compound(held):  # torch's copy of a tensor asks for operators that such classes often lack
            tensors: dict[str, Tensor] = {}
            node = pack(held, "state", tensors)
            memo[id(held)] = unpack(node, "state", {n: t.clone() for n, t in tensors.items()})
    for part in parts:
        kept = {k: v for k, v in vars(part).items() if not (isinstance(v, FunctionType) and v.__closure__)}
        vars(memo[id(part)]).update(copy.deepcopy(kept, memo))
    return memo[id(optimizer)] if parts and parts[-1] is optimizer else copy.deepcopy(optimizer, memo)


def classes(optimizer: Any) -> dict[str, type]:
    """Classes of plain objects that an optimizer may keep in its state: those that its own package defines.

    Others are not made from a file, which could otherwise name any class whose end (`__del__`) does something.
    """
    bases = [cls.__module__ for part in (*inner(optimizer), optimizer) for cls in type(part).__mro__]
    packages = {name.partition(".")[0] for name in bases} - {"builtins", "torch"}
    modules = {name for name in bases if name.partition(".")[0] in packages}
    used = [thing for name in modules for thing in vars(sys.modules[name]).values() if hasattr(thing, "__module__")]
    modules |= {str(thing.__module__) for thing in used}  # a function there may make objects of its own module
    there = [thing for name in modules & sys.modules.keys() for thing in vars(sys.modules[name]).values()]
    own = [c for c in there if isinstance(c, type) and c.__module__.partition(".")[0] in packages and _is_plain(c)]
    return {f"{c.__module__}:{c.__qualname__}": c for c in own}


def _is_plain(cls: type) -> bool:
    special = {"__del__", "__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__"}
    return not any(special & vars(base).keys() for base in cls.__mro__[:-1])


def _held(optimizer: Any) -> list[Tensor]:
    return [p for g in own_groups(optimizer) for p in g["params"] if isinstance(p, Tensor)]


def _needed(call: Any) -> list[str]:
    """The arguments without a default."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # not written in Python: it doesn't say
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _fast_path(params: Sequence[nn.Parameter], *, fused: bool, foreach: bool) -> dict[str, Any]:
    plain = all(type(p) is nn.Parameter and p.is_floating_point() for p in params)
    devices = {p.device.type for p in params}
    if fused and plain and devices <= {"cpu", "cuda"} and len(devices) == 1 and fusible(params):
        return {"fused": True}
    return {"foreach": True} if foreach and plain else {}
