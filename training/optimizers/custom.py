"""Optimizers that are not from the table: what they need, which parameters they hold, and how they are copied."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import OptimizerConfig
from layerline.training.model.state_tree import is_compound, pack, unpack
from layerline.training.optimizers.strides import inner


def check(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuses an object without the needed methods, or one that steps tensors which are not the model's."""
    for method in ("step", "zero_grad"):
        if not callable(getattr(optimizer, method, None)):
            hint = "any object with step() and zero_grad() will do"
            raise ConfigError(f"{type(optimizer).__name__} has no {method}()", where="optimizer", hint=hint)
    required = [name for name in _required(_step_method(optimizer)) if name != "closure"]
    if required:
        what = f"{type(optimizer).__name__}.step() needs {', '.join(required)}, which ModelOptimizer does not pass"
        raise ConfigError(what, where="optimizer", hint="use an optimizer whose step() takes nothing, or a closure")
    check_held(optimizer, params)


def _step_method(optimizer: Any) -> Any:
    """step() with its original signature: torch's schedulers replace the method on the instance, not on the class."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return optimizer.step
    return step.__get__(optimizer)


def needs_closure(optimizer: Any) -> bool:
    """Whether step() requires a closure, as that of LBFGS does."""
    return "closure" in _required(_step_method(optimizer))


def check_held(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuses an optimizer with a parameter that is not the model's."""
    # Its gradient would not be unscaled or clipped, and its value not be saved.
    model_params = set(map(id, params))
    for index, param in enumerate(_params_of(optimizer)):
        if param.requires_grad and id(param) not in model_params:
            what = f"parameter {index} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, is not the model's"
            hint = "register it in the model first (also a loss's own parameter), then call join() if training runs"
            raise ConfigError(what, where="optimizer", hint=hint)


def idle(optimizer: Any, names: Sequence[str], params: Sequence[nn.Parameter]) -> list[str]:
    """Parameters that a custom optimizer leaves out; none where it has no parameter groups."""
    stepped = set(map(id, _params_of(optimizer)))
    # An object without groups does not say what it steps.
    if not stepped:
        return []
    return [n for n, p in zip(names, params, strict=True) if id(p) not in stepped]


def own_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups of any optimizer; none where it has no `param_groups`."""
    return [g for g in getattr(optimizer, "param_groups", ()) if isinstance(g, dict) and "params" in g]


def check_unread(config: OptimizerConfig, optimizer: Any) -> None:
    """Refuses fields that a custom optimizer does not read. A rate is read where its groups have none."""
    read: set[str] = set()
    if config.name == "custom":
        read.add("name")
    if not any("lr" in g for g in own_groups(optimizer)):
        read |= {"lr", "lr_range"}
    for field in sorted(config.model_fields_set - read, key=list(type(config).model_fields).index):
        what = f"{type(optimizer).__name__} is given, and does not read {field}: {getattr(config, field)!r}"
        hint = "leave it out, or leave optimizer= out; `name: custom` says that the optimizer is given"
        raise ConfigError(what, where=f"optimizer.{field}", hint=hint)


def copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy with all attributes; torch's own __deepcopy__ of an optimizer copies only state and groups."""
    parts = inner(optimizer)
    for part in parts:
        memo[id(part)] = object.__new__(type(part))
        for value in tree_leaves(list(part.state.values())):
            if is_compound(value):  # torch's deep copy of a tensor needs operators that such classes often lack
                tensors: dict[str, Tensor] = {}
                node = pack(value, "state", tensors)
                copies = {name: tensor.clone() for name, tensor in tensors.items()}
                memo[id(value)] = unpack(node, "state", copies)
    for part in parts:
        attributes = dict(vars(part))
        for name, value in vars(part).items():
            # A closure on the instance holds the original, as a scheduler's wrapper of step() does.
            if isinstance(value, FunctionType) and value.__closure__:
                del attributes[name]
        vars(memo[id(part)]).update(copy.deepcopy(attributes, memo))
    if parts and parts[-1] is optimizer:
        return memo[id(optimizer)]
    return copy.deepcopy(optimizer, memo)


def classes(optimizer: Any) -> dict[str, type]:
    """Classes of plain objects that may be read as optimizer state: those that the optimizer's own package defines."""
    # A checkpoint must not create objects of other classes: it could name one whose `__del__` does harm.
    base_modules: set[str] = set()
    for part in (*inner(optimizer), optimizer):
        for cls in type(part).__mro__:
            if _package(cls.__module__) not in ("builtins", "torch"):
                base_modules.add(cls.__module__)
    packages = set(map(_package, base_modules))
    modules = set(base_modules)
    # A function that these modules import may create objects of the module that defines it.
    for name in base_modules:
        for value in vars(sys.modules[name]).values():
            modules.add(str(getattr(value, "__module__", name)))
    special = {"__del__", "__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__"}
    allowed = {}
    for name in modules & sys.modules.keys():
        for value in vars(sys.modules[name]).values():
            if not isinstance(value, type) or _package(value.__module__) not in packages:
                continue
            if not any(special & vars(base).keys() for base in value.__mro__[:-1]):
                allowed[f"{value.__module__}:{value.__qualname__}"] = value
    return allowed


def _package(module: str) -> str:
    return module.partition(".")[0]


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
    # *args and **kwargs need nothing.
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]
