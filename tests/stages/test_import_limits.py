"""A small file that asks for any amount of memory or time is refused before it gets it, in a sentence with its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from layerline.pipeline.errors import StageError
from tests.stages import foreign

OWN_PROCESS = True
_LARGE = {"max_memory_gb": 0.5}


def _model(body: str, gives: str = "float[k]", **stored: np.ndarray) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => ({gives} y) {{ {body} }}'
    return foreign.model(text, **stored)


def _sizes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_what_a_file_says_of_its_sizes_is_added_up_before_it_runs(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"it holds 17\.18 GB at once for any input") as error:
        foreign.imported(tmp_path, _model("c = ConstantOfShape (s) y = Add (c, x)", s=_sizes(2**31)))
    assert error.value.where == "node ConstantOfShape_c" and "max_memory_gb" in error.value.hint


def test_what_only_a_run_shows_ends_at_the_limit_and_names_the_node(tmp_path: Path) -> None:
    """The size is the product of two numbers that the file stores as floats."""
    body = "f = Mul (a, a) s = Cast <to = 7> (f) big = ConstantOfShape (s) y = Add (big, x)"
    with pytest.raises(StageError, match="Failed to allocate memory") as error:
        foreign.imported(tmp_path, _model(body, a=np.array([40000], "f")), **_LARGE)
    assert "ConstantOfShape node" in error.value.what and "max_memory_gb" in error.value.hint


_STORED = {"rounds": np.array(2**62, np.int64), "yes": np.array(True), "no": np.array(False)}
_LOOP = """y = Loop (rounds, yes, x) <
  body = b (int64 i, bool c, float[n] a) => (bool again, float[n] o) {{ o = Add (a, a) again = {again} }}
>"""


@pytest.mark.slow
def test_a_loop_that_goes_on_too_long_is_ended_and_named(tmp_path: Path) -> None:
    """That its condition is always true shows in no constant, so that only the clock ends it."""
    given = _model(_LOOP.format(again="Not (no)"), "float[n]", **_STORED)
    given.graph.node[-1].name = "spin"
    with pytest.raises(StageError, match=r"trying model\.onnx took longer than 15 s") as error:
        foreign.imported(tmp_path, given, max_seconds=15)
    assert "its Loop node spin runs up to 4611686018427387904 rounds" in error.value.what
    assert "max_seconds" in error.value.hint


def test_an_interrupt_ends_a_run_at_once(tmp_path: Path) -> None:
    """The stage waits for a Loop of 2^62 rounds; after Ctrl-C both processes are gone and nothing is left."""
    given = _model(_LOOP.format(again="Not (no)"), "float[n]", **_STORED)
    root = foreign.project(tmp_path / "p", given)
    (root / "pipe.yaml").write_text("import-onnx:\n  file: model.onnx\n", "utf-8")
    command = [sys.executable, "-m", "layerline.cli", "run", "import-onnx"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, end = tmp_path, time.monotonic() + 60
    while not list(said.glob("*/said.jsonl")) and time.monotonic() < end:
        time.sleep(0.1)
    assert list(said.glob("*/said.jsonl"))
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=30)[0].decode()
    assert process.returncode == 130 and "Traceback" not in printed
    assert not list(tmp_path.glob("layerline-*"))


def test_a_model_within_its_limits_is_imported(tmp_path: Path) -> None:
    report, out = foreign.imported(tmp_path, foreign.conv(20), **_LARGE)
    assert report.passed and (out / "model.onnx").is_file()


def test_a_check_runs_the_model_within_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Loop is endless in fact, which only the clock shows; the import itself would end the same way."""
    from layerline.pipeline.config import project
    from layerline.pipeline.init import from_files
    from layerline.pipeline.run import check

    onnx.save(_model(_LOOP.format(again="Not (no)"), "float[n]", **_STORED), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "s.npz", x=np.ones(4, "f"), label=np.zeros(4, "i8"))
    from_files.from_onnx(tmp_path / "p", tmp_path / "m.onnx", tmp_path / "s.npz")
    monkeypatch.chdir(tmp_path / "p")
    done = check.check(project.load(tmp_path / "p", ["import-onnx.max_seconds=3"]))
    assert any("took longer than 3 s" in f.seen for f in done.errors), done.errors


def test_a_check_reads_the_model_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerline.onnx_import import normalize_import
    from layerline.pipeline.config import project
    from layerline.pipeline.run import check

    monkeypatch.setattr(normalize_import, "adopt", lambda *_: pytest.fail("not in this process"))
    root = foreign.project(tmp_path, foreign.conv(20))
    (root / "pipe.yaml").write_text("import-onnx: {file: model.onnx}\nquantize: {mode: none}\n")
    done = check.check(project.load(root))
    assert ("import-onnx.dims", "ok") in [(f.item, f.state) for f in done.findings], done.findings
