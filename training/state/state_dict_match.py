"""Finds the state dict that fits a model in a checkpoint file of any trainer. Trainers nest state dicts under keys,
prefix names with those of wrappers, and store averages beside the weights or alone. A state dict fits when, without
wrappers and prefix, it has every tensor of the model at its shape."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import StageError
from layerline.pipeline.outline import dtype_name
from layerline.training.model import canonical_names
from layerline.training.model.canonical_names import NamedTensors
from layerline.training.model.tensor_forms import check_dense

_AVERAGES = frozenset({"ema", "averaged", "average", "avg", "shadow", "swa"})
# Entries that trainers store among the weights and no model has: counters of averages, of operations, extra states.
_NO_WEIGHTS = ("n_averaged", "*total_ops", "*total_params", "*_extra_state")
_SHOWN = 8
# No trainer nests this deep. The bound ends the search before Python's recursion limit does.
_DEEPEST = 100


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """One state dict of a file."""

    path: str  # its place in the file, keys joined by dots; ends with a dot where it is a prefix that names share
    ema: bool  # whether the file calls the tensors averages
    tensors: Mapping[str, Tensor]  # by name, without that prefix; `[0]`, `[1]`, … for a list of tensors
    is_list: bool = False  # some trainers store averages of parameters in this form
    prefix: str = ""  # put before the names where the file lacks the name of the one module that holds the whole model

    @property
    def where(self) -> str:
        return self.path.rstrip(".") or "the whole file"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of comparing a state dict with the model."""

    state: LoadedState
    tensors: Mapping[str, Tensor]  # tensors that fit, by canonical name
    missing: tuple[str, ...] = ()  # names that only the model has
    wrong: tuple[str, ...] = ()  # one message for each unknown name and each shape or type that differs
    extra: tuple[str, ...] = ()  # names that only the file has
    notes: tuple[str, ...] = ()  # one message for each kind of tensor that was left out or filled in

    @property
    def complete(self) -> bool:
        return not self.missing and not self.wrong


def check(fit: Fit, model: NamedTensors) -> None:
    """Refuses weights that are not finite, in the file or in the model's types. A buffer may hold Inf, as masks do."""
    for name, target in model.tensors.items():
        tensor = fit.tensors[name]
        if tensor.is_floating_point() and tensor.itemsize == 1:
            tensor = tensor.float()  # torch has no isfinite for float8
        wrong = tensor.isnan()
        if name in model.params:
            wrong = ~tensor.isfinite()
        expected = "a finite number"
        if not wrong.any():
            wrong = tensor.isfinite() & ~tensor.to(target.dtype).isfinite()
            expected = f"a number that {dtype_name(target)} can hold"
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            what = f"{name}{list(index) or ''} is {tensor[index].item()}, expected {expected}"
            what += f"; {int(wrong.sum())} of {wrong.numel()} elements are wrong in this way"
            raise StageError(what, where=fit.state.where, hint="use a checkpoint from before the training diverged")


def states(tree: Any) -> list[LoadedState]:
    """Every state dict in the content of a file, outer ones first: each container with the tensors below it, by the
    keys to them joined by dots."""
    by_place: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    lists: list[LoadedState] = []
    for place, leaf in _leaves(tree, (), ()):
        if not isinstance(leaf, Tensor):
            path = _joined(place)
            by_position = {f"[{index}]": tensor for index, tensor in enumerate(leaf)}
            lists.append(LoadedState(path=path, ema=_averaged(path), tensors=by_position, is_list=True))
            continue
        depth = len(place)
        while depth and isinstance(place[depth - 1], str):  # a name consists of text alone
            depth -= 1
        for start in range(depth, len(place)):
            by_place.setdefault(place[:start], {})[".".join(place[start:])] = leaf
    out: list[LoadedState] = []
    for place, tensors in by_place.items():
        path = _joined(place)
        out.append(LoadedState(path=path, ema=_averaged(path) or "n_averaged" in tensors, tensors=tensors))
    return out + lists


