"""Tiny stages that stand in for the real ones: the pipeline knows none of them by name, so it can't tell."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from layerline.pipeline import stage_table
from layerline.pipeline.config import project as projects
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Gate, LayerDiff, Report
from layerline.pipeline.run.outcome import Outcome, Result
from layerline.pipeline.run.runner import Runner
from layerline.pipeline.stage import Stage, Work


class Schedule(BaseModel):
    """A nested part of a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warmup: int = 0
    decay: Literal["cosine", "linear", "none"] = "cosine"


class Source(Stage):
    """Like training: numbers out of the task's hooks, with a side file that differs every time."""

    name: ClassVar[str] = "source"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "numbers"
    uses: ClassVar[tuple[str, ...]] = ("model", "train_data", "loss")
    env: ClassVar[tuple[str, ...]] = ("torch",)
    side: ClassVar[frozenset[str]] = frozenset({"timing.txt"})

    rate: float = 1.0
    epochs: int = 1
    ignored: str = ""
    schedule: Schedule = Schedule()
    layers: tuple[Schedule, ...] = ()
    sizes: Mapping[int, int] = Field(default_factory=dict)

    def run(self, work: Work) -> Report:
        model, data = work.task.call("model"), work.task.call("train_data")
        numbers = [float(work.task.call("loss", model, x)) * self.rate * self.epochs for x in data]
        write(work.out / "numbers.json", numbers)
        write(work.out / "deep" / "inside" / "more.json", {"count": len(numbers)})
        (work.out / "timing.txt").write_text(str(time.time_ns()))
        return Report(stage=self.name, metrics={"sum": sum(numbers), "worst_case": float("nan")})


class Double(Stage):
    """Like export: no hooks, one layer a number."""

    name: ClassVar[str] = "double"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {"model": "numbers"}
    gives: ClassVar[str] = "doubled"
    env: ClassVar[tuple[str, ...]] = ("onnxruntime",)

    factor: int = 2
    tolerance: float | None = None

    def run(self, work: Work) -> Report:
        numbers = read(work.inputs["model"] / "numbers.json")
        write(work.out / "doubled.json", [n * self.factor for n in numbers])
        layers = [
            LayerDiff(
                name=f"mul_{i}",
                op="Mul",
                module=f"layers.{i}",
                rel_l2=i / 10,
                sqnr_db=60.0 - i,
                tolerance=self.tolerance,
            )
            for i in range(len(numbers))
        ]
        return Report(stage=self.name, reference="numbers", candidate="doubled", records=tuple(layers))


class Judge(Stage):
    """Like quantization: metric and eval data, and a gate."""

    name: ClassVar[str] = "judge"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {"model": "doubled"}
    gives: ClassVar[str] = "judged"
    uses: ClassVar[tuple[str, ...]] = ("eval_data", "metric")
    env: ClassVar[tuple[str, ...]] = ("tensorrt", "gpu")

    at_least: float = 0.0

    def run(self, work: Work) -> Report:
        outputs = read(work.inputs["model"] / "doubled.json")
        score = float(work.task.call("metric", outputs, work.task.call("eval_data")))
        write(work.out / "score.json", score)
        gate = Gate("score", score >= self.at_least, f"{score:g}", f"at least {self.at_least:g}", "train longer")
        return Report(stage=self.name, metrics={"score": score}, gates=(gate,), notes=("measured here",))


class Slow(Stage):
    """Takes its time in steps, each kept in scratch, and says in a file outside how far it is."""

    name: ClassVar[str] = "slow"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {"model": "judged"}
    gives: ClassVar[str] = "slowed"

    steps: int = 4
    seconds: float = 0.0

    def run(self, work: Work) -> Report:
        progress = work.scratch / "step"
        first = int(progress.read_text()) if progress.exists() else 0
        for step in range(first, self.steps):
            work.log.progress(step, self.steps, step=step)
            time.sleep(self.seconds)
            progress.write_text(str(step + 1))
        write(work.out / "steps.json", self.steps)
        return Report(stage=self.name, metrics={"resumed_at": first})


