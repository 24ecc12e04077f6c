"""Weights in a file that somebody else wrote: every state dict in it, and the one that fits the model.

Trainers nest them under keys, prefix them with the names of wrappers, and keep averages beside them or alone. A state
dict fits when it has every tensor of the model, at its shape, under the name that is left without wrappers and prefix.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import StageError
from layerline.pipeline.inputs.input_checks import check_checkpoint
from layerline.training.model import canonical_names
from layerline.training.model.canonical_names import Named
from layerline.training.state import checkpoint, checkpoint_reader, safetensors_io, tensor_forms

_AVERAGES = frozenset({"ema", "averaged", "average", "avg", "shadow", "swa"})
# What trainers leave among the weights that no model has: counters of averages, of operations, extra states.
_NO_WEIGHTS = ("n_averaged", "*total_ops", "*total_params", "*_extra_state")
_SHOWN = 8
_DEEPEST = 100


@dataclass(frozen=True, kw_only=True)
class State:
    """Tensors by name, as they stand in the file.

    Attributes:
        path: where in the file, keys joined by dots; a prefix that the names share, with its dot, included.
        ema: whether the file calls them averages.
        tensors: without that prefix.
        order: tensors by position instead of by name; some trainers keep averages of parameters so.
        prefix: put before the names, where they lack the one module that the whole model lies in.
    """

    path: str
    ema: bool
    tensors: Mapping[str, Tensor]
    order: tuple[Tensor, ...] = ()
    prefix: str = ""

    @property
    def where(self) -> str:
        return self.path.rstrip(".") or "the whole file"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A state dict held against the model.

    Attributes:
        tensors: what fits, by canonical name.
        missing: names that the model has and the file has not.
        wrong: what does not fit, in words: names that the model has not, shapes and types that differ.
        extra: names that the model has not.
        notes: what was left out or filled in.
    """

    state: State
    tensors: Mapping[str, Tensor]
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def complete(self) -> bool:
        return not self.missing and not self.wrong


def read(path: Path, *, trust: bool) -> tuple[Any, tuple[str, ...]]:
    """What a file holds, and notes: mappings, lists and modules with tensors at their ends.

    Args:
        trust: whether a pickle may run code where it needs to.

    Raises:
        StageError: no checkpoint, not readable, or needs trust; names the classes that it wants to make.
    """
    check_checkpoint(path)
    if path.suffix == checkpoint.SUFFIX:
        stored, meta = safetensors_io.load(path)
        tensors = tensor_forms.from_file(stored, meta)
        if "lanes" not in meta:
            return tensors, ()
        found = {
            n: dict(zip(("online", "ema"), checkpoint_reader.of_model(tensors, meta, n), strict=True))
            for n in meta["lanes"]
        }
        return found.get("", found), ()  # a model that is the only one has the empty name
    _refuse_packed(path)
    try:
        return _load(path, weights_only=True), ()
    except Exception as error:
        if not trust:
            raise _refusal(path, error) from error
    try:
        return _load(path, weights_only=False), (f"unpickled {path.name} as trusted code",)
    except Exception as error:
        raise StageError(f"torch can't read it: {type(error).__name__}: {error}", where=path.name) from error