def _leaves(
    node: Any, place: tuple[Any, ...], around: tuple[int, ...]
) -> Iterator[tuple[tuple[Any, ...], Tensor | tuple[Tensor, ...]]]:
    """Every tensor and every list of tensors with the keys to it. A container that holds itself is visited once."""
    if len(around) > _DEEPEST:
        raise StageError(f"nested more than {_DEEPEST} levels deep", where=f"{_joined(place):.60}…")
    if isinstance(node, nn.Module):
        node = node.state_dict()
    if isinstance(node, Tensor):
        check_dense(_joined(place), node)
        yield place, node
    elif isinstance(node, Mapping) and id(node) not in around:
        for key, value in node.items():
            yield from _leaves(value, (*place, key), (*around, id(node)))
    elif isinstance(node, list | tuple) and node and all(isinstance(t, Tensor) for t in node):
        for index, tensor in enumerate(node):
            check_dense(f"{_joined(place)}[{index}]", tensor)
        yield place, tuple(node)


def _joined(place: Sequence[Any]) -> str:
    return ".".join(map(str, place))


def choose(tree: Any, model: nn.Module, *, key: str = "", ignore: Sequence[str] = ()) -> tuple[Fit | None, Fit | None]:
    """The online weights and the averages that fit the model; None where the file has none."""
    names = canonical_names.named(model)
    file_states = states(tree)
    candidates: list[LoadedState] = []
    for state in file_states:
        parts = _parts(state, names)
        candidates += [p for p in parts if not key or p.where == key or p.path.startswith(f"{key}.")]
    if key and not candidates:
        raise StageError(f"there is nothing under {key!r}; {_listed(file_states)}", where="key")
    fits = [fit(part, names, ignore) for part in candidates]
    complete = [f for f in fits if f.complete]
    # A state dict under a key of its own comes before the same tensors viewed as names that share a prefix.
    complete.sort(key=lambda f: f.state.path.endswith("."))
    online = _only([f for f in complete if not f.state.ema], "online weights")
    averages = _only([f for f in complete if f.state.ema] or _completed(fits, online, names), "averages")
    if online is None and averages is None:
        raise _nothing_fits(file_states, fits, names)
    return online, averages


def fit(state: LoadedState, model: NamedTensors, ignore: Sequence[str] = ()) -> Fit:
    """Compares a state dict with a model's names, shapes and types; names of wrappers are removed."""
    target = model.tensors
    try:
        tensors = canonical_names.strip({state.prefix + n: t for n, t in state.tensors.items()}, model)
    except StageError as error:
        matching = {n: t for n, t in state.tensors.items() if n in target}
        return Fit(state=state, tensors=matching, wrong=(error.what,))
    resizable = canonical_names.resized(model, tensors)
    fitting: dict[str, Tensor] = {}
    wrong: list[str] = []
    extra: list[str] = []
    dropped: list[str] = []
    for name, tensor in tensors.items():
        expected = target.get(name)
        if expected is None:
            if any(fnmatch(name, pattern) for pattern in (*_NO_WEIGHTS, *ignore)):
                dropped.append(name)
            else:
                extra.append(name)
                wrong.append(f"unknown {name} {tuple(tensor.shape)}")
            continue
        fitting[name] = tensor
        if tensor.shape != expected.shape and name not in resizable:
            wrong.append(f"{name} is {tuple(tensor.shape)}, the model has {tuple(expected.shape)}")
        elif tensor.shape == expected.shape and not _convertible(tensor, expected):
            wrong.append(f"{name} is {dtype_name(tensor)}, the model has {dtype_name(expected)}")
    # These only count for BatchNorm(momentum=None), and files from before torch 0.4.1 have none.
    counters = {n: t for n, t in target.items() if n not in fitting and n.endswith("num_batches_tracked")}
    fitting |= counters
    missing = [name for name in target if name not in fitting]
    notes: list[str] = []
    if counters:
        notes.append(f"{len(counters)} counters of batches are not in the file and stay at 0")
    if dropped:
        notes.append(f"left out of {state.where}: {', '.join(dropped[:_SHOWN])}")
    if state.prefix:
        notes.append(f"{state.where} names its tensors without {state.prefix}")
    return Fit(state=state, tensors=fitting, missing=tuple(missing), wrong=tuple(wrong), extra=tuple(extra),
               notes=tuple(notes))  # fmt: skip


