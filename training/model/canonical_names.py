"""Canonical names: a parameter is called the same however the model is wrapped, and a tied one is named once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from layerline.pipeline.errors import ConfigError, StageError, TaskError
from layerline.training.model.split_tensors import like, local

# Wrapper class -> the attribute that holds the user's own module. Matched by class, so that a user's submodule that
# happens to be called `module` keeps its name.
WRAPPERS: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "_FabricModule": "_forward_module",
}
# Packages whose classes of these names are wrappers; a user's own class of the same name is none.
_WRAPPING = ("torch.", "lightning.", "lightning_fabric.")
_SEGMENTS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_forward_module.")


@dataclass(frozen=True)
class Named:
    """A model's own tensors, each once, in registration order.

    Attributes:
        params: parameters by canonical name.
        buffers: persistent buffers by canonical name.
        aliases: further names of tied tensors -> the name they are kept under.
        owners: the module that holds each named tensor, also under its further names.
    """

    params: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    owners: dict[str, nn.Module]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}


class Slots:
    """Buffers of a model as it holds them at the moment: a forward pass may put new tensors in their place.

    Args:
        model: where they are.
        names: which ones.
    """

    def __init__(self, model: Named, names: Iterable[str]) -> None:
        self.names = list(names)
        self._at = [(model.owners[n]._buffers, n.rpartition(".")[2]) for n in self.names]

    def now(self) -> list[Tensor]:
        """The tensors, in the order of `names`."""
        return [held[last] for held, last in self._at]  # type: ignore[misc]  # named() leaves out what is None


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside any number of wrappers (compile, DDP, activation checkpointing)."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module once per path, under canonical paths; wrappers do not appear."""
    model = unwrap(model)
    yield prefix, model
    for name, child in model.named_children():
        yield from modules(child, f"{prefix}.{name}" if prefix else name)


def named(model: nn.Module) -> Named:
    """Names of a model's tensors.

    Two names are tied when they hold the same Parameter, or two that are the same memory, shape and strides.

    Raises:
        TaskError: a lazy module has not run yet, so that a parameter has no shape.
    """
    out = Named({}, {}, {}, {})
    seen: dict[tuple[object, ...], str] = {}
    for path, module in modules(model):
        for last, param in module._parameters.items():
            name = f"{path}.{last}".lstrip(".")
            if param is not None:
                out.owners[name] = module
                if _first(out, seen, name, param):
                    out.params[name] = param
        for last, buffer in module._buffers.items():
            name = f"{path}.{last}".lstrip(".")
            if buffer is not None and last not in module._non_persistent_buffers_set:
                out.owners[name] = module
                if _first(out, seen, name, buffer):
                    out.buffers[name] = buffer
    return out


def check_apart(models: Mapping[str, nn.Module]) -> None:
    """Refuses models that train a parameter together: its gradients would mix, and two optimizers step it.

    Raises:
        ConfigError: names the parameter, in both models.
    """
    seen: dict[tuple[object, ...], str] = {}
    for model, module in models.items():
        mine = {_identity(p): n for n, p in named(module).params.items() if p.requires_grad}
        for key, name in mine.items():
            if key in seen:
                raise ConfigError(f"two models train this parameter: {seen[key]} and {model}.{name}", where=name,
                                  hint="keep it in one of them, or freeze it (requires_grad_(False))")  # fmt: skip
        seen |= {key: f"{model}.{name}" for key, name in mine.items()}


def strip(state: Mapping[str, Tensor], known: Named) -> dict[str, Tensor]:
    """A state dict saved from a wrapped model, under canonical names; tied names fall together.

    Raises:
        StageError: two tied names carry different values.
    """
    names = known.tensors.keys() | known.aliases.keys()
    out: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = _strip_name(key, names)
        kept = known.aliases.get(name, name)
        if kept in out and not _equal(out[kept], tensor):
            raise StageError(f"{name} and {kept} are tied in the model and differ in the file", where=key)
        out[kept] = tensor
    return out


def bare(key: str) -> str:
    """A key without the names of wrappers, which no module of a user's has; `module.` may be one's own, and stays."""
    for segment in _SEGMENTS:
        key = key.replace(segment, "")
    return key


def check(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state dict's tensors and the model's own, both by canonical name. See `resized` for shapes that may differ.

    Raises:
        StageError: names that are missing, unknown or of another shape; all are listed.
    """
    known = named(model)
    given = strip(state, known)
    target = known.tensors
    grown = resized(known, given)
    wrong = [f"missing {n}" for n in target if n not in given]
    wrong += [f"unknown {n}" for n in given if n not in target]
    wrong += [
        f"{n} is {tuple(given[n].shape)}, the model has {tuple(t.shape)}"
        for n, t in target.items()
        if n in given and given[n].shape != t.shape and n not in grown
    ]
    if wrong:
        shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise StageError(
            f"the weights do not fit the model: {shown}", hint="was model() changed since they were saved?"
        )
    return given, target


def resized(known: Named, given: Mapping[str, Tensor], *, try_only: bool = True) -> set[str]:
    """Buffers of another shape that their module's own loading takes, as torch's load_state_dict() lets it.

    The scale of a per-channel FakeQuantize is one number until its first forward pass.

    Args:
        known: the model's tensors.
        given: tensors by canonical name.
        try_only: loads into copies of the modules.
    """
    differing = {n for n, b in known.buffers.items() if n in given and given[n].shape != b.shape}
    owners = {id(known.owners[n]): known.owners[n] for n in differing}
    out: set[str] = set()
    for owner in owners.values():
        module, errors = copy.deepcopy(owner) if try_only else owner, list[str]()
        names = {n.rpartition(".")[2]: n for n, holder in known.owners.items() if holder is owner and n in given}
        state = {last: given[n].clone() for last, n in names.items()}
        module._load_from_state_dict(state, "", {"version": module._version}, False, [], [], errors)
        taken = {n for last, n in names.items() if getattr(module, last).shape == given[n].shape}
        out |= set() if errors else taken & differing
    return out


def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies a state dict into the model in place, whatever wrappers either was saved or is living under.

    Raises:
        StageError: as `check`, before anything is copied.
    """
    given, target = check(model, state)
    if any(given[n].shape != t.shape for n, t in target.items()):
        resized(named(model), given, try_only=False)
        target = named(model).tensors
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(like(tensor, given[name]))
    # Those who want to know are told. An empty load_state_dict() would do, but for hooks that read the state.
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


def _first(out: Named, seen: dict[tuple[object, ...], str], name: str, tensor: Tensor) -> bool:
    if is_lazy(tensor):
        raise TaskError(
            f"parameter {name} is not initialised: its shape is still open",
            where=f"model: {name}",
            hint="run the model once on an example in model()",
        )
    key = _identity(tensor)
    if key in seen:
        out.aliases[name] = seen[key]
        return False
    seen[key] = name
    return True


def _identity(tensor: Tensor) -> tuple[object, ...]:
    part = local(tensor)
    if part.numel() == 0 or part.device.type == "meta":
        return (id(tensor),)
    return part.device, part.data_ptr(), tuple(part.shape), part.stride(), part.dtype


def _strip_name(key: str, names: set[str]) -> str:
    key = bare(key)
    # `module.` is a wrapper's prefix only where the model itself has no such name.
    while key not in names and key.startswith("module."):
        key = key.removeprefix("module.")
    inner = ".".join(part for part in key.split(".") if part != "module")
    return inner if key not in names and inner in names else key


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
