"""Everything in one file: weights, averages, optimizer, schedule, scale, window, counters, random state, positions.

Tensors are named `online/…`, `ema/…`, `masters/…`, `optimizer/…` and so on under canonical parameter names, so that a
checkpoint does not depend on how the model was wrapped or how many ranks wrote it; the rest is one JSON entry. Nothing
is pickled.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.loop import ema_swap, rejected_steps
from layerline.training.loop.masks import Masks
from layerline.training.loop.step_engine import Lane
from layerline.training.model import canonical_names as names
from layerline.training.model.split_tensors import whole
from layerline.training.optimizers import registry as optimizers
from layerline.training.randomness import rng_state
from layerline.training.state import checkpoint_reader, optimizer_state, safetensors_io, tensor_forms
from layerline.training.state.state_tree import Tensors, pack, unpack

if TYPE_CHECKING:
    from layerline.training.model_optimizer import ModelOptimizer

FORMAT = 1
SUFFIX = ".safetensors"
# Suffixes of other tools' files: a path with one of them is hardly meant as a folder.
_OTHERS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".tar", ".zip", ".npz", ".h5", ".hdf5", ".model", ".onnx")


def save(mo: ModelOptimizer, path: Path, *, timings: bool = True) -> Path:
    """Writes `path`, or `step-<n>.safetensors` in the folder `path` and drops the oldest beyond `monitor.keep`.

    Args:
        mo: what to save.
        path: a file ending in .safetensors, or a folder.
        timings: whether the monitors' rows go in; without them the same training gives the same bytes.
    """
    if path.suffix != SUFFIX and not path.is_dir() and (path.suffix.lower() in _OTHERS or path.exists()):
        raise ConfigError(f"a checkpoint is a {SUFFIX} file, or lies in a folder", where=str(path),
                          hint=f"{path.with_suffix(SUFFIX).name}")  # fmt: skip
    target = path if path.suffix == SUFFIX else path / f"step-{mo.global_step:08d}{SUFFIX}"
    with ExitStack() as stack:
        for lane in mo.lanes.values():
            stack.enter_context(ema_swap.online(lane))
            _check_finite(lane)
        write = partial(_write, target, path, mo.config.monitor.keep, *state(mo, timings=timings))
        if mo.ranks is None:
            write()
        else:
            mo.ranks.by_first(write)
    mo.saved = target
    return target


def _check_finite(lane: Lane) -> None:
    """Refuses to write spoilt weights over a sound checkpoint.

    Raises:
        StageError: a weight that was finite at first has an Inf or NaN.
    """
    name = rejected_steps.spoilt_weight(lane)
    if name is not None:
        raise StageError(
            f"{name} is Inf or NaN after step {lane.steps}, and nothing was written",
            where=name,
            hint="lower the learning rate, and go on from the checkpoint before",
        )


def load(mo: ModelOptimizer, path: Path) -> Path:
    """Loads a file, or the newest sound checkpoint of a folder."""
    found, tensors, meta = _read(mo, path)
    restore(mo, tensors, meta)
    mo.saved = found
    return found


def roll_back(mo: ModelOptimizer, name: str) -> str | None:
    """Puts one model's last saved weights, averages and optimizer state back; data position and random state go on.

    Returns:
        The file's name; None when nothing was saved or loaded yet.
    """
    if mo.saved is None:
        return None
    _, tensors, meta = _read(mo, mo.saved)
    state = checkpoint_reader.read(mo.lanes[name], meta["lanes"][name], f"{name}/" if name else "", tensors)
    _load_others(mo, {name: state.parts["optimizer"]}, {})
    _restore_lane(mo.lanes[name], state)
    return mo.saved.name


def rotation(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted(folder.glob(f"step-*{SUFFIX}"), reverse=True)


def state(mo: ModelOptimizer, *, timings: bool = True) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by name (not copies) and the JSON entry; the models hold their trained weights."""
    tensors: Tensors = {}
    lanes = {n: _lane_state(lane, f"{n}/" if n else "", tensors, timings=timings) for n, lane in mo.lanes.items()}
    extras = {n: pack(x.state_dict(), f"extras/{n}", tensors) for n, x in mo.extras.items()}
    meta = {"format": FORMAT, "config": mo.config.model_dump(mode="json"), "lanes": lanes, "extras": extras,
            "rng": pack(rng_state.capture(), "rng", tensors)}  # fmt: skip
    if mo.ranks is not None:
        if timings:
            with mo.ranks.pulse.guarded("save_ckpt, which every rank has to call,", mo.global_step):
                others = enumerate(mo.ranks.gather(rng_state.capture())[1:], start=1)
            meta["ranks"] = [pack(state, f"rng/{rank}", tensors) for rank, state in others]
        for key, tensor in tensors.items():
            full = whole(tensor)
            if mo.ranks.rank == 0:
                tensors[key] = full
    return tensors, meta


