"""`pipe debug`: the smallest model that shows a stage's fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

TASK = """
import numpy as np
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

def train_data():
    rng = np.random.default_rng(0)
    return rng.standard_normal((64, 4)).astype("f"), rng.integers(0, 2, 64)
"""


def pipe(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "layerline.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug")
    (folder / "task.py").write_text(TASK)
    # No float32 runtime is exact, so the first value that is computed is beyond a tolerance of nothing.
    (folder / "pipe.yaml").write_text("train: {steps: 2, device: cpu}\nexport: {tolerance: {rtol: 0, atol: 0}}\n")
    assert pipe(folder, "debug", "export").returncode == 2, "what it takes from has not run"
    assert pipe(folder, "run", "export").returncode == 1
    return folder


def test_export_is_cut_down_to_the_first_bad_value(project: Path) -> None:
    done = pipe(project, "debug", "export", "-o", "small", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    [row] = told["found"]
    session = ort.InferenceSession(str(project / "small" / "model.onnx"))
    feed = dict(np.load(project / "small" / "inputs.npz"))
    assert [o.name for o in session.get_outputs()] == [row["name"]] and {i.name for i in session.get_inputs()} == set(
        feed
    )
    assert session.run(None, feed)[0].shape == np.load(project / "small" / "expected.npy").shape
    assert len(onnx.load(str(project / "small" / "model.onnx")).graph.node) < 4
    assert sorted(told["files"]) == ["expected.npy", "inputs.npz", "model.onnx", "repro.py"]
    again = pipe(project, "debug", "export", "-o", "small")
    assert again.returncode == 2 and "it is there already" in again.stderr, "nothing is overwritten"


def test_a_stage_that_passes_has_nothing_to_show(project: Path) -> None:
    loose = ("--set", "export.tolerance=auto")
    assert pipe(project, "run", "fuse", *loose).returncode == 0
    done = pipe(project, "debug", "fuse", *loose)
    assert done.returncode == 0 and "every value of fuse passes" in done.stdout
    assert not (project / "debug-fuse").exists()


def test_other_stages_say_so(project: Path) -> None:
    done = pipe(project, "debug", "ema")
    assert done.returncode == 2 and "export, fuse" in done.stderr
