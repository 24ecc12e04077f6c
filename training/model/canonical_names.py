"""Canonical names: a parameter has one name, however the model is wrapped and whatever it is tied to."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from layerline.pipeline.errors import ConfigError, StageError, TaskError
from layerline.training.model.split_tensors import like, local
from layerline.training.model.tensor_forms import overlap

# Wrapper class -> the attribute that holds the user's module. Wrappers are recognised by class, not by attribute, so
# that a user's submodule called `module` keeps its name.
WRAPPERS: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "_FabricModule": "_forward_module",
}
# Packages whose classes of these names are wrappers. A user's class may have the same name.
_WRAPPING = ("torch.", "lightning.", "lightning_fabric.")
_SEGMENTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_forward_module.")


@dataclass(frozen=True)
class NamedTensors:
    """A model's tensors, each once, in registration order."""

    params: dict[str, nn.Parameter]  # parameters by canonical name
    buffers: dict[str, Tensor]  # persistent buffers by canonical name
    aliases: dict[str, str]  # further names of tied tensors -> their canonical name
    owners: dict[str, nn.Module]  # the module that holds each tensor, by canonical and further names

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}


class Slots:
    """The places of buffers in a model. A forward pass may put new tensors there."""

    def __init__(self, model: NamedTensors, names: Iterable[str]) -> None:
        self.names = list(names)
        self._places = [(model.owners[n]._buffers, n.rpartition(".")[2]) for n in self.names]

    def now(self) -> list[Tensor]:
        """The present tensors, in the order of `names`."""
        return [buffers[key] for buffers, key in self._places]  # type: ignore[misc]  # named() leaves out None


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside any number of wrappers (compile, DDP, activation checkpointing)."""
    while True:
        inner = _inner(module)
        if inner is None:
            return module
        module = inner


def modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its canonical paths; wrappers do not appear."""
    model = unwrap(model)
    yield prefix, model
    for name, child in model._modules.items():  # named_children() gives a module that has two names here once
        if child is not None:
            yield from modules(child, f"{prefix}.{name}".lstrip("."))


def first_paths(model: nn.Module) -> dict[nn.Module, str]:
    """Every module with the first of its canonical paths."""
    paths: dict[nn.Module, str] = {}
    for path, module in modules(model):
        paths.setdefault(module, path)
    return paths


def named(model: nn.Module) -> NamedTensors:
    """Names of a model's tensors. Two names are tied when they hold the same Parameter, or two with the same memory,
    shape and strides."""
    out = NamedTensors({}, {}, {}, {})
    first_names: dict[tuple[object, ...], str] = {}
    for path, module in modules(model):
        kinds: tuple[tuple[Any, Any], ...] = ((module._parameters, out.params), (module._buffers, out.buffers))
        for held, into in kinds:
            for key, tensor in held.items():
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                name = f"{path}.{key}".lstrip(".")
                if is_lazy(tensor):
                    raise TaskError(f"parameter {name} is not initialised: it has no shape yet",
                                    where=f"model: {name}",
                                    hint="run the model once on an example in model()")  # fmt: skip
                out.owners[name] = module
                first_name = first_names.setdefault(_identity(tensor), name)
                if first_name == name:
                    into[name] = tensor
                else:
                    out.aliases[name] = first_name
    return out


def check_apart(models: Mapping[str, nn.Module]) -> None:
    """Refuses models that share a trained parameter: its gradients would mix, and two optimizers would step it."""
    trained_by: dict[tuple[object, ...], str] = {}
    for model_name, module in models.items():
        for name, param in named(module).params.items():
            full_name = f"{model_name}.{name}"
            if param.requires_grad and trained_by.setdefault(_identity(param), full_name) != full_name:
                other = trained_by[_identity(param)]
                raise ConfigError(f"two models train this parameter: {other} and {full_name}", where=name,
                                  hint="keep it in one of them, or freeze it (requires_grad_(False))")  # fmt: skip


def check_copy(model: NamedTensors, copied: nn.Module) -> None:
    """Refuses a deep copy that would not train as the model: copy.deepcopy copies each parameter alone and densely."""
    hint = "save_ckpt, and load_ckpt into a model that is built anew"
    copies = named(copied).params
    by_storage: dict[int, list[str]] = {}
    for name, param in model.params.items():
        axes = zip(param.shape, param.stride(), copies[name].stride(), strict=True)
        if any(size > 1 and stride != copied_stride for size, stride, copied_stride in axes):
            what = f"{name} is a slice with gaps in its memory, and copy.deepcopy closes them"
            raise ConfigError(what, where="copy", hint=hint)
        neighbours = by_storage.setdefault(local(param).untyped_storage().data_ptr(), [])
        for other in neighbours:
            if overlap(model.params[other], param) and not overlap(copies[other], copies[name]):
                what = f"{other} and {name} share memory, and copy.deepcopy gives each its own"
                raise ConfigError(what, where="copy", hint=hint)
        neighbours.append(name)


