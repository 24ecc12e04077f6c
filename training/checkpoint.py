"""Everything in one file: weights, averages, optimizer, schedule, scale, window, counters, random state, positions.

Tensors are named `online/…`, `ema/…`, `masters/…`, `optimizer/…` and so on under canonical parameter names, so that a
checkpoint does not depend on how the model was wrapped or how many ranks wrote it; the rest is one JSON entry. Nothing
is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import StageError
from layerline.training import deploy, names, rng, tensorfile
from layerline.training.lane import Lane
from layerline.training.masks import Masks
from layerline.training.parts import whole
from layerline.training.tree import Tensors, pack, unpack

if TYPE_CHECKING:
    from layerline.training.optimizer import ModelOptimizer

FORMAT = 1
SUFFIX = ".safetensors"


def save(mo: ModelOptimizer, path: Path, *, timings: bool = True) -> Path:
    """Writes `path`, or `step-<n>.safetensors` in the folder `path` and drops the oldest beyond `monitor.keep`.

    Args:
        mo: what to save.
        path: a file ending in .safetensors, or a folder.
        timings: whether the monitors' rows go in; without them the same training gives the same bytes.
    """
    target = path if path.suffix == SUFFIX else path / f"step-{mo.global_step:08d}{SUFFIX}"
    with ExitStack() as stack:
        for lane in mo.lanes.values():
            stack.enter_context(deploy.online(lane))
        write = partial(_write, target, path, mo.config.monitor.keep, *state(mo, timings=timings))
        if mo.ranks is None:
            write()
        else:
            mo.ranks.by_first(write)
    mo.saved = target
    return target


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
    _restore_lane(mo.lanes[name], meta["lanes"][name], f"{name}/" if name else "", tensors)
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
            "rng": pack(rng.capture(), "rng", tensors)}  # fmt: skip
    if mo.ranks is not None:
        if timings:
            others = enumerate(mo.ranks.gather(rng.capture())[1:], start=1)
            meta["ranks"] = [pack(state, f"rng/{rank}", tensors) for rank, state in others]
        for key, tensor in tensors.items():
            full = whole(tensor)
            if mo.ranks.rank == 0:
                tensors[key] = full
    return tensors, meta


def restore(mo: ModelOptimizer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Puts a saved state into `mo`.

    Raises:
        StageError: another format, other models, or tensors that do not fit.
    """
    if meta.get("format") != FORMAT:
        raise StageError(f"a checkpoint of format {meta.get('format')!r}, expected {FORMAT}", where="checkpoint")
    if set(meta["lanes"]) != set(mo.lanes):
        raise StageError(f"the checkpoint holds models {sorted(meta['lanes'])}, here are {sorted(mo.lanes)}",
                         where="checkpoint")  # fmt: skip
    for change in _changes(meta["config"], mo.config.model_dump(mode="json")):
        warnings.warn(f"resuming with another configuration: {change}", stacklevel=4)
    for name, lane in mo.lanes.items():
        _restore_lane(lane, meta["lanes"][name], f"{name}/" if name else "", tensors)
    for name, extra in mo.extras.items():
        if name in meta["extras"]:
            extra.load_state_dict(unpack(meta["extras"][name], f"extras/{name}", tensors))
    _restore_draws(meta, tensors, 0 if mo.ranks is None else mo.ranks.rank)


def weights(path: Path, *, ema: bool = True) -> dict[str, Tensor]:
    """The weights in a checkpoint of ours (averages over online ones when `ema`), or all of another file."""
    tensors, meta = tensorfile.load(path)
    if "lanes" not in meta:
        return tensors
    kinds = ("online/", "masters/", "ema/") if ema else ("online/", "masters/")
    return {n.removeprefix(k): t for k in kinds for n, t in tensors.items() if n.startswith(k)}


def load_weights(model: nn.Module, path: Path, *, ema: bool = True) -> None:
    """Copies the weights of a file into a model; prefixes of wrappers on either side do not matter.

    Raises:
        StageError: names or shapes that do not fit; all are listed.
    """
    names.load(model, weights(path, ema=ema))


def _write(target: Path, path: Path, keep: int, tensors: Tensors, meta: dict[str, Any]) -> None:
    tensorfile.save(target, tensors, meta)
    if target is not path:
        for old in rotation(path)[keep:]:
            old.unlink(missing_ok=True)


