"""Every command and snippet of the README runs as it stands, on the project that the README makes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from layerline.graph.io import inline_functions
from layerline.pipeline import stage_table, untrusted
from layerline.pipeline.commands.debug import Debugs
from layerline.pipeline.config import bounded_yaml
from layerline.pipeline.inputs import npz
from layerline.pipeline.records import ledger
from layerline.views import options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PIPE = [sys.executable, "-m", "layerline.cli"]


def shell(command: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command, comments=True)
    words = [*PIPE, *words[1:]] if words[0] == "pipe" else words
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=600
    )


def pipe_json(folder: Path, *words: str) -> dict[str, object]:
    done = subprocess.run([*PIPE, *words, "--json"], cwd=folder, capture_output=True, text=True, timeout=600)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def session(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[str, subprocess.CompletedProcess[str]]]]:
    """The README's console session, run line by line; the project's folder and what each line printed."""
    folder = tmp_path_factory.mktemp("readme")
    block = re.search(r"```console\n(.*?)```", README, re.DOTALL)
    assert block is not None
    done = []
    for line in block.group(1).splitlines():
        command = line.removeprefix("$ ")
        if command.startswith("cd "):
            folder = folder / command.removeprefix("cd ")
            continue
        done.append((command, shell(command, folder)))
    return folder, done


def test_every_line_of_the_session_succeeds(session) -> None:
    for command, done in session[1]:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_second_run_is_all_cached(session) -> None:
    runs = [done.stdout for command, done in session[1] if command == "pipe run all"]
    states = [re.findall(r"^. (\w+) +(ran|cached)", out, re.MULTILINE) for out in runs]
    stages = ["train", "ema", "export", "fuse", "quantize", "engine"]
    assert states == [[(s, "ran") for s in stages], [(s, "cached") for s in stages]]


def test_the_example_keeps_its_promises(session) -> None:
    folder = session[0]
    stages = {s["name"]: s for s in pipe_json(folder, "run", "all")["stages"]}  # type: ignore[index]
    quantised = stages["quantize"]["metrics"]
    assert quantised["accuracy_float"] >= 0.97
    assert quantised["accuracy_float"] - quantised["accuracy"] <= 0.005
    engine = Path(shell("pipe path engine", folder).stdout.strip())
    record = json.loads((engine / "engine.json").read_text())
    assert len(record["profiles"]) == 2
    assert record["layers"]["compute_by_precision"]["int8"] > 0
    assert (engine / "engine.plan").stat().st_size > 0


def test_fusion_folds_every_batchnorm_of_the_example(session) -> None:
    fused = onnx.load(str(Path(shell("pipe path fuse", session[0]).stdout.strip()) / "model.onnx"))
    exported = onnx.load(str(Path(shell("pipe path export", session[0]).stdout.strip()) / "model.onnx"))
    assert sum(n.op_type == "BatchNormalization" for n in exported.graph.node) == 6
    assert not [n.name for n in fused.graph.node if n.op_type == "BatchNormalization"]


def test_bring_your_own_commands(session, tmp_path: Path) -> None:
    digits, commands = session[0], re.findall(r"^ {4}(pipe init .*)$", README, re.MULTILINE)
    assert len(commands) == 2
    exported = Path(shell("pipe path export", digits).stdout.strip())
    (tmp_path / "model.onnx").write_bytes((exported / "model.onnx").read_bytes())
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "samples.npz", x=rng.random((32, 1, 28, 28), np.float32), label=rng.integers(0, 10, 32))
    weights = Path(shell("pipe path ema", digits).stdout.strip()) / "model.safetensors"
    (tmp_path / "weights.safetensors").write_bytes(weights.read_bytes())
    assert "stem.0.weight" in load_file(weights)
    (tmp_path / "nets.py").write_text((digits / "task.py").read_text() + "\n\ndef build():\n    return Net()\n")
    for command in commands:
        done = shell(command, tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / command.split()[2] / "pipe.yaml").is_file()


def test_the_python_snippet_runs(tmp_path: Path) -> None:
    snippet = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippet is not None
    setting = (
        "import torch\nmodel = torch.nn.Linear(4, 2)\ncriterion = torch.nn.CrossEntropyLoss()\n"
        "loader = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setting + snippet.group(1)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "last.safetensors").is_file()


@pytest.mark.parametrize("target", ["run", "test"])
def test_make_targets_of_the_first_screen_exist(target: str) -> None:
    assert f"make {target}" in README.split("## Install")[0]
    assert subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True).returncode == 0


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_bounds_that_security_states_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "SECURITY.md").read_text("utf-8").split())
    for stated in (
        f"{bounded_yaml.SIZE:,} characters and {bounded_yaml.VALUES:,} values",
        f"a JSON record or report {ledger._RECORD_BYTES >> 20} MiB",
        f"at most {npz.UNPACKED >> 30} GiB or {npz.RATIO} times its size",
        f"at most {untrusted.DIGITS} digits",
        f"at most {inline_functions.MOST_NODES:,} nodes",
    ):
        assert stated in text, stated


def test_debug_is_offered_for_the_stages_that_have_one() -> None:
    able = [name for name in stage_table.BUILT_IN if isinstance(stage_table.stage_class(name), Debugs)]
    assert " or ".join(able) == options.DEBUGGED
    row = "| `pipe debug " + "\\|".join(able) + " [-o DIR]` |"
    assert row in (ROOT / "docs" / "cli.md").read_text("utf-8")