def strip(state: Mapping[str, Tensor], model: NamedTensors) -> dict[str, Tensor]:
    """A state dict saved from a wrapped model, by canonical names. Tied names are merged."""
    names = model.tensors.keys() | model.aliases.keys()
    out: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = bare(key)
        # `module.` is a wrapper's prefix only where the model itself has no such name.
        while name not in names and name.startswith("module."):
            name = name.removeprefix("module.")
        inner = ".".join(part for part in name.split(".") if part != "module")
        if name not in names and inner in names:
            name = inner
        canonical = model.aliases.get(name, name)
        other = out.setdefault(canonical, tensor)
        if other is tensor:
            continue
        if other.shape != tensor.shape or not ((other == tensor) | (other.isnan() & tensor.isnan())).all():
            raise StageError(f"{name} and {canonical} are tied in the model and differ in the file", where=key)
    return out


def bare(key: str) -> str:
    """A key without the names of wrappers. `module.` stays: a user's module may have this name."""
    for segment in _SEGMENTS:
        key = key.replace(segment, "")
    return key


def check(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a state dict and of the model, by canonical name. Buffers in `resized` may differ in shape."""
    names = named(model)
    tensors = strip(state, names)
    target = names.tensors
    resizable = resized(names, tensors)
    wrong = [f"missing {n}" for n in target if n not in tensors]
    wrong += [f"unknown {n}" for n in tensors if n not in target]
    for name, expected in target.items():
        if name in tensors and tensors[name].shape != expected.shape and name not in resizable:
            wrong.append(f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(expected.shape)}")
    if len(wrong) > 8:
        wrong[8:] = [f"and {len(wrong) - 8} more"]
    if wrong:
        hint = "was model() changed since they were saved?"
        raise StageError(f"the weights do not fit the model: {'; '.join(wrong)}", hint=hint)
    return tensors, target


def resized(model: NamedTensors, tensors: Mapping[str, Tensor], *, try_only: bool = True) -> set[str]:
    """Buffers that their module resizes when it loads a tensor of another shape, as load_state_dict() allows."""
    # For example, the scale of a per-channel FakeQuantize is one number until its first forward pass.
    differing: dict[nn.Module, list[str]] = {}
    for name, buffer in model.buffers.items():
        if name in tensors and tensors[name].shape != buffer.shape:
            differing.setdefault(model.owners[name], []).append(name)
    out: set[str] = set()
    for owner, names in differing.items():
        module = copy.deepcopy(owner) if try_only else owner
        state = {}
        for name, holder in model.owners.items():
            if holder is owner and name in tensors:
                state[name.rpartition(".")[2]] = tensors[name].clone()
        errors: list[str] = []
        # Private, but the documented point at which modules override how they load their own tensors.
        module._load_from_state_dict(state, "", {"version": module._version}, False, [], [], errors)
        for name in names:
            if not errors and getattr(module, name.rpartition(".")[2]).shape == tensors[name].shape:
                out.add(name)
    return out


def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies a state dict into the model in place. Wrappers on either side do not matter."""
    tensors, target = check(model, state)
    if any(tensors[n].shape != t.shape for n, t in target.items()):
        resized(named(model), tensors, try_only=False)
        target = named(model).tensors
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(like(tensor, tensors[name]))
    # load_state_dict() would run these hooks. It isn't called, even with {}, since other hooks read the state dict.
    for module in unwrap(model).modules():
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys([], []))


def _inner(module: nn.Module) -> nn.Module | None:
    for cls in type(module).__mro__:
        attribute = WRAPPERS.get(cls.__name__)
        if attribute is not None and cls.__module__.startswith(_WRAPPING):
            inner: nn.Module | None = module._modules.get(attribute)
            return inner
    return None


def _identity(tensor: Tensor) -> tuple[object, ...]:
    part = local(tensor)
    if part.numel() == 0 or part.device.type == "meta":
        return (id(tensor),)
    return part.device, part.data_ptr(), tuple(part.shape), part.stride(), part.dtype
