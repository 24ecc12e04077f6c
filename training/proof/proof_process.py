"""One run of a proof, in a process of its own: it tells, after each step, a digest of every tensor and counter.

What it tells are JSON lines on standard output; whatever the code under proof prints goes to standard error.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerline.pipeline.errors import ConfigError, PipeError, StageError, memory_told
from layerline.training.model.split_tensors import whole
from layerline.training.state import checkpoint, safetensors_io

if TYPE_CHECKING:
    from layerline.training.loop.step_engine import Lane
    from layerline.training.model_optimizer import ModelOptimizer

Say = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """The job is the last argument.

    With `load`: goes on from that checkpoint for `steps` calls of step(). Else from `start`, where there is one with
    two steps or more to go, or from the beginning: as many calls, a checkpoint in `middle`, as many calls again.
    """
    job = json.loads(sys.argv[-1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(fact: Mapping[str, Any]) -> None:
        out.write(f"{json.dumps(fact)}\n")
        out.flush()

    try:
        with memory_told():
            _run(job, say)
    except PipeError as error:
        say({"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint})
        sys.exit(error.exit_code)


def _run(job: Mapping[str, Any], say: Say) -> None:
    mo, step, left = _made(job)
    if "load" in job:
        mo.load_ckpt(job["load"])
        steps = job["steps"]
    else:
        begun = mo.load_ckpt(job["start"]).name if job["start"] else ""
        if begun and left() < 2:  # nothing of it can be halved any more
            (mo, step, left), begun = _made(job), ""
        steps = int(min(job["steps"], left() / 2))
        if not steps:
            raise StageError("this training takes one step: it has no middle to go on from", where="steps")
        optimizers = {f"{name}/" if name else "": type(lane.optimizer).__name__ for name, lane in mo.lanes.items()}
        say({"steps": steps, "first": mo.global_step, "from": begun, "optimizers": optimizers})
        for _ in range(steps):
            step()
            say({})
        mo.save_ckpt(job["middle"])
    gradients = _watched(mo)
    for _ in range(steps):
        seen = step()
        state = fingerprint(mo, seen if isinstance(seen, dict) else {})
        say({"at": mo.global_step, "state": state, "gradients": dict(gradients)})
        gradients.clear()
    checkpoint.save(mo, Path(job["save"]), timings=False)


def fingerprint(mo: ModelOptimizer, seen: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of tensors and the text of counters, by name; what comes first can be the cause of what comes later.

    First what the step was given, then the random state, then weights, averages, optimizer and the rest.
    """
    tensors, meta = checkpoint.state(mo, timings=False)  # rows hold measured times, which no run repeats
    kept = {"rng": meta["rng"], "extras": meta["extras"]}
    lanes = {k: v for name, lane in meta["lanes"].items() for k, v in ({name: lane} if name else lane).items()}
    state = {n: digest(t) for n, t in tensors.items()} | dict(_counters({**kept, **lanes}))
    order = sorted(state, key=lambda name: not name.startswith("rng/"))
    return {n: digest(t) for n, t in seen.items()} | {n: state[n] for n in order}


def _watched(mo: ModelOptimizer) -> dict[str, str]:
    """Digests of the gradients that each optimizer gets, by name; filled by the steps that follow."""
    seen: dict[str, str] = {}

    def watch(prefix: str, lane: Lane, move: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            grads = {n: p.grad for n, p in zip(lane.names, lane.stepped, strict=True) if p.grad is not None}
            seen.update({f"{prefix}online/{n}": digest(whole(g)) for n, g in grads.items()})
            move()

        return watched

    for name, lane in mo.lanes.items():
        setattr(lane, "_move", watch(f"{name}/" if name else "", lane, lane._move))  # noqa: B010  (a method)
    return seen


def digest(tensor: Tensor) -> str:
    """Twelve digits of SHA-256 over a tensor's type, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(safetensors_io.raw_bytes(tensor))
    return found.hexdigest()[:12]


def _counters(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict | list) and node:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _counters(value, f"{path}/{key}" if path else str(key))
    elif not path.endswith("/$"):  # says only that a tensor stands here, which has a digest
        yield path, json.dumps(node)


def _made(job: Mapping[str, Any]) -> tuple[ModelOptimizer, Callable[[], object], Callable[[], float]]:
    mo, step, *left = _function(job["make"])(**job["arguments"])
    return mo, step, left[0] if left else lambda: math.inf


def _function(make: str) -> Callable[..., Any]:
    place, _, name = make.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ConfigError("there is no such file", where=place)
        sys.path.insert(0, str(Path(place).parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Callable[..., Any] = getattr(module, name)
    return function
