"""One run of a proof, in a process of its own: after each step it reports a digest of every tensor and counter. Reports
are JSON lines on standard output. Output of the code under proof is redirected to standard error."""

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

from layerline.pipeline.errors import ConfigError, PipeError, StageError, memory_errors
from layerline.pipeline.task import Task
from layerline.training.config.sections import Config
from layerline.training.state import checkpoint, safetensors_io

if TYPE_CHECKING:
    from layerline.training.setup.model_optimizer import ModelOptimizer

SendReport = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Runs the job in the last argument. With `load` it resumes from that checkpoint and calls step() `steps` times.
    Otherwise it begins at `start`, where this checkpoint has two steps or more to go, or anew: `steps` calls, a
    checkpoint in `save`, `steps` calls."""
    job = json.loads(sys.argv[-1])
    # The code under proof may print, which must not mix with the reports.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # also what native code prints

    def report(record: Mapping[str, Any]) -> None:
        out.write(f"{json.dumps(record)}\n")
        out.flush()

    try:
        with memory_errors():
            _run(job, report)
    except PipeError as error:
        report({"error": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint})
        sys.exit(error.exit_code)


def _run(job: Mapping[str, Any], report: SendReport) -> None:
    mo, step, left = _build(job)
    steps = job["steps"]
    if "load" in job:
        mo.load_ckpt(job["load"])
    else:
        start_name = ""
        if job["start"]:
            start_name = mo.load_ckpt(job["start"]).name
            if left() < 2:  # too few steps for two halves: begin anew
                mo, step, left = _build(job)
                start_name = ""
        steps = int(min(steps, left() / 2))
        if not steps:
            raise StageError("this training takes one step, so there is no middle to resume from", where="steps")
        report({"steps": steps, "first": mo.global_step, "from": start_name})
        for _ in range(steps):
            step()
            report({})
        mo.save_ckpt(job["save"])
    for _ in range(steps):
        inputs = step()
        if not isinstance(inputs, dict):
            inputs = {}
        report({"at": mo.global_step, "state": _digests(mo, inputs)})


def _build(job: Mapping[str, Any]) -> tuple[ModelOptimizer, Callable[[], object], Callable[[], float]]:
    """Calls the job's `make`; without a third part of its result, any number of steps is left."""
    source, _, name = job["make"].rpartition(":")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise ConfigError("there is no such file", where=source)
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None and spec.loader is not None
        # Modules beside the file can be imported, as when it is run.
        sys.path.insert(0, str(Path(source).parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look their module up here
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    mo, step, *rest = getattr(module, name)(**job["arguments"])
    if rest:
        return mo, step, rest[0]
    return mo, step, lambda: math.inf


def make_stage(*, task: str, config: Mapping[str, Any], device: str, **fields: Any) -> tuple[ModelOptimizer,
                                                      Callable[[], dict[str, Tensor]], Callable[[], int]]:  # fmt: skip
    """The `make` of the train stage: it runs the stage's own code, so that the proof holds for `pipe run train`. A step
    returns the batches it used. It ends in the middle of the next accumulation window, so that the proof's checkpoint
    lies in an open window, as the stage's own checkpoints may."""
    from layerline.training.distributed import rendezvous
    from layerline.training.run import train_loop

    with train_loop.deterministic():
        typed = Config.model_validate(config)
        run = train_loop.prepare(Task(Path(task)), typed, device=rendezvous.device(device, "train.device"), **fields)
    stream = run.batches.forever()
    half = run.mo.config.accumulate.steps // 2

    def left() -> int:
        return run.total - run.attempted

    def step() -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        before = run.attempted
        with train_loop.deterministic():
            while run.attempted == before or (run.lane.window.micro < half and left()):
                # The next batch may be the epoch's last one, which ends a window early.
                per_epoch = run.batches.per_epoch
                if run.attempted != before and (per_epoch is None or run.batches.position + 1 == per_epoch):
                    break
                place = f"data/epoch {run.batches.epoch}/batch {run.batches.position}"
                batch = train_loop.one_batch(run, stream)
                inputs |= {name: part for name, part in _flat(batch, place) if isinstance(part, Tensor)}
        return inputs

    return run.mo, step, left


def _digests(mo: ModelOptimizer, inputs: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of tensors and the text of counters, by name, in the order in which one can cause the next to differ:
    inputs of the step, random state, then weights, averages, optimizer and the rest."""
    tensors, meta = checkpoint.state(mo, timings=False)  # rows hold measured times, which no run repeats
    state = {name: _digest(tensor) for name, tensor in tensors.items()}
    counters: dict[str, Any] = {"rng": meta["rng"], "extras": meta["extras"]}
    for name, lane in meta["lanes"].items():
        counters |= {name: lane} if name else lane
    for name, value in _flat(counters, ""):
        if not name.endswith("/$"):  # only marks the place of a tensor, which has a digest
            state[name] = json.dumps(value)
    draws_first = sorted(state.items(), key=lambda entry: not entry[0].startswith("rng/"))
    return {name: _digest(tensor) for name, tensor in inputs.items()} | dict(draws_first)


def _digest(tensor: Tensor) -> str:
    """Twelve digits of SHA-256 over a tensor's type, shape and bytes: the same bytes may mean other numbers."""
    sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    sha.update(safetensors_io.raw_bytes(tensor))
    return sha.hexdigest()[:12]


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples by their path; an empty collection is a leaf."""
    items: list[tuple[Any, Any]] = []
    if isinstance(node, Mapping):
        items = list(node.items())
    elif isinstance(node, list | tuple):
        items = list(enumerate(node))
    if not items:
        yield path, node
    for key, value in items:
        yield from _flat(value, f"{path}/{key}".lstrip("/"))
