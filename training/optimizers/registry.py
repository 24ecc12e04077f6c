"""The table of optimizers: class, fast paths and size of the state, by name."""

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
from layerline.training.optimizers.several import Several
from layerline.training.optimizers.strides import fusible, inner
from layerline.training.state.state_tree import is_compound, pack, unpack


class Steps(Protocol):
    """The interface that a custom optimizer needs."""

    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


@dataclass(frozen=True)
class Rule:
    """One optimizer.

    Attributes:
        make: the class; called with parameter groups and keyword arguments.
        fused: whether torch has a fused kernel for it.
        foreach: whether it has an argument `foreach`.
        states: number of state tensors per parameter that have the parameter's size.
        complex: whether it supports complex parameters.
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
    "muon": Rule(torch.optim.Muon, foreach=False, states=1),
    "sophia": Rule(Sophia, foreach=False),
}


def build(
    config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[nn.Parameter]
) -> torch.optim.Optimizer | Several:
    """The optimizer, with one group for each combination of rate, weight decay and other fields. Where
    `optimizer.groups` name other update rules, there is one optimizer for each.

    Args:
        stepped: the members' parameters, or their masters.

    Raises:
        ConfigError: `custom` without an optimizer, a field that this optimizer lacks, or parameters that it does not
            support.
    """
    _check_name(config)
    by_rule: dict[str, tuple[list[Member], list[nn.Parameter]]] = {}
    for member, param in zip(members, stepped, strict=True):
        its_members, its_params = by_rule.setdefault(group_rules.rule_name(config, member), ([], []))
        its_members.append(member)
        its_params.append(param)
    if list(by_rule) == [config.name]:
        return _build_rule(config.name, config, members, stepped)
    # The configured rule comes first: its rate is the one that is shown.
    names = sorted(by_rule, key=lambda name: name != config.name)
    return Several({name: _build_rule(name, config, *by_rule[name]) for name in names})


def _build_rule(
    name: str, config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    rule = TABLE[name]
    for member, param in zip(members, stepped, strict=True):
        if param.is_complex() and not rule.complex:
            supporting = [other for other, r in TABLE.items() if r.complex]
            raise ConfigError(f"{name} does not support complex parameters such as {member.name}",
                              where="optimizer.name", hint=f"these do: {', '.join(supporting)}")  # fmt: skip
        if name == "muon" and param.ndim != 2:
            raise ConfigError(f"muon steps matrices alone, and {member.name} has the shape {tuple(param.shape)}",
                              where="optimizer.name",
                              hint="name: adamw, with groups: [{match: '*', name: muon}] for the matrices")  # fmt: skip
    arguments: dict[str, Any] = {"lr": config.scaled_lr}
    if name == config.name:
        fields = [field for field in RULE_FIELDS if getattr(config, field) is not None]
        arguments |= {field: getattr(config, field) for field in fields}
    groups = group_rules.grouped(config, members, stepped)
    # torch's fused SGD fails where a parameter's momentum begins later than that of others in its group.
    momentum = arguments.get("momentum") or any(group.get("momentum") for group in groups)
    fused = rule.fused and not momentum
    return rule.make(groups, **arguments, **_fast_path(stepped, fused=fused, foreach=rule.foreach))


def part_for(optimizer: Any, config: OptimizerConfig, member: Member) -> Any:
    """The optimizer that a parameter joins.

    Raises:
        ConfigError: no parameter has had this update rule so far.
    """
    name = group_rules.rule_name(config, member)
    parts: dict[str, Any] = {config.name: optimizer}
    if isinstance(optimizer, Several):
        parts = dict(optimizer.parts)
    if name not in parts:
        raise ConfigError(f"it would be the first parameter of {name}, and joins too late for that", where=member.name,
                          hint="make ModelOptimizer after changing the model")  # fmt: skip
    return parts[name]


def _check_name(config: OptimizerConfig) -> None:
    """Checks that the table has this optimizer, with these fields.

    Raises:
        ConfigError: as `build`.
    """
    if config.name == "custom":
        raise ConfigError(
            "custom needs the optimizer itself",
            where="optimizer.name",
            hint="ModelOptimizer(model, config, optimizer=…) with step() and zero_grad()",
        )
    name = config.ignored
    if name:
        raise ConfigError(f"{config.name} has no {name}; it takes {config.takes}", where=f"optimizer.{name}")


def check_custom(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuses an object without the needed methods, or one that steps tensors which are not the model's.

    Raises:
        ConfigError: a method is missing, or step() has an argument without a default; also as `check_held`.
    """
    for method in ("step", "zero_grad"):
        if not callable(getattr(optimizer, method, None)):
            raise ConfigError(
                f"{type(optimizer).__name__} has no {method}()",
                where="optimizer",
                hint="any object with step() and zero_grad() will do",
            )
    required = [name for name in _required(_step_method(optimizer)) if name != "closure"]
    if required:
        raise ConfigError(
            f"{type(optimizer).__name__}.step() needs {', '.join(required)}, which ModelOptimizer does not pass",
            where="optimizer",
            hint="use an optimizer whose step() takes nothing, or a closure",
        )
    check_held(optimizer, params)