def _refuse_packed(path: Path) -> None:
    """Refuses an archive that unpacks to more than it is, before any of it is unpacked: torch.save never compresses.

    Raises:
        StageError: names both sizes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # not an archive, or one that torch has its own words for
    size = path.stat().st_size
    if unpacked > size:
        raise StageError(
            f"its entries unpack to {unpacked} bytes, and the file has {size}; torch.save never compresses",
            where=path.name,
            hint="if you trust it, load it and save it again with torch.save",
        )


def _load(path: Path, *, weights_only: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how else it could be read, which nobody here chooses
        return torch.load(path, map_location="cpu", weights_only=weights_only)


def check(fit: Fit, known: Named) -> None:
    """Refuses weights that are no numbers, here or in the model's own types. A buffer may hold Inf, as masks do.

    Raises:
        StageError: NaN, Inf, or a number that the model's type can't hold; names the tensor and the first element.
    """
    for name, own in known.tensors.items():
        tensor, param = fit.tensors[name], name in known.params
        tensor = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        _refuse(fit, name, tensor, ~tensor.isfinite() if param else tensor.isnan(), "a finite number")
        beyond = tensor.isfinite() & ~tensor.to(own.dtype).isfinite()
        _refuse(fit, name, tensor, beyond, f"what {_type(own)} can hold")


def states(tree: Any, path: str = "", around: tuple[int, ...] = ()) -> Iterator[State]:
    """Every state dict in what was read, the outer ones first; what holds itself is looked into once.

    Args:
        around: ids of what the tree lies in.

    Raises:
        StageError: nested deeper than any trainer does, or a tensor without numbers of its own; names where.
    """
    if len(around) > _DEEPEST:
        raise StageError(f"nested more than {_DEEPEST} levels deep", where=f"{path:.60}…")
    if isinstance(tree, nn.Module):
        tree = tree.state_dict()
    if id(tree) in around:
        return
    within = (*around, id(tree))
    if isinstance(tree, Mapping):
        if tensors := dict(_flat(tree, path)):
            yield State(path=path, ema=_averaged(path) or "n_averaged" in tensors, tensors=tensors)
        for key, value in tree.items():
            yield from states(value, f"{path}.{key}" if path else str(key), within)
    elif isinstance(tree, list | tuple) and tree and all(isinstance(t, Tensor) for t in tree):
        for index, tensor in enumerate(tree):
            _refuse_empty(tensor, f"{path}[{index}]")
        yield State(path=path, ema=_averaged(path), tensors={}, order=tuple(tree))


def choose(tree: Any, model: nn.Module, *, key: str = "", ignore: Sequence[str] = ()) -> tuple[Fit | None, Fit | None]:
    """The online weights and the averages that fit the model; None where the file has no such.

    Args:
        key: where in the file to look; everywhere when empty.
        ignore: patterns of names in the file that the model need not have.

    Raises:
        StageError: none fits, or several of one kind do that differ; lists what was found and what was expected.
    """
    known, there = canonical_names.named(model), list(states(tree))
    parts = [p for s in there for p in _parts(s, known)]
    parts = [p for p in parts if not key or p.where == key or p.path.startswith(f"{key}.")]
    if key and not parts:
        raise StageError(f"there is nothing under {key!r}; {_listed(there)}", where="key")
    fits = [fit(part, known, ignore) for part in parts]
    # What lies under a key of its own, before the same tensors seen as names that share a prefix.
    complete = sorted((f for f in fits if f.complete), key=lambda f: f.state.path.endswith("."))
    online = _only([f for f in complete if not f.state.ema], "online weights")
    averages = _only([f for f in complete if f.state.ema] or _completed(fits, online, known), "averages")
    if online is None and averages is None:
        raise _nothing_fits(there, fits, known)
    return online, averages


def fit(state: State, known: Named, ignore: Sequence[str] = ()) -> Fit:
    """Holds a state dict against a model's names and shapes; wrappers' names are taken off."""
    target = known.tensors
    if state.order:
        pairs = dict(zip(known.params, state.order, strict=False))
        return _judge(state, pairs, known, [] if len(pairs) == len(state.order) else ["more tensors than parameters"])
    try:
        bare = canonical_names.strip({state.prefix + n: t for n, t in state.tensors.items()}, known)
    except StageError as error:
        return Fit(state=state, tensors={n: t for n, t in state.tensors.items() if n in target}, wrong=(error.what,))
    extra = [n for n in bare if n not in target]
    dropped = [n for n in extra if any(fnmatch(n, p) for p in (*_NO_WEIGHTS, *ignore))]
    unknown = [f"unknown {n} {tuple(bare[n].shape)}" for n in extra if n not in dropped]
    fitted = _judge(state, {n: t for n, t in bare.items() if n in target}, known, unknown)
    notes = [f"left out of {state.where}: {', '.join(dropped[:_SHOWN])}"] if dropped else []
    notes += [f"{state.where} names its tensors without {state.prefix}"] if state.prefix else []
    return replace(fitted, notes=(*fitted.notes, *notes), extra=tuple(n for n in extra if n not in dropped))


def _parts(state: State, known: Named) -> Iterator[State]:
    """The state dict as it is; below each prefix that ends where a name of the model begins; and with the prefix of the
    one module that the whole model lies in."""
    yield state
    own = sorted([*known.tensors, *known.aliases], key=len)[-3:]
    keys = {canonical_names.bare(k): k for k in state.tensors}
    for prefix in dict.fromkeys(k[: -len(n)] for n in own for k in keys if k.endswith(f".{n}")):
        path = f"{state.path}.{prefix}" if state.path else prefix
        below = {k.removeprefix(prefix): state.tensors[kept] for k, kept in keys.items() if k.startswith(prefix)}
        yield State(path=path, ema=state.ema or _averaged(prefix), tensors=below)
    roots = {n.partition(".")[0] for n in known.tensors}
    if len(roots) == 1 and state.tensors:
        yield replace(state, prefix=f"{roots.pop()}.")


def _judge(state: State, given: Mapping[str, Tensor], known: Named, wrong: list[str]) -> Fit:
    target = known.tensors
    # Counted for a momentum that hardly anyone uses; files from before torch 0.4.1 have none.
    grown = canonical_names.resized(known, given)
    counters = {n: t for n, t in target.items() if n not in given and n.endswith("num_batches_tracked")}
    wrong = wrong + [
        f"{n} is {tuple(t.shape)}, the model has {tuple(target[n].shape)}"
        for n, t in given.items()
        if t.shape != target[n].shape and n not in grown
    ]
    wrong += [
        f"{n} is {_type(t)}, the model has {_type(target[n])}"
        for n, t in given.items()
        if t.shape == target[n].shape and not _convertible(t, target[n])
    ]
    return Fit(
        state=state,
        tensors={**given, **counters},
        missing=tuple(n for n in target if n not in given and n not in counters),
        wrong=tuple(wrong),
        notes=(f"{len(counters)} counters of batches are not in the file and stay at 0",) if counters else (),
    )


def _refuse(fit: Fit, name: str, tensor: Tensor, bad: Tensor, expected: str) -> None:
    if not bad.any():
        return
    at = tuple(int(i) for i in bad.nonzero()[0])
    raise StageError(
        f"{name}{list(at) if at else ''} is {tensor[at].item()}, expected {expected}; {int(bad.sum())} of "
        f"{bad.numel()} elements are not that",
        where=fit.state.where,
        hint="take a checkpoint from before it went wrong",
    )


def _convertible(given: Tensor, own: Tensor) -> bool:
    """Whether the numbers mean the same in the model's type: integers in place of floats are quantised ones."""
    if own.is_floating_point() or own.is_complex():
        return given.is_floating_point() or (own.is_complex() and given.is_complex())
    return not given.is_complex() and bool((given == given.to(own.dtype)).all())


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _completed(fits: Sequence[Fit], online: Fit | None, known: Named) -> list[Fit]:
    """Averages of parameters alone, with the online weights' buffers."""
    if online is None:
        return []
    partial = [f for f in fits if f.state.ema and not f.wrong and set(f.missing) <= known.buffers.keys()]
    note = f"the averages hold no buffers: those of {online.state.where} are taken"
    return [
        replace(
            f, tensors={**f.tensors, **{n: online.tensors[n] for n in f.missing}}, missing=(), notes=(*f.notes, note)
        )
        for f in partial
    ]


