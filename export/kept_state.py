"""Finds the attributes that forward() changes. An ONNX graph keeps no state, so such a module needs a closer look."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Attributes that every module has, and `forward`, which naming **kwargs replaces.
_COMMON = frozenset({*vars(nn.Module()), "forward"})


def untouched(module: nn.Module) -> nn.Module | str:
    """Copies a module: attributes are its own, parameters and buffers are shared. Returns the reason if that fails."""
    # deepcopy takes what stands in the memo instead of copying it.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for inner in module.modules():
        for leaf in pytree.tree_leaves(dict(vars(inner))):
            # deepcopy refuses tensors computed with gradients, such as those weight_norm leaves in its module.
            if isinstance(leaf, Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = leaf.detach().clone()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # noqa: BLE001 - copying runs the user's own __deepcopy__ and __reduce__
        return f"{type(error).__name__}: {error}"


def changed(before: nn.Module, after: nn.Module) -> dict[str, nn.Module]:
    """Attributes that differ between two copies, by path (`encoder.cache`), each with the module that holds it."""
    old_modules = dict(before.named_modules())
    owners: dict[str, nn.Module] = {}
    for path, module in after.named_modules():
        if path not in old_modules:
            owners[path] = module
            continue
        old = _attributes(old_modules[path])
        new = _attributes(module)
        for name in {**old, **new}:
            if name not in old or name not in new or not _same(old[name], new[name], set()):
                owners[f"{path}.{name}".lstrip(".")] = module
    return owners


def _attributes(module: nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(module).items() if name not in _COMMON}
    return plain | dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _same(a: Any, b: Any, visited: set[tuple[int, int]]) -> bool:
    """Compares by structure. Functions, modules and values without a comparison count as equal."""
    if a is b or isinstance(a, nn.Module) or callable(a):
        return True
    # A pair under comparison further up: the structure contains itself.
    if (id(a), id(b)) in visited:
        return True
    visited.add((id(a), id(b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        # A NaN equals a NaN.
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[key], b[key], visited) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_same(x, y, visited) for x, y in zip(a, b, strict=True))
    if getattr(type(a), "__eq__", None) is object.__eq__:
        return _same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), visited)
    return bool(a == b)
