"""What a key is made of, and how a change of it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest

from layerline.pipeline.config.project import Project
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys import env, stage_code
from layerline.pipeline.records.ledger import Ledger
from layerline.pipeline.records.store import Store
from layerline.pipeline.report import Report
from layerline.pipeline.run.plan import Planner, shown
from layerline.pipeline.stage import Stage, Work
from tests.pipeline.fakes import Folder


class Bag(Stage):
    """Holds what a configuration may hold."""

    name: ClassVar[str] = "bag"
    version: ClassVar[int] = 1
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "bag"

    value: Any = None

    def run(self, work: Work) -> Report:
        return Report(stage=self.name)


def key(tmp_path: Path, value: Any) -> str:
    project = Project(root=tmp_path, name="p", task="task.py", data=(), stages=(Bag(value=value),))
    hasher = Hasher(tmp_path / "memo")
    planner = Planner(project, Store(tmp_path / "store", hasher), Ledger(tmp_path / "ledger"), hasher)
    found = planner.steps()[0].key
    assert found is not None
    return found


GOLDEN = {"lr": 0.1, "sizes": [1, 2], "on": True, "tags": {"x", "y", "z"}}


def test_golden_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stage_code, "digest", lambda stage, hasher: "c" * 64
    )  # that of this file changes with every edit
    assert key(tmp_path, GOLDEN) == "b7ad04dd010eabd64d5c15a581429e699455e426d88cb074524f2bef51566d8c"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_golden_key_in_another_process_and_folder(seed: str, tmp_path: Path) -> None:
    program = "from tests.pipeline.test_plan import *; print(key(Path('.'), GOLDEN))"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == key(tmp_path, GOLDEN), done.stderr


def test_configurations_that_look_alike_have_keys_of_their_own(tmp_path: Path) -> None:
    values: list[Any] = [
        *(None, {}, [], "", 0, 0.0, -0.0, False, "0", [1], ["1"], [[1]], float("nan")),
        *({"a": None}, {"a": {}}, {"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": True}, {1: 1}, {"1": 1}),
        *({"a.b": 1}, {"a": {"b": 1}}, {"b": {"a": 1}}),
    ]
    assert len({key(tmp_path, v) for v in values}) == len(values)
    assert key(tmp_path, float("nan")) == key(tmp_path, float("nan"))
    assert key(tmp_path, (1, 2)) == key(tmp_path, [1, 2])


def test_parts_by_name(folder: Folder) -> None:
    folder.write("pipe.yaml", "data: [x.csv]\nsource: {schedule: {warmup: 2}}\n")
    folder.write("x.csv", "1")
    folder.run(["source"])
    source, double, judge = folder.runner().planner.steps()
    assert source.artifact is not None
    assert {n: v for n, v in source.parts.items() if n.startswith(("stage", "version", "config"))} == {
        "stage": "source",
        "version": 1,
        "config.rate": 1.0,
        "config.epochs": 1,
        "config.ignored": "",
        "config.schedule.warmup": 2,
        "config.schedule.decay": "cosine",
        "config.layers": (),
        "config.sizes": {},
    }
    rest = [n for n in source.parts if not n.startswith(("stage", "version", "config"))]
    assert rest == ["env.torch", "code", "hook.model", "hook.train_data", "hook.loss", "file.x.csv"]
    assert "file.x.csv" not in double.parts and double.parts["input.model"] == source.artifact.digest
    assert (judge.key, judge.reason) == (None, "after double")
    assert "file.x.csv" in judge.parts  # its data hooks may read it


def test_what_could_not_be_followed_is_told(folder: Folder) -> None:
    folder.write("images/1.png", "x")
    folder.edit("task.py", "return [1, 2, 3]", "globals(); len('images'); return [1, 2, 3]")
    notes = folder.runner().planner.steps()[0].notes
    assert notes == (
        "train_data(): helper.py counts whole: task.py uses the module helper as a value",
        "train_data(): task.py counts whole: train_data uses globals",
        "train_data() names the folder images: what is in it counts only under `data:`",
    )
    folder.write("pipe.yaml", "data: [images]")
    assert len(folder.runner().planner.steps()[0].notes) == 2


def test_sets_are_shown_in_one_order() -> None:
    words = {f"w{i}" for i in range(20)}
    assert shown({"a": words, "b": [frozenset({2, 1})], "c": "text", "d": None}) == {
        "a": "{" + ", ".join(repr(w) for w in sorted(words)) + "}",
        "b": "[{1, 2}]",
        "c": "text",
        "d": "None",
    }


def test_facts_are_found_without_importing_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; from layerline.pipeline.keys import env; print(env.fact('numpy'), 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    version, imported = done.stdout.split()
    assert version == env.fact("numpy") != "absent" and imported == "False"
    assert env.fact("no-such-distribution") == "absent"
    monkeypatch.setattr(
        metadata, "version", lambda name: {"onnxruntime": "1.2"}[name] if name == "onnxruntime" else _raise()
    )
    assert env.fact("onnxruntime") == "1.2"  # whichever distribution is installed speaks for the name
    assert env.fact("gpu") == "absent" or "." in env.fact("gpu")


def _raise() -> str:
    raise metadata.PackageNotFoundError
