"""Proof that a resumed run goes on bit for bit: the same steps in one process, and split over two.

Each run has a process of its own, so that nothing but the checkpoint can be carried over. After every step both report
digests of all their state: the first difference is known by its step and its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerline.pipeline.errors import ConfigError, PipeError, StageError, TaskError, Unavailable
from layerline.pipeline.records.run_lock import temporary_folder
from layerline.training.state import safetensors_io

_ERRORS: Mapping[str, type[PipeError]] = {e.__name__: e for e in (ConfigError, TaskError, StageError, Unavailable)}
_ABSENT = "absent"
# The current folder comes last: user code may lie there, and must not stand in for a module of python's own.
_START = "import sys; sys.path.append(sys.path.pop(0)); from layerline.training.proof.proof_process import main; main()"


def _untold(*_: int) -> None:
    """The progress of a run that nobody watches."""


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same.

    Attributes:
        name: the tensor or counter, as in a checkpoint; `data/…` is what the step was given.
        step: the run's own number of the step after which it was seen.
        after: the same, counted from the checkpoint.
        straight, resumed: digests of a tensor, values of a counter.
        max_abs: max |a - b| of a tensor at the end of both runs; None where there is no such figure.
        repeats: whether resuming a second time gave what the first time gave. Where it didn't, resuming isn't at fault:
            the steps are not deterministic.
        optimizer: the optimizer that made the difference out of equal gradients; empty where they differ as well.
    """

    name: str
    step: int
    after: int
    straight: str
    resumed: str
    max_abs: float | None
    repeats: bool
    optimizer: str = ""

    def __str__(self) -> str:
        far = "" if self.max_abs is None else f"; at the end max |a-b| is {self.max_abs:.3g}"
        return (
            f"{self.name} differs first, at step {self.step} ({self.after} after the checkpoint): "
            f"{self.straight} straight, {self.resumed} resumed{far}"
        )

    @property
    def hint(self) -> str:
        """What to do about it, by what it begins with."""
        if not self.repeats:
            return (
                "resuming is not at fault: a second time it gave something else again. An operator is not "
                "deterministic, of which torch warns, or a hook draws from the clock or the system"
            )
        if self.name.startswith("data/"):
            return (
                "train_data() gave other samples: it draws from a generator of its own or keeps count between samples. "
                "Draw from random, numpy.random or torch, which are seeded for each batch"
            )
        if self.optimizer:
            return (
                f"the gradients of that step are equal: {self.optimizer} steps differently after loading. It keeps "
                "something outside of its state_dict(), or its load_state_dict() changes it; torch.save of that dict "
                "would not go on exactly either"
            )
        return (
            "model(), loss() or the loop keeps something that is neither parameter nor buffer (a number in Python, a "
            "generator of its own): register_buffer() makes it part of the checkpoint, and so does mo.register()"
        )


@dataclass(frozen=True)
class Proof:
    """What the comparison found.

    Attributes:
        first: step at which the runs began.
        begun_from: name of the checkpoint they began from; empty where they began anew.
        steps: calls of step() before the checkpoint, and after it.
        compared: tensors and counters compared after each step.
        accepted: optimizer steps that moved the weights, in the straight run; where there are none nothing is proved.
        difference: where the runs part; None when all is equal after every step.
    """

    first: int
    begun_from: str
    steps: int
    compared: int
    accepted: int
    difference: Difference | None = None

    @property
    def passed(self) -> bool:
        return self.difference is None and self.accepted > 0

    @property
    def hint(self) -> str:
        """What to do where it failed; empty where it passed."""
        if self.difference is not None:
            return self.difference.hint
        return "" if self.accepted else "see why steps are rejected: nonfinite.triage: true says where it begins"

    def __str__(self) -> str:
        if self.difference is None:
            steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
            none = "" if self.accepted else ", but no step was accepted: nothing was trained, so nothing is proved"
            return f"all {self.compared} tensors and counters are equal after {steps} in a fresh process{none}"
        return str(self.difference)


