"""Proves that a resumed run equals an uninterrupted one bit for bit: the same steps in one process, and split over two.
Each run has a process of its own, so that only the checkpoint is carried over. After every step both report digests of
all their state, which give the step and the name of the first difference."""

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
# The current folder comes last on the path: a file in it must not hide a module of the standard library.
_START = "import sys; sys.path.append(sys.path.pop(0)); from layerline.training.run.proof_process import main; main()"


@dataclass(frozen=True)
class Difference:
    """The first difference between both runs."""

    name: str  # the tensor or counter, as in a checkpoint; `data/…` is an input of the step
    step: int  # number of the step after which it was noticed, from the beginning of the training
    after: int  # the same, counted from the checkpoint
    straight: str  # straight, resumed: digests of a tensor, or values of a counter
    resumed: str
    max_abs: float | None  # max |a - b| of a tensor at the end of both runs; None where it can't be computed
    # whether resuming a second time gave the result of the first time. If not, the steps are not deterministic, and
    # resuming isn't at fault
    repeats: bool

    def __str__(self) -> str:
        text = (
            f"{self.name} differs first, at step {self.step} ({self.after} after the checkpoint): "
            f"{self.straight} straight, {self.resumed} resumed"
        )
        if self.max_abs is not None:
            text += f"; at the end max |a-b| is {self.max_abs:.3g}"
        return text

    @property
    def hint(self) -> str:
        """The likely cause and what to do about it."""
        if not self.repeats:
            return (
                "resuming is not at fault: a second resumed run differed from the first one. An operator is not "
                "deterministic (torch warns of it), or a hook draws from the clock or the system"
            )
        if self.name.startswith("data/"):
            return (
                "train_data() gave other samples: it has a random generator or a counter of its own. "
                "Draw from random, numpy.random or torch, which are seeded for each batch"
            )
        return (
            "model(), loss() or the loop has state that is neither parameter nor buffer (a Python number, a random "
            "generator): register_buffer() makes it part of the checkpoint, and so does mo.register(). Or the "
            "optimizer has state outside of its state_dict(): torch.save of that dict would not resume exactly either"
        )


@dataclass(frozen=True)
class Proof:
    """The result of the comparison."""

    first: int  # step at which the runs began
    begun_from: str  # name of the checkpoint they began from; empty where they began anew
    steps: int  # calls of step() before the checkpoint, and after it
    compared: int  # number of tensors and counters compared after each step
    accepted: int  # optimizer steps of the straight run that moved the weights; without any nothing is proved
    difference: Difference | None = None  # the first difference; None when everything is equal after every step

    @property
    def passed(self) -> bool:
        return self.difference is None and self.accepted > 0

    @property
    def hint(self) -> str:
        """What to do where it failed; empty where it passed."""
        if self.difference is not None:
            return self.difference.hint
        if self.accepted:
            return ""
        return "see why steps are rejected: nonfinite.triage: true says where it begins"

    def __str__(self) -> str:
        if self.difference is not None:
            return str(self.difference)
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        text = f"all {self.compared} tensors and counters are equal after {steps} in a fresh process"
        if not self.accepted:
            text += ", but no step was accepted: nothing was trained, so nothing is proved"
        return text


def prove(make: str, steps: int, *, arguments: Mapping[str, Any] | None = None, start: Path | None = None,
          progress: Callable[[int, int], object] = lambda *_: None) -> Proof:  # fmt: skip
    """Runs `steps` calls of step(), saves, runs as many again; then a fresh process loads and runs the second half.
    `make` names what builds everything anew, with `arguments`, and returns (ModelOptimizer, step):
    `package.module:function` or `path/to/file.py:function`. A dict of tensors that step() returns is compared as well.
    A third part of the result, a function, tells how many calls are left: fewer than `steps` are made where there is no
    room."""
    if steps < 1:
        raise ConfigError(f"a proof takes a step at least, got {steps}", where="steps")
    with temporary_folder() as folder:
        middle, straight, resumed = (folder / f"{n}.safetensors" for n in ("middle", "straight", "resumed"))
        what = {"make": make, "arguments": dict(arguments or {}), "steps": steps}
        begin = {"start": str(start) if start else "", "middle": str(middle), "save": str(straight)}
        first, *a = _run({**what, **begin}, folder, lambda done: progress(done, 3 * steps))
        # Fewer than asked for, where the training has too few left.
        steps = first["steps"]
        again = {**what, "steps": steps, "load": str(middle), "save": str(resumed)}
        b = _run(again, folder, lambda done: progress(2 * steps + done, 3 * steps))
        proof = Proof(first["first"], first["from"], steps, len(b[-1]["state"]), a[-1]["at"] - first["first"])
        parting = _first_difference(a, b)
        if parting is None:
            return proof
        index, name = parting
        max_abs = _distance(name, straight, resumed)
        # A third run: where resuming differs from itself, resuming is not at fault.
        repeats = _first_difference(b, _run(again, folder, lambda _: None)) is None
    difference = Difference(
        name=name,
        step=a[index]["at"],
        after=index + 1,
        straight=str(a[index]["state"].get(name, "absent")),
        resumed=str(b[index]["state"].get(name, "absent")),
        max_abs=max_abs,
        repeats=repeats,
    )
    return replace(proof, difference=difference)


def _run(job: Mapping[str, Any], folder: Path, progress: Callable[[int], object]) -> list[dict[str, Any]]:
    """The reports of a run in a process of its own. Steps before the checkpoint send an empty one, for the progress."""
    reports: list[dict[str, Any]] = []
    done = 0
    command = [sys.executable, "-c", _START, json.dumps(job)]
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as stderr:
        # A process of its own: nothing but the checkpoint is carried over.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8") as process:  # noqa: S603  (this interpreter, our module)
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    report = json.loads(line)
                    if "error" in report:
                        raise _ERRORS[report["error"]](report["what"], where=report["where"], hint=report["hint"])
                    if "steps" not in report:
                        done += 1
                        progress(done)
                    if report:
                        reports.append(report)
            except BaseException:  # also an interrupt: the process must not stay
                process.kill()
                raise
        if process.returncode:
            stderr.seek(0)
            # The last line of a traceback says what happened.
            lines = stderr.read().strip().splitlines()
            reason = lines[-1] if lines else f"it ended with code {process.returncode}"
            raise StageError(f"the run in a fresh process failed: {reason}", where=str(job["make"]))
    return reports


def _first_difference(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The first step (from 0) after which two runs differ, and the name of what differs first in it."""
    for index, (report_a, report_b) in enumerate(zip(a, b, strict=True)):
        x, y = report_a["state"], report_b["state"]
        # Inputs come first, also those that only one run had.
        for name in sorted({**x, **y}, key=lambda n: not n.startswith("data/")):
            if x.get(name) != y.get(name):
                return index, name
    return None


def _distance(name: str, straight: Path, resumed: Path) -> float | None:
    a = safetensors_io.load(straight)[0].get(name)
    b = safetensors_io.load(resumed)[0].get(name)
    if a is None or b is None or a.shape != b.shape or not a.numel() or name.startswith("rng/"):
        return None
    return float((a.double() - b.double()).abs().max())
