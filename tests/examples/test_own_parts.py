"""The example package is installed, and its stage and its backend are used by a project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from layerline import cli
from layerline.backends import subprocess_build
from layerline.pipeline import stage_table
from tests.backends import models
from tests.stages.conftest import _here as in_this_process

ROOT = Path(__file__).parents[2]
PIPE_YAML = """
import-onnx: {file: net.onnx, data: samples.npz}
quantize: {use: weights-only, min_db: 30}
"""
TASK = """
import numpy as np

def eval_data():
    with np.load("samples.npz") as file:
        return {**file, "label": np.zeros(len(file["x"]), np.int64)}

def metric(outputs, targets):
    return {"mean": float(outputs.mean())}
"""
Pipe = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on sys.path, with the package as pip installs it."""
    # Looked for and not imported: setuptools replaces distutils, which something may have imported before.
    for tool in ("pip", "setuptools"):
        if find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
    source, target = tmp_path_factory.mktemp("source") / "own_parts", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "own_parts", source)  # a build leaves files beside the source
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", target, source], check=True)
    return target


@pytest.fixture
def pipe(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Pipe]:
    """Runs `pipe ARGUMENTS --json` in a project that uses the package: exit code and document."""
    onnx.save(models.conv(), str(tmp_path / "net.onnx"))
    x = np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=x)
    (tmp_path / "pipe.yaml").write_text(PIPE_YAML)
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(subprocess_build, "bounded", in_this_process)
    caches = (stage_table.names, stage_table.stage_class, stage_table.stand_in)

    def run(*arguments: str) -> tuple[int, Any]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipe", *arguments, "--json"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), json.loads(capfd.readouterr().out)

    for cache in caches:
        cache.cache_clear()
    yield run
    for cache in caches:
        cache.cache_clear()


def test_the_stage_stands_in_and_models_run_on_the_backend(pipe: Pipe) -> None:
    code, done = pipe("run", "quantize")
    assert code == 0 and [stage["name"] for stage in done["stages"]] == ["import-onnx", "fuse", "quantize"]
    assert done["stages"][-1]["metrics"]["weights"] == 1
    folder = Path(pipe("path", "quantize")[1]["path"])
    model = onnx.load(folder / "model.onnx")
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    restored = stored["w/int8"] * stored["w/scale"].reshape(-1, 1, 1, 1)
    # Half a step of each channel's scale.
    assert np.all(np.abs(restored - models.WEIGHT) <= stored["w/scale"].reshape(-1, 1, 1, 1) * 0.5001)

    code, shown = pipe("diff", "quantize", "--on", "onnx-reference")
    rows = {row["name"]: row for row in shown["report"]["records"]}
    assert code == 0 and shown["report"]["candidate"] == "onnx on onnx-reference"
    # A stored weight that is only dequantised has no row.
    assert {"c", "y"} <= rows.keys() and "w" not in rows and all(row["rel_l2"] < 1e-5 for row in rows.values())
    metrics = shown["report"]["metrics"]
    assert metrics["mean"] == pytest.approx(metrics["mean_reference"], rel=1e-5)


def test_the_stages_fields_are_checked(pipe: Pipe) -> None:
    code, error = pipe("run", "quantize", "--set", "quantize.mindb=3")
    assert code == 2 and "unknown field" in error["error"] and "min_db" in error["hint"]
    code, error = pipe("run", "quantize", "--set", "quantize.skip=[v]")
    assert code == 2 and error["where"] == "quantize.skip" and error["hint"] == "the weights are w"
    code, error = pipe("run", "quantize", "--set", "quantize.min_db=90")
    assert code == 1 and "expected at least 90 dB" in error["error"]


def test_help_lists_the_stage_and_an_unknown_backend_is_told_of_the_installed_one(installed: Path, pipe: Pipe) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "layerline", "run", "--help"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "weights-only" in shown
    pipe("run", "fuse")
    code, error = pipe("diff", "fuse", "--on", "onnx-referenc")
    assert code == 2 and "onnx-reference" in error["hint"]
