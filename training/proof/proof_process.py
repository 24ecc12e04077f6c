"""One run of a proof in a process of its own: reports a digest of every tensor and counter after each step.

Reports are JSON lines on standard output. Output of the code under proof is redirected to standard error.
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

Report = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Runs the job in the last argument.

    With `load` it resumes from that checkpoint and calls step() `steps` times. Otherwise it begins at `start`, where
    this checkpoint has two steps or more to go, or anew: `steps` calls, a checkpoint in `middle`, `steps` calls.
    """
    job = json.loads(sys.argv[-1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(record: Mapping[str, Any]) -> None:
        out.write(f"{json.dumps(record)}\n")
        out.flush()

    try:
        with memory_told():
            _run(job, report)
    except PipeError as error:
        report({"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint})
        sys.exit(error.exit_code)


def _run(job: Mapping[str, Any], report: Report) -> None:
    mo, step, left = _build(job)
    if "load" in job:
        mo.load_ckpt(job["load"])
        steps = job["steps"]
    else:
        start_name = ""
        if job["start"]:
            start_name = mo.load_ckpt(job["start"]).name
            if left() < 2:  # too few steps for two halves: begin anew
                mo, step, left = _build(job)
                start_name = ""
        steps = int(min(job["steps"], left() / 2))
        if not steps:
            raise StageError("this training takes one step, so there is no middle to resume from", where="steps")
        optimizers = {_prefix(name): type(lane.optimizer).__name__ for name, lane in mo.lanes.items()}
        report({"steps": steps, "first": mo.global_step, "from": start_name, "optimizers": optimizers})
        for _ in range(steps):
            step()
            report({})
        mo.save_ckpt(job["middle"])
    gradients = _watched(mo)
    for _ in range(steps):
        inputs = step()
        state = fingerprint(mo, inputs if isinstance(inputs, dict) else {})
        report({"at": mo.global_step, "state": state, "gradients": dict(gradients)})
        gradients.clear()
    checkpoint.save(mo, Path(job["save"]), timings=False)


def fingerprint(mo: ModelOptimizer, inputs: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of tensors and the text of counters, by name, in the order in which one can cause the next to differ:
    inputs of the step, random state, then weights, averages, optimizer and the rest.
    """
    tensors, meta = checkpoint.state(mo, timings=False)  # rows hold measured times, which no run repeats
    counters: dict[str, Any] = {"rng": meta["rng"], "extras": meta["extras"]}
    for name, lane in meta["lanes"].items():
        counters |= {name: lane} if name else lane
    state = {name: digest(tensor) for name, tensor in tensors.items()}
    state |= dict(_flat_counters(counters))
    order = sorted(state, key=lambda name: not name.startswith("rng/"))
    digests = {name: digest(tensor) for name, tensor in inputs.items()}
    return digests | {name: state[name] for name in order}


def _watched(mo: ModelOptimizer) -> dict[str, str]:
    """Digests of the gradients that each optimizer gets, by name. Each following step fills them in."""
    digests: dict[str, str] = {}

    def watch(prefix: str, lane: Lane, move: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            for name, param in zip(lane.names, lane.stepped, strict=True):
                if param.grad is not None:
                    digests[f"{prefix}online/{name}"] = digest(whole(param.grad))
            move()

        return watched

    for name, lane in mo.lanes.items():
        setattr(lane, "_move", watch(_prefix(name), lane, lane._move))  # noqa: B010  (mypy refuses to assign a method)
    return digests


def _prefix(model_name: str) -> str:
    return f"{model_name}/" if model_name else ""


def digest(tensor: Tensor) -> str:
    """Twelve digits of SHA-256 over a tensor's type, shape and bytes."""
    sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    sha.update(safetensors_io.raw_bytes(tensor))
    return sha.hexdigest()[:12]


def _flat_counters(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict | list) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from _flat_counters(value, f"{path}/{key}" if path else str(key))
    elif not path.endswith("/$"):  # only marks the place of a tensor, which has a digest
        yield path, json.dumps(node)


def _build(job: Mapping[str, Any]) -> tuple[ModelOptimizer, Callable[[], object], Callable[[], float]]:
    mo, step, *left = _function(job["make"])(**job["arguments"])
    if left:
        return mo, step, left[0]
    return mo, step, lambda: math.inf


def _function(make: str) -> Callable[..., Any]:
    source, _, name = make.rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        if spec is None or spec.loader is None or not Path(source).is_file():
            raise ConfigError("there is no such file", where=source)
        sys.path.insert(0, str(Path(source).parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    function: Callable[..., Any] = getattr(module, name)
    return function
