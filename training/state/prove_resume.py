"""Proves that a resumed run equals an uninterrupted one bit for bit: the same steps in one process, and split over two.
Each run has a process of its own, so that only the checkpoint is carried over. After every step both report digests of
all their state, which give the step and the name of the first difference."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerline.pipeline.errors import ConfigError, PipeError, StageError, TaskError, Unavailable
from layerline.pipeline.records.run_lock import temporary_folder

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
    repeats: bool  # whether a second resumed run equals the first; else the steps are not deterministic

    def __str__(self) -> str:
        return (
            f"{self.name} differs first, at step {self.step} ({self.after} after the checkpoint): "
            f"{self.straight} straight, {self.resumed} resumed"
        )

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
class ResumeProof:
    """The result of the comparison."""

    first: int  # step at which the runs began
    begun_from: str  # name of the checkpoint they began from; empty where they began anew
    steps: int  # calls of step() before the checkpoint, and after it
    compared: int  # number of tensors and counters compared after each step
    accepted: int  # optimizer steps of the straight run that moved the weights; without any nothing is proved
    difference: Difference | None = None  # None when everything is equal after every step

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


def prove(make: str, steps: int, *, arguments: Mapping[str, Any] | None = None, start: str | Path | None = None,
          progress: Callable[[int, int], object] = lambda *_: None) -> ResumeProof:  # fmt: skip
    """Runs `steps` calls of step(), saves, runs as many again; then a fresh process loads and runs the second half.

    Args:
        make: `package.module:function` or `path/to/file.py:function`, which builds everything anew and returns
            (ModelOptimizer, step). A dict of tensors that step() returns is compared as well. A third part of the
            result, a function, tells how many calls are left: each half gets half of them where they are too few.
        arguments: of that function.
        start: a checkpoint, or a folder of them, to begin from.
    """
    if steps < 1:
        raise ConfigError(f"a proof takes a step at least, got {steps}", where="steps")
    with temporary_folder() as folder:
        middle = str(folder / "middle.safetensors")
        job = {"make": make, "arguments": dict(arguments or {}), "steps": steps, "start": str(start or "")}
        first, *straight = _run({**job, "save": middle}, folder, lambda done: progress(done, 3 * steps))
        # Fewer than asked for, where the training has too few left.
        steps = first["steps"]
        job |= {"steps": steps, "load": middle}
        resumed = _run(job, folder, lambda done: progress(2 * steps + done, 3 * steps))
        difference = None
        place = _first_difference(straight, resumed)
        if place is not None:
            index, name = place
            # A third run: where resuming differs from itself, resuming is not at fault.
            repeats = _first_difference(resumed, _run(job, folder, lambda _: None)) is None
            difference = Difference(
                name=name,
                step=straight[index]["at"],
                after=index + 1,
                straight=str(straight[index]["state"].get(name, "absent")),
                resumed=str(resumed[index]["state"].get(name, "absent")),
                repeats=repeats,
            )
    accepted = straight[-1]["at"] - first["first"]
    return ResumeProof(first["first"], first["from"], steps, len(resumed[-1]["state"]), accepted, difference)


def _run(job: Mapping[str, Any], folder: Path, progress: Callable[[int], object]) -> list[dict[str, Any]]:
    """The reports of a run in a process of its own. Steps before the checkpoint send an empty one, for the progress."""
    reports: list[dict[str, Any]] = []
    done = 0
    command = [sys.executable, "-c", _START, json.dumps(job)]
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as stderr:
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
            lines = stderr.read().strip().splitlines() or [f"it ended with code {process.returncode}"]
            raise StageError(f"the run in a fresh process failed: {lines[-1]}", where=str(job["make"]))
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
