"""What a module keeps between calls, outside of its buffers: a graph keeps nothing, so it must not matter."""

from __future__ import annotations

import copy
import inspect
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.compare.tensor_distance import diff_arrays
from layerline.graph.io.module_identity import source
from layerline.pipeline.errors import brief
from layerline.pipeline.report import Gate

if TYPE_CHECKING:
    from layerline.backends.base import Array
    from layerline.export.example_call import Call
    from layerline.export.probe import Probe

LIMIT = 1e-4
"""Greatest relative L2 distance of a later call from a first one: kernels may round otherwise, no more."""
# What every module has, and what naming collected arguments puts there.
_OWN = frozenset({*vars(nn.Module()), "forward"})


def untouched(module: nn.Module) -> nn.Module | str:
    """A copy with attributes of its own, on the same parameters and buffers; or why there can be none."""
    shared = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(t): t for t in shared}
    # Torch copies no tensor that was computed with gradients (what weight_norm leaves in its module).
    plain = [t for m in module.modules() for t in pytree.tree_leaves(dict(vars(m))) if isinstance(t, Tensor)]
    memo |= {id(t): t.detach().clone() for t in plain if id(t) not in memo}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # noqa: BLE001 - what a user's module is made of, and how that is copied, is theirs
        return f"{type(error).__name__}: {error}"


def changed(before: nn.Module, after: nn.Module) -> dict[str, nn.Module]:
    """Attributes that differ, by path (`encoder.cache`), with the module that holds each."""
    old, found = dict(before.named_modules()), dict[str, nn.Module]()
    for path, module in after.named_modules():
        if path not in old:
            found[path] = module
            continue
        was, now = _attributes(old[path]), _attributes(module)
        differ = [n for n in {**was, **now} if n not in was or n not in now or not _same(was[n], now[n], set())]
        found |= {f"{path}.{n}".lstrip("."): module for n in differ}
    return found


def gate(call: Call, probes: Sequence[Probe], root: Path) -> tuple[list[Gate], list[str]]:
    """Whether a later call gives what a first one does, and notes; nothing where no attribute changes.

    Args:
        root: the project's folder, for source lines.
    """
    if call.unwatched:
        return [], [f"whether forward() keeps state between calls is not known: copying the module, {call.unwatched}"]
    keeps = call.changes()
    if not keeps:
        return [], []
    told = ", ".join(f"{name!r} ({_where(name, owner, root)})" for name, owner in keeps.items())
    later, off = call.warm(), ""
    for probe in probes:
        off = off or _apart(call, later, probe)
    if not off:
        return [], [f"forward() changes the attribute {told}; on every probe a later call gives what a first one does"]
    hint = "keep no state: compute it from the inputs on every call, in __init__, or make it an input and an output"
    seen = f"forward() changes the attribute {told}, and {off}"
    return [Gate("module keeps no state", False, seen, "a later call gives what a first one does", hint)], []


def _apart(call: Call, later: nn.Module, probe: Probe) -> str:
    """What is different in a later call, in words; empty where nothing is."""
    first, again = _seeded(call, None, probe), _seeded(call, later, probe)
    if isinstance(first, str):
        return ""
    if isinstance(again, str):
        return f"a later call raises {again} ({probe.label})"
    off = {n: diff_arrays(first[n], a) for n, a in again.items()}
    worst = max(off, key=lambda n: (bool(off[n].mismatch or off[n].one_sided), off[n].rel_l2))
    d = off[worst]
    if not (d.mismatch or d.one_sided or d.rel_l2 > LIMIT):
        return ""
    return f"{worst} differs in a later call ({probe.label}): {d.mismatch or f'relative L2 {d.rel_l2:.1e}'}"


def _seeded(call: Call, module: nn.Module | None, probe: Probe) -> Mapping[str, Array] | str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return call.run(probe.feed, module)
        except Exception as error:  # noqa: BLE001 - the user's module, on a state that it may not fit
            return brief(error)


def _attributes(module: nn.Module) -> dict[str, Any]:
    held = {**module._parameters, **module._buffers}
    return {n: v for n, v in vars(module).items() if n not in _OWN} | held


def _same(a: Any, b: Any, known: set[tuple[int, int]]) -> bool:
    """Structural equality; what can't be compared counts as equal, and so do functions and modules."""
    if a is b or (id(a), id(b)) in known or isinstance(a, nn.Module) or callable(a):
        return True
    known.add((id(a), id(b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[k], b[k], known) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_same(x, y, known) for x, y in zip(a, b, strict=True))
    if getattr(type(a), "__eq__", None) is object.__eq__:
        return _same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), known)
    return bool(a == b)


def _where(name: str, owner: nn.Module, root: Path) -> str:
    """The module that holds an attribute, and the line of its class that sets it, where one is seen to."""
    path, _, last = name.rpartition(".")
    module = f"module {path}" if path else "model"
    try:
        lines, first = inspect.getsourcelines(type(owner).forward)
        file = inspect.getsourcefile(type(owner)) or ""
    except (OSError, TypeError):
        return module
    sets = re.compile(rf"\.{re.escape(last)}\b(\[.*\])?\s*([-+*/|&@]?=(?!=)|\.\w+\()")
    at = next((first + i for i, line in enumerate(lines) if sets.search(line)), None)
    return f"{module}, {source([(file, at)], root)}" if at is not None else module