def _step_method(optimizer: Any) -> Any:
    """step() with its original signature: torch's schedulers replace the method on the instance, not on the class."""
    step = getattr(type(optimizer), "step", None)
    return optimizer.step if step is None else step.__get__(optimizer)


def needs_closure(optimizer: Any) -> bool:
    """Whether step() requires a closure, as that of LBFGS does."""
    return "closure" in _required(_step_method(optimizer))


def check_held(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuses an optimizer with a parameter that is not the model's: its gradient would not be unscaled or clipped, and
    its value not be saved.

    Raises:
        ConfigError: names its place and shape.
    """
    model_params = {id(p) for p in params}
    for index, param in enumerate(_params_of(optimizer)):
        if param.requires_grad and id(param) not in model_params:
            raise ConfigError(
                f"parameter {index} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, is not the model's",
                where="optimizer",
                hint="register it in the model first (also a loss's own parameter), then call join() if training runs",
            )


def idle(optimizer: Any, names: Sequence[str], params: Sequence[nn.Parameter]) -> list[str]:
    """Parameters that a custom optimizer leaves out; none where it has no parameter groups."""
    stepped = {id(p) for p in _params_of(optimizer)}
    if not stepped:
        return []
    return [n for n, p in zip(names, params, strict=True) if id(p) not in stepped]


def own_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of any optimizer; none where it has no `param_groups`."""
    return [g for g in getattr(optimizer, "param_groups", ()) if isinstance(g, dict) and "params" in g]


def check_unread(config: OptimizerConfig, optimizer: Any) -> None:
    """Refuses fields that a custom optimizer does not read. A rate is read where its groups have none.

    Raises:
        ConfigError: names the field.
    """
    read: set[str] = set()
    if config.name == "custom":
        read.add("name")
    if not any("lr" in g for g in own_groups(optimizer)):
        read |= {"lr", "lr_scaling", "batch_size", "base_batch_size", "lr_range"}
    for field in sorted(config.model_fields_set - read, key=list(type(config).model_fields).index):
        raise ConfigError(
            f"{type(optimizer).__name__} is given, and does not read {field}: {getattr(config, field)!r}",
            where=f"optimizer.{field}",
            hint="leave it out, or leave optimizer= out; `name: custom` says that the optimizer is given",
        )


def copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy with all attributes; torch's own __deepcopy__ of an optimizer copies only state and groups.

    A closure on the instance is left out: it holds the original, as a scheduler's wrapper of step() does.
    """
    parts = inner(optimizer)
    for part in parts:
        memo[id(part)] = object.__new__(type(part))
    for value in tree_leaves([list(part.state.values()) for part in parts]):
        if is_compound(value):  # torch's deep copy of a tensor needs operators that such classes often lack
            tensors: dict[str, Tensor] = {}
            node = pack(value, "state", tensors)
            memo[id(value)] = unpack(node, "state", {n: t.clone() for n, t in tensors.items()})
    for part in parts:
        attributes = {name: value for name, value in vars(part).items() if not _is_closure(value)}
        vars(memo[id(part)]).update(copy.deepcopy(attributes, memo))
    if parts and parts[-1] is optimizer:
        return memo[id(optimizer)]
    return copy.deepcopy(optimizer, memo)


def _is_closure(value: Any) -> bool:
    return isinstance(value, FunctionType) and bool(value.__closure__)


def classes(optimizer: Any) -> dict[str, type]:
    """Classes of plain objects that may be read as optimizer state: those that the optimizer's own package defines.

    A checkpoint must not create objects of other classes: it could name one whose `__del__` does harm.
    """
    base_modules: set[str] = set()
    for part in (*inner(optimizer), optimizer):
        base_modules |= {cls.__module__ for cls in type(part).__mro__}
    packages = {_package(name) for name in base_modules} - {"builtins", "torch"}
    modules = {name for name in base_modules if _package(name) in packages}
    # A function that these modules import may create objects of the module that defines it.
    for name in sorted(modules):
        modules |= {str(x.__module__) for x in vars(sys.modules[name]).values() if hasattr(x, "__module__")}
    allowed = {}
    for name in modules & sys.modules.keys():
        for value in vars(sys.modules[name]).values():
            if isinstance(value, type) and _package(value.__module__) in packages and _is_plain(value):
                allowed[f"{value.__module__}:{value.__qualname__}"] = value
    return allowed


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_plain(cls: type) -> bool:
    special = {"__del__", "__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__"}
    return not any(special & vars(base).keys() for base in cls.__mro__[:-1])


def _params_of(optimizer: Any) -> list[Tensor]:
    params: list[Tensor] = []
    for group in own_groups(optimizer):
        params += [p for p in group["params"] if isinstance(p, Tensor)]
    return params


def _required(call: Any) -> list[str]:
    """The arguments without a default."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # not written in Python, without a signature
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _fast_path(params: Sequence[nn.Parameter], *, fused: bool, foreach: bool) -> dict[str, Any]:
    plain = all(type(p) is nn.Parameter and p.is_floating_point() for p in params)
    devices = {p.device.type for p in params}
    if fused and plain and devices <= {"cpu", "cuda"} and len(devices) == 1 and fusible(params):
        return {"fused": True}
    if foreach and plain:
        return {"foreach": True}
    return {}