def _only(fits: Sequence[Fit], what: str) -> Fit | None:
    """The first of several that are equal.

    Raises:
        StageError: two of them differ.
    """
    for other in fits[1:]:
        if any(t is not (o := other.tensors[n]) and not torch.equal(t, o) for n, t in fits[0].tensors.items()):
            raise StageError(
                f"{what} are found twice, and they differ: {fits[0].state.where} and {other.state.where}",
                where="key",
                hint=f"say which: key: {fits[0].state.where}",
            )
    return fits[0] if fits else None


def _flat(
    tree: Mapping[Any, Any], path: str, prefix: str = "", around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    if id(tree) in around or len(around) > _DEEPEST:
        return
    for key, value in tree.items():
        if isinstance(key, str) and isinstance(value, Tensor):
            _refuse_empty(value, ".".join(filter(None, [path, prefix + key])))
            yield prefix + key, value
        elif isinstance(key, str) and isinstance(value, Mapping):
            yield from _flat(value, path, f"{prefix}{key}.", (*around, id(tree)))


def _refuse_empty(tensor: Tensor, name: str) -> None:
    """Refuses a tensor that has no numbers in rows and columns to take.

    Raises:
        StageError: it is on the meta device, sparse, or of rows that differ in length.
    """
    if tensor.is_meta:
        what, hint = "on the meta device: its numbers were never loaded or made", "save the model after it has weights"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        what, hint = f"a {kind} tensor, expected a dense one", "save it as tensor.to_dense()"
    else:
        return
    raise StageError(f"it is {what}", where=name, hint=hint)


def _averaged(path: str) -> bool:
    words = re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", path)
    return any(w.lower() in _AVERAGES for w in words)


def _nothing_fits(there: Sequence[State], fits: Sequence[Fit], known: Named) -> StageError:
    expected = _some({n: tuple(t.shape) for n, t in known.tensors.items()})
    said = ["nothing in the file fits the model", f"expected {len(known.tensors)} tensors: {expected}", _listed(there)]
    nearest = max(fits, key=lambda f: (len(f.tensors), -len(f.missing) - len(f.wrong)), default=None)
    hint = "does model() build the network that was saved?"
    if nearest is not None and nearest.tensors:
        faults = [*(f"missing {n} {tuple(known.tensors[n].shape)}" for n in nearest.missing), *nearest.wrong]
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        said += [f"nearest is {nearest.state.where}:", *(f"  {f}" for f in (*faults[:_SHOWN], *more))]
        if len(nearest.extra) == len(faults):
            hint = f"if the model need not have them: ignore: [{', '.join(_patterns(nearest.extra, known))}]"
    return StageError("\n    ".join(said), where="weights", hint=hint)


def _patterns(extra: Sequence[str], known: Named) -> list[str]:
    """The fewest patterns of whole modules that take in these names and none of the model's."""
    found = dict[str, None]()
    for name in extra:
        parts = name.split(".")
        heads = (".".join(parts[:i]) + "." for i in range(1, len(parts)))
        head = next((h for h in heads if not any(n.startswith(h) for n in known.tensors)), None)
        found[f"{head}*" if head else name] = None
    return list(found)


def _listed(found: Sequence[State]) -> str:
    shown = [f"{s.where} ({len(s.tensors) or len(s.order)} tensors: {_some(_shapes(s))})" for s in found]
    return f"found {'; '.join(shown[:_SHOWN]) or 'no tensors'}"


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in state.tensors.items()} or {
        str(i): tuple(t.shape) for i, t in enumerate(state.order)
    }


def _some(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{n} {s}" for n, s in [*shapes.items()][:3]) + (", …" if len(shapes) > 3 else "")


def _refusal(path: Path, error: Exception) -> StageError:
    """Why a file can't be read without running what is pickled in it, or at all."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception as reason:  # noqa: BLE001 - whatever torch says about a file that it can't look into
        unsafe = []
        if "torchscript" in str(reason).lower():
            unsafe = ["a TorchScript program"]
    if not unsafe:
        # What follows is torch's advice to run the pickle's code, or where to file an issue.
        said = str(error).rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
        said = " ".join(said.partition("Please file an issue")[0].split()) or "no message"
        return StageError(
            f"torch can't read it as weights; damaged, or no checkpoint at all: {type(error).__name__}: {said:.300}",
            where=path.name,
            hint="expected .safetensors, or what torch.save writes of a state dict",
        )
    return StageError(
        f"it holds more than weights: {', '.join(sorted(unsafe)[:_SHOWN])}; reading that runs code from the file",
        where=path.name,
        hint="save the state dict alone; or, if you trust where it comes from: `trust: true` (pipe init … --trust)",
    )