def _read(mo: ModelOptimizer, path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The newest sound checkpoint at `path`; of several ranks the first reads it for all."""
    if mo.ranks is None:
        return _newest(path)
    read: dict[str, Tensor] = {}

    def first() -> tuple[Path, dict[str, Any], dict[str, Any]]:
        found, tensors, meta = _newest(path)
        read.update(tensors)
        return found, meta, {n: (t.dtype, t.shape) for n, t in tensors.items()}

    found, meta, kinds = mo.ranks.by_first(first)
    return found, {n: mo.ranks.share(read.get(n), *kind) for n, kind in kinds.items()}, meta


def _newest(path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    if not path.is_dir():
        return path, *tensorfile.load(path)
    for candidate in rotation(path):
        try:
            return candidate, *tensorfile.load(candidate)
        except StageError as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=5)
    raise StageError("there is no sound checkpoint in this folder", where=str(path))


def _restore_draws(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> None:
    others = meta.get("ranks", [])
    if 0 < rank <= len(others):
        rng.restore(unpack(others[rank - 1], f"rng/{rank}", tensors))
        return
    rng.restore(unpack(meta["rng"], "rng", tensors))
    if rank:  # one more rank than there was: draws of its own, that follow from what was saved
        rng.seed_all(rng.mix(int(torch.randint(2**62, ()).item()), rank))


def _lane_state(lane: Lane, prefix: str, tensors: Tensors, *, timings: bool) -> dict[str, Any]:
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
        "optimizer": _optimizer_state(lane), "rate": lane.rate.state_dict(), "scale": lane.scale.state_dict(),
        "window": {**window, "grads": grads},
        "guard": lane.guard.state_dict() if lane.guard else {},
    }  # fmt: skip
    if lane.masks is not None:
        parts["masks"] = lane.masks.state_dict()
    if timings:
        parts["monitor"] = lane.monitor.state_dict()
    counters = {"steps": lane.steps, "skipped": lane.skipped, "in_a_row": lane.skipped_in_a_row,
                "first_rejected": lane.first_rejected, "ema_updates": lane.ema.updates if lane.ema else 0}  # fmt: skip
    packed = {name: pack(part, f"{prefix}{name}", tensors) for name, part in parts.items()}
    return {"counters": counters, "aliases": lane.named.aliases, **packed}


def _restore_lane(lane: Lane, saved: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> None:
    def part(name: str) -> Any:
        return unpack(saved[name], f"{prefix}{name}", tensors)

    def under(kind: str) -> dict[str, Tensor]:
        start = f"{prefix}{kind}/"
        return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}

    deploy.switch(lane, ema=False)
    if lane.peers is not None:
        lane.peers.changed()
        tensors = lane.peers.split(tensors, prefix)
    names.load(lane.model, under("online"))
    if lane.masters is not None:
        by_name = under("masters") or under("online")
        lane.masters.adopt([by_name[n] for n, p in zip(lane.names, lane.params, strict=True) if lane.masters.has(p)])
    counters = saved["counters"]
    lane.steps, lane.skipped, lane.skipped_in_a_row = counters["steps"], counters["skipped"], counters["in_a_row"]
    lane.first_rejected = counters.get("first_rejected", 0)
    if lane.ema is not None:
        lane.ema.load(under("ema"), counters["ema_updates"])
    _restore_optimizer(lane, part("optimizer"))
    lane.rate.load_state_dict(part("rate"), lane.steps)
    lane.scale.load_state_dict(part("scale"))
    window = part("window")
    lane.window.load_state_dict(window)
    with torch.no_grad():
        for name, param in zip(lane.names, lane.stepped, strict=True):
            grad = window["grads"].get(name)
            param.grad = None if grad is None else torch.empty_like(param).copy_(grad)
    if lane.guard is not None and saved["guard"]:
        lane.guard.load_state_dict(part("guard"))
    if "masks" in saved:
        lane.masks = lane.masks or Masks(lane, {})
        lane.masks.load_state_dict(part("masks"))
    if "monitor" in saved:
        lane.monitor.load_state_dict(part("monitor"))
    if lane.peers is not None:
        lane.peers.arm(sync=lane.window.micro == lane.config.accumulate.steps - 1)


def _optimizer_state(lane: Lane) -> dict[str, Any]:
    """By parameter name for our own optimizers; as it comes for a custom one that has a state_dict."""
    if lane.custom:
        return {"custom": lane.optimizer.state_dict() if hasattr(lane.optimizer, "state_dict") else None}
    name_of = {id(p): n for n, p in zip(lane.names, lane.stepped, strict=True)}
    steps = [g["step"] for g in lane.optimizer.param_groups if "step" in g]
    return {"state": {name_of[id(p)]: dict(s) for p, s in lane.optimizer.state.items()}, "group_steps": steps}


def _restore_optimizer(lane: Lane, saved: Mapping[str, Any]) -> None:
    if lane.custom:
        if saved.get("custom") is not None and hasattr(lane.optimizer, "load_state_dict"):
            lane.optimizer.load_state_dict(saved["custom"])
        return
    if "state" not in saved:
        raise StageError("the checkpoint was written with a custom optimizer", where="optimizer")
    current = lane.optimizer.state_dict()
    of_name = dict(zip(lane.names, lane.stepped, strict=True))
    order = {id(p): i for i, p in enumerate(p for g in lane.optimizer.param_groups for p in g["params"])}
    unknown = sorted(set(saved["state"]) - set(of_name))
    if unknown:
        raise StageError(f"optimizer state of unknown parameters {unknown[:5]}", where="optimizer")
    current["state"] = {order[id(of_name[n])]: _copied(s) for n, s in saved["state"].items()}
    for group, step in zip(current["param_groups"], saved["group_steps"], strict=False):
        group["step"] = step
    lane.optimizer.load_state_dict(current)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    # What was read from a file are views of one buffer, which would stay in memory as long as any of them.
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _changes(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [c for k in {**old, **new} for c in _changes(old.get(k), new.get(k), f"{path}.{k}" if path else str(k))]
    quiet = path.startswith(("monitor.", "memory.", "distributed."))
    return [] if old == new or quiet else [f"{path} was {old!r}, is {new!r}"]