class Fault(Stage):
    """Goes wrong in the way it is told to."""

    name: ClassVar[str] = "fault"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {"model": "doubled"}
    gives: ClassVar[str] = "faulty"

    how: Literal["none", "stage", "full", "read-only", "memory", "bug", "interrupt", "link", "manifest", "answer"] = (
        "none"
    )

    def run(self, work: Work) -> Report:
        errors: dict[str, BaseException] = {
            "stage": StageError("channel 3 is all zeros", where="conv1.weight", hint="prune it"),
            "full": OSError(errno.ENOSPC, "No space left on device", "weights.bin"),
            "read-only": OSError(errno.EROFS, "Read-only file system", "weights.bin"),
            "memory": MemoryError(),
            "bug": ZeroDivisionError("a bug"),
            "interrupt": KeyboardInterrupt(),
        }
        if self.how in errors:
            raise errors[self.how]
        write(work.out / "fine.json", 1)
        if self.how == "link":
            (work.out / "link").symlink_to(work.scratch)
        if self.how == "manifest":
            write(work.out / "artifact.json", {})
        return 5 if self.how == "answer" else Report(stage=self.name)  # type: ignore[return-value]


class ImportNumbers(Stage):
    """Stands in for `source`: a project that starts from a file."""

    name: ClassVar[str] = "import-numbers"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "numbers"

    file: Path

    def files(self) -> tuple[str, ...]:
        return (str(self.file),)

    def run(self, work: Work) -> Report:
        write(work.out / "numbers.json", json.loads((work.task.path.parent / self.file).read_text()))
        return Report(stage=self.name)


class Treble(Double):
    """Stands in for `double`."""

    name: ClassVar[str] = "treble"

    factor: int = 3
    offset: int = 0

    def run(self, work: Work) -> Report:
        numbers = read(work.inputs["model"] / "numbers.json")
        write(work.out / "doubled.json", [n * self.factor + self.offset for n in numbers])
        return Report(stage=self.name)


STANDARD = {n: f"{__name__}:{n.capitalize()}" for n in ("source", "double", "judge")}
ON_REQUEST = {
    "slow": f"{__name__}:Slow",
    "fault": f"{__name__}:Fault",
    "treble": f"{__name__}:Treble",
    "import-numbers": f"{__name__}:ImportNumbers",
}

TASK = """\
import helper

BIAS = 1


def model():
    return helper.build(BIAS)


def train_data():
    return [1, 2, 3]


def loss(model, x):
    return model * x


def eval_data():
    return [2.0, 4.0, 6.0]


def metric(outputs, targets):
    \"\"\"How many are right.\"\"\"
    return sum(a == b for a, b in zip(outputs, targets))
"""
HELPER = """\
WIDTH = 1


def build(bias):
    return WIDTH * bias


def unused():
    return 0
"""


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def install(patch: Any) -> None:
    """Puts the fake stages in place of the real ones, through `patch(object, name, value)`."""
    patch(stage_table, "BUILT_IN", STANDARD)
    patch(stage_table, "names", lambda: ON_REQUEST | STANDARD)
    stage_table.stage_class.cache_clear()
    stage_table.stand_in.cache_clear()


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.began: list[str] = []
        self.ended: list[Result] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, done: int, total: int, **fields: float | str) -> None: ...

    def row(self, figures: Any) -> None: ...

    def started(self, stage: Stage, reason: str) -> None:
        self.began.append(stage.name)

    def finished(self, result: Result) -> None:
        self.ended.append(result)


class Folder:
    """A project on disk, and short names for what tests do with one."""

    def __init__(self, root: Path, yaml: str = "", task: str = TASK, helper: str = HELPER) -> None:
        self.root, self.state = root, root / ".layerline"
        root.mkdir(parents=True, exist_ok=True)
        self.write("pipe.yaml", yaml)
        self.write("task.py", task)
        self.write("helper.py", helper)
        self.listener = Listener()

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text, f"{old!r} is not in {name}"
        self.write(name, text.replace(old, new))

    def load(self, *sets: str) -> projects.Project:
        return projects.load(self.root, sets)

    def runner(self, *sets: str) -> Runner:
        self.listener = Listener()
        return Runner(self.load(*sets), self.listener)

    def run(self, names: Sequence[str] | None = None, *sets: str, force: bool = False) -> Outcome:
        return self.runner(*sets).run(names, force=force)

    def ran(self, names: Sequence[str] | None = None, *sets: str, force: bool = False) -> list[str]:
        """Names of the stages that worked in a run that must pass."""
        done = self.run(names, *sets, force=force)
        assert done.passed, [str(r.error) for r in done.results if r.error]
        assert self.listener.began == [r.name for r in done.results if r.state == "ran"]
        return self.listener.began

    def artifact(self, stage: str) -> Path:
        record = self.runner().ledger.head(stage)
        assert record is not None
        return self.state / "store" / record.digest
