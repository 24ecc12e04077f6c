"""Checkpoints: everything that a training needs to resume, in one safetensors file. Tensors are named `online/…`,
`ema/…`, `optimizer/…` and so on under canonical parameter names, so that a checkpoint does not depend on how the model
was wrapped or how many ranks wrote it. The rest is one JSON entry. Nothing is pickled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.config.sections import Config
from layerline.training.distributed.ranks import Ranks
from layerline.training.loop import ema_swap, rejected_steps
from layerline.training.loop.step_engine import Lane
from layerline.training.model import canonical_names as names
from layerline.training.model import tensor_forms
from layerline.training.model.split_tensors import whole
from layerline.training.model.state_tree import Tensors, pack, unpack
from layerline.training.randomness import rng_state
from layerline.training.randomness.rng_state import Draws
from layerline.training.state import lane_checkpoint, optimizer_state, safetensors_io
from layerline.training.state.lane_checkpoint import prefix_of

FORMAT = 2
SUFFIX = ".safetensors"
# Suffixes of other tools' files: a path with one of them is a mistake, not the name of a folder.
_OTHERS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".tar", ".zip", ".npz", ".h5", ".hdf5", ".model", ".onnx")


class Training(Protocol):
    """The parts of a ModelOptimizer that a checkpoint holds."""

    config: Config
    lanes: dict[str, Lane]
    extras: dict[str, Any]
    ranks: Ranks | None
    saved: Path | None

    @property
    def global_step(self) -> int: ...


def save(mo: Training, path: Path, *, timings: bool = True) -> Path:
    """Writes the file `path`; or writes `step-<n>.safetensors` in the folder `path` and deletes the oldest checkpoints
    beyond `monitor.keep`. Without `timings` (the monitors' rows) the same training gives the same bytes."""
    if path.suffix != SUFFIX and not path.is_dir() and (path.suffix.lower() in _OTHERS or path.exists()):
        raise ConfigError(f"a checkpoint is a {SUFFIX} file, or lies in a folder", where=str(path),
                          hint=f"{path.with_suffix(SUFFIX).name}")  # fmt: skip
    target = path
    if path.suffix != SUFFIX:
        target = path / f"step-{mo.global_step:08d}{SUFFIX}"
    with ExitStack() as stack:
        for lane in mo.lanes.values():
            stack.enter_context(ema_swap.online(lane))
            spoilt = rejected_steps.spoilt_weight(lane)
            if spoilt is not None:  # it must not take the place of a sound one
                what = f"{spoilt} is Inf or NaN after step {lane.steps}; no checkpoint was written"
                raise StageError(what, where=spoilt, hint="lower the learning rate and resume from the last checkpoint")
        write = partial(_write, target, path, mo.config.monitor.keep, *state(mo, timings=timings))
        if mo.ranks is None:
            write()
        else:
            mo.ranks.by_first(write)
    mo.saved = target
    return target


def load(mo: Training, path: Path) -> Path:
    """Loads a file, or the newest sound checkpoint of a folder."""
    source, tensors, meta = _read(mo, path)
    restore(mo, tensors, meta)
    mo.saved = source
    return source


def roll_back(mo: Training, name: str) -> str | None:
    """Restores one model's last saved state, and returns the file's name; None when nothing was saved or loaded yet."""
    if mo.saved is None:
        return None
    _, tensors, meta = _read(mo, mo.saved)
    state = lane_checkpoint.read(mo.lanes[name], meta["lanes"][name], prefix_of(name), tensors)
    _load_others(mo, {name: state.parts["optimizer"]}, {})
    lane_checkpoint.restore(mo.lanes[name], state)
    return mo.saved.name


def rotation(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted(folder.glob(f"step-*{SUFFIX}"), reverse=True)


def state(mo: Training, *, timings: bool = True) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by name (not copies) and the JSON entry. The models must hold their trained weights, not averages."""
    tensors: Tensors = {}
    lanes = {}
    for name, lane in mo.lanes.items():
        lanes[name] = lane_checkpoint.collect(lane, prefix_of(name), tensors, timings=timings)
    extras = {name: pack(extra.state_dict(), f"extras/{name}", tensors) for name, extra in mo.extras.items()}
    meta = {"format": FORMAT, "config": mo.config.model_dump(mode="json"), "lanes": lanes, "extras": extras,
            "rng": pack(tuple(rng_state.draws()), "rng", tensors)}  # fmt: skip
    if mo.ranks is not None:
        if timings:
            with mo.ranks.phases.guarded("save_ckpt, which every rank has to call,", mo.global_step):
                rng_of_ranks = mo.ranks.gather(tuple(rng_state.draws()))
            meta["ranks"] = [pack(rng_of_ranks[rank], f"rng/{rank}", tensors) for rank in range(1, mo.ranks.size)]
        # Putting a sharded tensor together is a collective: every rank takes part, the first keeps the result.
        for key, tensor in tensors.items():
            full = whole(tensor)
            if mo.ranks.rank == 0:
                tensors[key] = full
    return tensors, meta


def restore(mo: Training, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Puts a saved state into `mo`, which keeps some of the tensors. Where it does not fit, nothing is changed."""
    if meta.get("format") != FORMAT:
        what = f"a checkpoint of format {meta.get('format')!r:.80}, expected {FORMAT}: another version wrote it"
        raise StageError(what, where="checkpoint", hint=optimizer_state.WEIGHTS_ALONE)
    for entry in ("lanes", "config", "extras", "rng"):
        if entry not in meta:
            raise StageError(f"the checkpoint has no {entry}", where="checkpoint")
    if set(meta["lanes"]) != set(mo.lanes):
        what = f"the checkpoint holds {_model_names(meta['lanes'])}; here: {_model_names(mo.lanes)}"
        hint = f"{optimizer_state.WEIGHTS_ALONE}, with only=… where it holds several"
        raise StageError(what, where="checkpoint", hint=hint)
    for change in _changes(meta["config"], mo.config.model_dump(mode="json")):
        warnings.warn(f"resuming with another configuration: {change}", stacklevel=4)
    states = {}
    for name, lane in mo.lanes.items():
        states[name] = lane_checkpoint.read(lane, meta["lanes"][name], prefix_of(name), tensors)
    saved_extras = [name for name in mo.extras if name in meta["extras"]]
    extras = {name: unpack(meta["extras"][name], f"extras/{name}", tensors) for name in saved_extras}
    _load_others(mo, {name: state.parts["optimizer"] for name, state in states.items()}, extras)
    for name, state in states.items():
        lane_checkpoint.restore(mo.lanes[name], state)
    _restore_rng(meta, tensors, 0 if mo.ranks is None else mo.ranks.rank)


def weights(path: str | Path, *, only: str | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The online weights and the averages of a checkpoint, or of the newest sound one of a folder; `only` names the
    model where there are several. Another tool's file has one set, which stands for both."""
    path, tensors, meta = _newest(Path(path))
    tensors = tensor_forms.from_file(tensors, meta)
    if "lanes" not in meta:
        return tensors, tensors
    model_names: list[str] = list(meta["lanes"])
    if only is None and len(model_names) == 1:
        only = model_names[0]
    if only not in model_names:
        what = "several models" if only is None else f"no model {only!r}"
        raise StageError(f"the checkpoint holds {what}; there are {model_names}", where=path.name,
                         hint=f"only={model_names[0]!r}")  # fmt: skip
    return lane_checkpoint.of_model(tensors, meta, only)


def load_weights(model: nn.Module, path: str | Path, *, ema: bool = True, only: str | None = None) -> None:
    """Copies the weights of a file, ours or another tool's, or of the newest checkpoint of a folder into a model. With
    `ema` it takes the averages where there are any. `only` names the model of a checkpoint that holds several."""
    names.load(model, weights(path, only=only)[ema])


def _write(target: Path, path: Path, keep: int, tensors: Tensors, meta: dict[str, Any]) -> None:
    stored, forms = tensor_forms.to_file(tensors)
    if forms:
        meta = {**meta, tensor_forms.ENTRY: forms}
    safetensors_io.save(target, stored, meta)
    if target is not path:
        for old in rotation(path)[keep:]:  # after the new one is safely written
            old.unlink(missing_ok=True)


def _model_names(lanes: Mapping[str, Any]) -> str:
    if "" in lanes:
        return "one model without a name"
    return f"the models {', '.join(sorted(lanes))}"


def _read(mo: Training, path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The newest sound checkpoint at `path`. With several ranks the first reads it and sends it to the others."""
    if mo.ranks is None:
        source, tensors, meta = _newest(path)
        return source, tensor_forms.from_file(tensors, meta), meta
    read_here: dict[str, Tensor] = {}

    def read_first() -> tuple[Path, dict[str, Any], dict[str, Any]]:
        source, tensors, meta = _newest(path)
        read_here.update(tensors)
        return source, meta, {name: (t.dtype, t.shape) for name, t in tensors.items()}

    source, meta, kinds = mo.ranks.by_first(read_first)
    shared = {name: mo.ranks.share(read_here.get(name), *kind) for name, kind in kinds.items()}
    return source, tensor_forms.from_file(shared, meta), meta


def _newest(path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    if not path.is_dir():
        return path, *safetensors_io.load(path)
    for candidate in rotation(path):
        try:
            return candidate, *safetensors_io.load(candidate)
        except StageError as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=5)
    raise StageError("there is no sound checkpoint in this folder", where=str(path))


def _restore_rng(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> None:
    other_ranks = meta.get("ranks", [])
    if 0 < rank <= len(other_ranks):
        rng_state.redraw(Draws(*unpack(other_ranks[rank - 1], f"rng/{rank}", tensors)))
        return
    rng_state.redraw(Draws(*unpack(meta["rng"], "rng", tensors)))
    if rank:  # more ranks than wrote the checkpoint: a state of its own, derived from the saved one
        rng_state.seed_all(rng_state.mix(int(torch.randint(2**62, ()).item()), rank))


def _load_others(mo: Training, optimizers: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
    """Loads the state of the user's own objects: all of them or, where one refuses, none."""
    loads = [(mo.extras[name], state) for name, state in extras.items()]
    for name, part in optimizers.items():
        lane = mo.lanes[name]
        if lane.custom and part["custom"] is not None and hasattr(lane.optimizer, "load_state_dict"):
            loads.append((lane.optimizer, part["custom"]))
        elif lane.custom:
            optimizer_state.warn_stateless(lane, f"{type(lane.optimizer).__name__} begins without the state it had: "
                                                 "it was not saved, or it has no load_state_dict()")  # fmt: skip
    previous: list[tuple[Any, Any]] = []
    try:
        for target, state in loads:
            # A torch optimizer checks a state before it changes anything, and needs no copy of the previous one.
            if not isinstance(target, torch.optim.Optimizer):
                previous.append((target, copy.deepcopy(target.state_dict())))
            target.load_state_dict(state)
    except BaseException:
        for target, state in reversed(previous):
            target.load_state_dict(state)
        raise


def _changes(old: Any, new: Any, path: str = "") -> list[str]:
    """Fields that differ, except for those that don't change the result of the training."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changes = []
        for key in {**old, **new}:
            changes += _changes(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return changes
    # Which metric is better decides on the rate of a plateau schedule.
    harmless = path.startswith(("monitor.", "memory.", "distributed.")) and path != "monitor.better"
    if old == new or harmless:
        return []
    return [f"{path} was {old!r}, is {new!r}"]