def restore(mo: ModelOptimizer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Puts a saved state into `mo`, which holds on to some of the tensors.

    Raises:
        StageError: another format, other models, another optimizer, or tensors that do not fit. Nothing is changed
            then; nor where something that was registered, or a custom optimizer, refuses its state.
    """
    if meta.get("format") != FORMAT:
        raise StageError(f"a checkpoint of format {meta.get('format')!r}, expected {FORMAT}", where="checkpoint")
    if set(meta["lanes"]) != set(mo.lanes):
        was, now = (", ".join(sorted(names)) if set(names) != {""} else "one model without a name"
                    for names in (meta["lanes"], mo.lanes))  # fmt: skip
        raise StageError(f"the checkpoint holds {was}; here: {now}", where="checkpoint",
                         hint=f"{optimizer_state.WEIGHTS_ALONE}, with only=… where it holds several")  # fmt: skip
    for change in _changes(meta["config"], mo.config.model_dump(mode="json")):
        warnings.warn(f"resuming with another configuration: {change}", stacklevel=4)
    lanes = {
        n: checkpoint_reader.read(lane, meta["lanes"][n], f"{n}/" if n else "", tensors) for n, lane in mo.lanes.items()
    }
    extras = {n: unpack(meta["extras"][n], f"extras/{n}", tensors) for n in mo.extras if n in meta["extras"]}
    _load_others(mo, {n: state.parts["optimizer"] for n, state in lanes.items()}, extras)
    for name, state in lanes.items():
        _restore_lane(mo.lanes[name], state)
    _restore_draws(meta, tensors, 0 if mo.ranks is None else mo.ranks.rank)


def weights(path: str | Path, *, only: str | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The online weights and the averages in a checkpoint of ours, or all of another file, twice.

    Args:
        path: a file, or a folder of checkpoints, of which the newest sound one is taken.
        only: the model, where the checkpoint holds several.

    Raises:
        StageError: there are several models and none is chosen, or another one.
    """
    path, tensors, meta = _newest(Path(path))
    tensors = tensor_forms.from_file(tensors, meta)
    if "lanes" not in meta:
        return tensors, tensors
    there: list[str] = list(meta["lanes"])
    if (name := there[0] if only is None and len(there) == 1 else only) not in there:
        what = "the checkpoint holds several models" if only is None else f"the checkpoint holds no model {only!r}"
        raise StageError(f"{what}; there are {there}", where=path.name, hint=f"only={there[0]!r}")
    return checkpoint_reader.of_model(tensors, meta, name)


def load_weights(model: nn.Module, path: str | Path, *, ema: bool = True, only: str | None = None) -> None:
    """Copies the weights of a file into a model; prefixes of wrappers on either side do not matter.

    Args:
        path: a file of ours or of others, or a folder of checkpoints.
        ema: takes the averages where there are any, else the weights that were trained.
        only: the model of the checkpoint, where it holds several.

    Raises:
        StageError: names or shapes that do not fit, all of which are listed; or which model is not said.
    """
    names.load(model, weights(path, only=only)[ema])


def _write(target: Path, path: Path, keep: int, tensors: Tensors, meta: dict[str, Any]) -> None:
    stored, notes = tensor_forms.to_file(tensors)
    safetensors_io.save(target, stored, {**meta, tensor_forms.ENTRY: notes} if notes else meta)
    if target is not path:
        for old in rotation(path)[keep:]:
            old.unlink(missing_ok=True)


def _read(mo: ModelOptimizer, path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The newest sound checkpoint at `path`; of several ranks the first reads it for all."""
    if mo.ranks is None:
        found, tensors, meta = _newest(path)
        return found, tensor_forms.from_file(tensors, meta), meta
    read: dict[str, Tensor] = {}

    def first() -> tuple[Path, dict[str, Any], dict[str, Any]]:
        found, tensors, meta = _newest(path)
        read.update(tensors)
        return found, meta, {n: (t.dtype, t.shape) for n, t in tensors.items()}

    found, meta, kinds = mo.ranks.by_first(first)
    shared = {n: mo.ranks.share(read.get(n), *kind) for n, kind in kinds.items()}
    return found, tensor_forms.from_file(shared, meta), meta


def _newest(path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    if not path.is_dir():
        return path, *safetensors_io.load(path)
    for candidate in rotation(path):
        try:
            return candidate, *safetensors_io.load(candidate)
        except StageError as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=5)
    raise StageError("there is no sound checkpoint in this folder", where=str(path))


def _restore_draws(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> None:
    others = meta.get("ranks", [])
    if 0 < rank <= len(others):
        rng_state.restore(unpack(others[rank - 1], f"rng/{rank}", tensors))
        return
    rng_state.restore(unpack(meta["rng"], "rng", tensors))
    if rank:  # one more rank than there was: draws of its own, that follow from what was saved
        rng_state.seed_all(rng_state.mix(int(torch.randint(2**62, ()).item()), rank))


def _lane_state(lane: Lane, prefix: str, tensors: Tensors, *, timings: bool) -> dict[str, Any]:
    lane.refresh()
    for name, tensor in lane.named.tensors.items():
        tensors[f"{prefix}online/{name}"] = tensor.detach()
    if lane.masters is not None:
        held = zip(lane.names, lane.params, strict=True)
        tensors |= {f"{prefix}masters/{n}": lane.masters.stepped(p) for n, p in held if lane.masters.has(p)}
    if lane.ema is not None:
        tensors |= {f"{prefix}ema/{n}": t for n, t in zip(lane.ema.names, lane.ema.shadow, strict=True)}
    grads = {n: p.grad for n, p in zip(lane.names, lane.stepped, strict=True) if p.grad is not None}
    window: dict[str, Any] = lane.window.state_dict()
    if lane.peers is not None and lane.window.micro:
        grads, shared = lane.peers.window(grads)
        window |= shared
    parts: dict[str, Any] = {
        "optimizer": optimizer_state.state(lane), "rate": lane.rate.state_dict(), "scale": lane.scale.state_dict(),
        "window": {**window, "grads": grads},
        "guard": lane.guard.state_dict() if lane.guard else {},
    }  # fmt: skip
    if lane.masks is not None:
        parts["masks"] = lane.masks.state_dict()
    if timings:
        parts["monitor"] = lane.monitor.state_dict()
    counters = {"steps": lane.steps, "skipped": lane.skipped, "in_a_row": lane.skipped_in_a_row,
                "first_rejected": lane.first_rejected, "ema_updates": lane.ema.updates if lane.ema else 0}  # fmt: skip
    classes = optimizers.classes(lane.optimizer)
    packed = {name: pack(part, f"{prefix}{name}", tensors, classes) for name, part in parts.items()}
    return {"counters": counters, "aliases": lane.named.aliases, **packed}


def _load_others(mo: ModelOptimizer, optimizers: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
    """Gives states to the user's own objects, which alone can tell whether they fit: all take theirs, or none."""
    loads = [(mo.extras[name], state) for name, state in extras.items()]
    for name, part in optimizers.items():
        lane = mo.lanes[name]
        if lane.custom and (held := optimizer_state.custom_state(lane, part)) is not None:
            loads.append((lane.optimizer, held))
    done: list[tuple[Any, Any]] = []
    try:
        for thing, state in loads:
            # A torch optimizer looks at a state before it takes it.
            before = None if isinstance(thing, torch.optim.Optimizer) else copy.deepcopy(thing.state_dict())
            done.append((thing, before))
            thing.load_state_dict(state)
    except BaseException:
        for thing, before in reversed(done):
            if before is not None:
                thing.load_state_dict(before)
        raise


def _restore_lane(lane: Lane, state: checkpoint_reader.Saved) -> None:
    ema_swap.switch(lane, ema=False)
    if lane.peers is not None:
        lane.peers.release()
    weights, parts, counters = state.weights, state.parts, state.counters
    names.load(lane.model, weights["online"])
    lane.refresh()  # a buffer that grew may be another tensor
    if lane.masters is not None:
        by_name = weights["masters"] or weights["online"]
        lane.masters.adopt([by_name[n] for n, p in zip(lane.names, lane.params, strict=True) if lane.masters.has(p)])
    lane.steps, lane.skipped, lane.skipped_in_a_row = counters["steps"], counters["skipped"], counters["in_a_row"]
    lane.first_rejected = counters.get("first_rejected", 0)
    if lane.ema is not None:
        lane.ema.load(weights["ema"], counters["ema_updates"])
    if not lane.custom:
        optimizer_state.restore(lane, parts["optimizer"])
    if lane.strides is not None:
        lane.strides.renew()
    lane.rate.load_state_dict(parts["rate"], lane.steps)
    lane.scale.load_state_dict(parts["scale"])
    window = parts["window"]
    lane.window.load_state_dict(window)
    with torch.no_grad():
        for name, param in zip(lane.names, lane.stepped, strict=True):
            grad = window["grads"].get(name)
            param.grad = None if grad is None else grad.to(param.device)
    if lane.guard is not None:
        lane.guard.keep()
        lane.guard.load_state_dict(parts["guard"])
    if "masks" in parts:
        lane.masks = lane.masks or Masks(lane, {})
        lane.masks.load_state_dict(parts["masks"])
    if "monitor" in parts:
        lane.monitor.load_state_dict(parts["monitor"])
    if lane.peers is not None:
        lane.peers.arm(sync=lane.window.micro == lane.config.accumulate.steps - 1)


def _changes(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [c for k in {**old, **new} for c in _changes(old.get(k), new.get(k), f"{path}.{k}" if path else str(k))]
    quiet = path.startswith(("monitor.", "memory.", "distributed."))
    return [] if old == new or quiet else [f"{path} was {old!r}, is {new!r}"]
