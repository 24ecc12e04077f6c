"""Modules of a project whose names are taken: theirs where they may be, the installed ones where others need those."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layerline.pipeline import task as tasks
from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task

CANARY = "import pathlib\npathlib.Path(__file__).with_name('PWNED').touch()\nMINE = 1\n"
LOOK = """
import pathlib, sys
from layerline.pipeline.task import Task
assert Task(pathlib.Path("task.py").resolve()).call("model") == 1
import colorsys, onnx, queue, safetensors, torch
for module in (colorsys, onnx, queue, safetensors, torch):
    assert pathlib.Path.cwd() not in pathlib.Path(module.__file__).parents, module
"""


def test_what_layerline_and_torch_import_is_installed(tmp_path: Path) -> None:
    for name in ("queue.py", "colorsys.py", "torch/__init__.py", "safetensors/__init__.py", "onnx.py", "dis.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(CANARY)
    (tmp_path / "nets.py").write_text("MINE = 1\n")
    (tmp_path / "statistics").mkdir()
    (tmp_path / "task.py").write_text("import nets, queue, statistics\n\ndef model():\n    return nets.MINE\n")
    # Without the current folder on the path, as the command `pipe` starts.
    command = [sys.executable, "-c", "import sys; sys.path.pop(0)\n" + LOOK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("PWNED"))


def test_names_that_nothing_of_ours_needs_are_the_project_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    for folder, value in ((tmp_path / "p", 1), (tmp_path / "site", 2)):
        folder.mkdir(exist_ok=True)
        for name in ("someones_utils", "needed_by_us"):
            (folder / f"{name}.py").write_text(f"WHOSE = {value}\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(tasks, "_needed", lambda: frozenset({"needed_by_us"}))
    (tmp_path / "p" / "task.py").write_text(
        "import someones_utils, needed_by_us\n\ndef model():\n    return someones_utils.WHOSE, needed_by_us.WHOSE\n"
    )
    assert Task(tmp_path / "p" / "task.py").call("model") == (1, 2)
    for name in ("someones_utils", "needed_by_us"):
        sys.modules.pop(name)


def test_a_module_that_is_not_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text(CANARY)
    (tmp_path / "task.py").write_text("from colorsys import MINE\n")
    sys.modules.pop("colorsys", None)
    with pytest.raises(TaskError, match="cannot import name 'MINE'") as caught:
        Task(tmp_path / "task.py").has("model")
    assert caught.value.hint == "not imported, since an installed module has its name: colorsys.py; rename it"
    assert not (tmp_path / "PWNED").exists()


def test_what_is_needed() -> None:
    needed = tasks._needed()
    assert {"layerline", "torch", "onnx", "numpy", "onnxruntime", "pydantic", "ruamel", "rich", "sympy"} <= needed
    assert "utils" not in needed and "tests" not in needed