def _parts(state: LoadedState, model: NamedTensors) -> Iterator[LoadedState]:
    """The ways to read a state dict: as it is, below each prefix that ends where a name of the model begins, and with
    the prefix of the one module that holds the whole model."""
    if state.is_list:
        # The positions of the parameters, and what is left over under its position.
        names = [*model.params, *list(state.tensors)[len(model.params) :]]
        yield replace(state, tensors=dict(zip(names, state.tensors.values(), strict=False)))
        return
    yield state
    stored = {canonical_names.bare(name): tensor for name, tensor in state.tensors.items()}
    # Three of the longest names are enough to see a shared prefix, and keep this linear in the size of the file.
    longest = sorted([*model.tensors, *model.aliases], key=len)[-3:]
    prefixes = [key.removesuffix(name) for name in longest for key in stored if key.endswith(f".{name}")]
    for prefix in dict.fromkeys(prefixes):
        path = f"{state.path}.{prefix}".lstrip(".")
        below = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        yield LoadedState(path=path, ema=state.ema or _averaged(prefix), tensors=below)
    roots = {n.partition(".")[0] for n in model.tensors}
    if len(roots) == 1 and state.tensors:
        yield replace(state, prefix=f"{roots.pop()}.")


def _convertible(tensor: Tensor, target: Tensor) -> bool:
    """Whether the numbers mean the same in the model's type. Integers in place of floats are quantised weights."""
    if target.is_floating_point() or target.is_complex():
        return tensor.is_floating_point() or (target.is_complex() and tensor.is_complex())
    return not tensor.is_complex() and bool((tensor == tensor.to(target.dtype)).all())


def _completed(fits: Sequence[Fit], online: Fit | None, model: NamedTensors) -> list[Fit]:
    """Averages of parameters alone, completed by the online weights' buffers."""
    if online is None:
        return []
    note = f"the averages hold no buffers; the buffers of {online.state.where} are used"
    completed = []
    for candidate in fits:
        lacks_buffers_only = set(candidate.missing) <= model.buffers.keys()
        if candidate.state.ema and not candidate.wrong and lacks_buffers_only:
            tensors = {**candidate.tensors, **{name: online.tensors[name] for name in candidate.missing}}
            completed.append(replace(candidate, tensors=tensors, missing=(), notes=(*candidate.notes, note)))
    return completed


def _only(fits: Sequence[Fit], kind: str) -> Fit | None:
    """The first of several state dicts that are equal."""
    if not fits:
        return None
    first = fits[0]
    for other in fits[1:]:
        equal = [t is other.tensors[n] or torch.equal(t, other.tensors[n]) for n, t in first.tensors.items()]
        if not all(equal):
            what = f"{kind} are in the file twice, and they differ: {first.state.where} and {other.state.where}"
            raise StageError(what, where="key", hint=f"choose one: key: {first.state.where}")
    return first


def _averaged(path: str) -> bool:
    """Whether a key says "average": words are split at non-letters and at camelCase."""
    words = re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", path)
    return any(w.lower() in _AVERAGES for w in words)


def _nothing_fits(file_states: Sequence[LoadedState], fits: Sequence[Fit], model: NamedTensors) -> StageError:
    expected = f"expected {len(model.tensors)} tensors: {_some(model.tensors)}"
    lines = ["nothing in the file fits the model", expected, _listed(file_states)]
    hint = "does model() build the network that was saved?"
    nearest = max(fits, key=lambda f: (len(f.tensors), -len(f.missing) - len(f.wrong)), default=None)
    if nearest is not None and nearest.tensors:
        faults = [f"missing {n} {tuple(model.tensors[n].shape)}" for n in nearest.missing]
        faults += nearest.wrong
        lines.append(f"nearest is {nearest.state.where}:")
        lines += [f"  {fault}" for fault in faults[:_SHOWN]]
        if len(faults) > _SHOWN:
            lines.append(f"  and {len(faults) - _SHOWN} more")
        if len(nearest.extra) == len(faults):
            patterns = dict.fromkeys(_pattern(name, model) for name in nearest.extra)
            hint = f"to leave them out: ignore: [{', '.join(patterns)}]"
    return StageError("\n    ".join(lines), where="weights", hint=hint)


def _pattern(name: str, model: NamedTensors) -> str:
    """`head.*` of the outermost module that the model has not; the name itself where the model has all of them."""
    for head in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
        if not any(n.startswith(f"{head}.") for n in model.tensors):
            return f"{head}.*"
    return name


def _listed(file_states: Sequence[LoadedState]) -> str:
    shown = [f"{s.where} ({len(s.tensors)} tensors: {_some(s.tensors)})" for s in file_states[:_SHOWN]]
    return f"the file holds {'; '.join(shown) or 'no tensors'}"


def _some(tensors: Mapping[str, Tensor]) -> str:
    shown = [f"{name} {tuple(tensor.shape)}" for name, tensor in itertools.islice(tensors.items(), 3)]
    if len(tensors) > 3:
        shown.append("…")
    return ", ".join(shown)