def prove(make: str, steps: int, *, arguments: Mapping[str, Any] | None = None, start: Path | None = None,
          progress: Callable[[int, int], object] = _untold) -> Proof:  # fmt: skip
    """Runs `steps` calls of step(), saves, runs as many again; then a fresh process loads and runs the second half.

    Args:
        make: what builds everything anew and returns (ModelOptimizer, step): `package.module:function` or
            `path/to/file.py:function`. A dict of tensors that step() returns is compared as well. A third part of the
            result, a function, tells how many calls are left: fewer than `steps` are made where there is no room.
        steps: calls of step() in each half.
        arguments: keyword arguments of the function; plain data.
        start: a checkpoint, or a folder of them, to begin from.
        progress: told (calls made, calls in all).

    Raises:
        PipeError: a run failed; with what it said.
    """
    if steps < 1:
        raise ConfigError(f"a proof takes a step at least, got {steps}", where="steps")
    with temporary_folder() as folder:
        middle, straight, resumed = (folder / f"{n}.safetensors" for n in ("middle", "straight", "resumed"))
        what = {"make": make, "arguments": dict(arguments or {}), "steps": steps}
        begin = {"start": str(start) if start else "", "middle": str(middle), "save": str(straight)}
        first, *a = _run({**what, **begin}, folder, lambda done: progress(done, 3 * steps))
        steps = first["steps"]
        again = {**what, "steps": steps, "load": str(middle), "save": str(resumed)}
        b = _run(again, folder, lambda done: progress(2 * steps + done, 3 * steps))
        proof = Proof(first["first"], first["from"], steps, len(b[-1]["state"]), a[-1]["at"] - first["first"])
        if (found := _parting(a, b)) is None:
            return proof
        far = _distance(found[1], straight, resumed)
        repeats = _parting(b, _run(again, folder, _untold)) is None
    i, name = found
    one, other = (str(run[i]["state"].get(name, _ABSENT)) for run in (a, b))
    blamed = _optimizer(name, a[i]["gradients"], b[i]["gradients"], first["optimizers"])
    return replace(proof, difference=Difference(name, a[i]["at"], i + 1, one, other, far, repeats, blamed))


def _optimizer(name: str, a: Mapping[str, str], b: Mapping[str, str], optimizers: Mapping[str, str]) -> str:
    """The optimizer that writes this tensor, where it stepped on equal gradients in both runs.

    Args:
        name: the tensor that differs.
        a, b: digests of gradients, by the name of their parameter.
        optimizers: by what stands before the names of their model's tensors.
    """
    for prefix, optimizer in optimizers.items():
        mine = {n for n in {**a, **b} if n.startswith(f"{prefix}online/")}
        if mine and (name in mine or name.startswith((f"{prefix}masters/", f"{prefix}optimizer/"))):
            return optimizer if all(a.get(n) == b.get(n) for n in mine) else ""
    return ""


def _run(job: Mapping[str, Any], folder: Path, progress: Callable[[int], object]) -> list[dict[str, Any]]:
    """What a run in a process of its own told; of the steps before the checkpoint it tells only that they were made."""
    told: list[dict[str, Any]] = []
    done = 0
    command = [sys.executable, "-c", _START, json.dumps(job)]
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as said:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, encoding="utf-8") as process:  # noqa: S603  (this interpreter, our module)
            assert process.stdout is not None
            try:
                for fact in map(json.loads, process.stdout):
                    if "error" in fact:
                        raise _ERRORS[fact["error"]](fact["what"], where=fact["where"], hint=fact["hint"])
                    if "steps" not in fact:
                        done += 1
                        progress(done)
                    if fact:
                        told.append(fact)
            except BaseException:  # an interrupt, too: nothing is left running
                process.kill()
                raise
        if process.returncode:
            said.seek(0)
            last = (said.read().strip().splitlines() or [f"it ended with code {process.returncode}"])[-1]
            raise StageError(f"the run in a fresh process failed: {last}", where=str(job["make"]))
    return told


def _parting(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The first step (from 0) after which two runs differ, and the name of what differs first in it."""
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        x, y = one["state"], other["state"]
        names = sorted({**x, **y}, key=lambda n: not n.startswith("data/"))  # what only one was given comes early too
        if differing := next((n for n in names if x.get(n) != y.get(n)), None):
            return i, differing
    return None


def _distance(name: str, straight: Path, resumed: Path) -> float | None:
    a, b = (safetensors_io.load(path)[0].get(name) for path in (straight, resumed))
    if a is None or b is None or a.shape != b.shape or not a.numel() or name.startswith("rng/"):
        return None
    return float((a.double() - b.double()).abs().max())
