"""The user's task.py: imported on use, called, and its mistakes told as the user's, with their line."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from layerline.pipeline.errors import StageError, TaskError
from layerline.pipeline.task import Task


def task(tmp_path: Path, text: str, **helpers: str) -> Task:
    (tmp_path / "task.py").write_text(dedent(text))
    for name, helper in helpers.items():
        (tmp_path / f"{name}.py").write_text(dedent(helper))
    return Task(tmp_path / "task.py")


def test_a_hook_is_called_and_the_file_imported_once(tmp_path: Path) -> None:
    found = task(tmp_path, "TIMES = []\nTIMES.append(1)\ndef f(x): return x, len(TIMES)\ng = 5\n")
    assert found.has("f") and not found.has("g") and not found.has("h")
    assert found.call("f", 3) == (3, 1) == found.get("f")(3)


def test_nothing_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    task(tmp_path, "raise SystemExit")  # no error


MISTAKES = {
    "raises": ("def f():\n    x = 1\n    raise ValueError('no')\n", "task.py:3: f() raised ValueError: no"),
    "raises elsewhere": ("import helper\ndef f(): return helper.g()\n", "helper.py:3: f() raised KeyError: 'x'"),
    "exits": ("import sys\ndef f():\n    sys.exit(3)\n", "task.py:3: f() raised SystemExit: 3"),
    "wrong arguments": ("def f(x): return x\n", "task.py: f() raised TypeError: f() missing 1 required"),
    "is missing": ("def g(): return 1\n", "task.py: this stage needs the hook f(), which task.py does not define"),
    "is no function": ("f = 5\n", "task.py: this stage needs the hook f(), which task.py does not define"),
    "import raises": ("x = 1\n1 / 0\n", "task.py:2: importing it raised ZeroDivisionError: division by zero"),
    "import exits": ("import sys\nsys.exit()\n", "task.py:2: importing it raised SystemExit:"),
    "import misses a package": ("import no_such_thing\n", "task.py:1: importing it raised ModuleNotFoundError"),
    "no syntax": ("def f(:\n", "task.py:1: importing it raised SyntaxError"),
    "no syntax elsewhere": ("import wrong\n", "wrong.py:2: importing it raised SyntaxError"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_as_the_user_s(name: str, tmp_path: Path) -> None:
    text, expected = MISTAKES[name]
    found = task(tmp_path, text, helper="def g():\n    table = {}\n    return table['x']\n", wrong="x = 1\ndef (\n")
    with pytest.raises(TaskError) as caught:
        found.call("f")
    assert str(caught.value).startswith(expected)
    assert caught.value.hint and caught.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no such task file\n  create it, or name another"):
        Task(tmp_path / "task.py").call("f")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_no_mistake_of_the_user_passes(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error):
        task(tmp_path, f"def f(): raise {error.__name__}\n").call("f")
    with pytest.raises(error):
        task(tmp_path, f"raise {error.__name__}\n").call("f")


def test_our_own_errors_pass_through_a_hook(tmp_path: Path) -> None:
    text = "from layerline.pipeline.errors import StageError\ndef f(): raise StageError('channel 3', where='conv')\n"
    with pytest.raises(StageError, match="conv: channel 3"):
        task(tmp_path, text).call("f")


def test_an_edit_within_a_second_is_seen(tmp_path: Path) -> None:
    """Python's bytecode cache goes by size and whole seconds; the key would be new and the code old."""
    for value in range(5):
        found = task(tmp_path, f"import helper\ndef f(): return helper.X, Y\nY = {value}\n", helper=f"X = {value}\n")
        assert found.call("f") == (value, value)
    assert not (tmp_path / "__pycache__").exists()


def test_two_projects_in_one_process_have_their_own_modules(tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        folder = tmp_path / name
        (folder / "pkg").mkdir(parents=True, exist_ok=True)
        (folder / "pkg" / "__init__.py").write_text(f"NAME = {name!r}")
        (folder / "pkg" / "inner.py").write_text(f"NAME = {name!r}")
        (folder / "space").mkdir(exist_ok=True)
        (folder / "space" / "mod.py").write_text(f"NAME = {name!r}")
        text = "import pkg, space.mod\nfrom pkg.inner import NAME\ndef f(): return pkg.NAME + NAME + space.mod.NAME\n"
        assert task(folder, text).call("f") == name * 3
    assert sys.path[0] == str(tmp_path / "a")


def test_a_linked_task_has_the_neighbours_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "task.py").write_text("import helper\ndef f(): return helper.X, __file__\n")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "helper.py").write_text("X = 1\n")
    (tmp_path / "project" / "task.py").symlink_to(tmp_path / "shared" / "task.py")
    assert Task(tmp_path / "project" / "task.py").call("f") == (1, str(tmp_path / "project" / "task.py"))


def test_modules_imported_late_are_the_project_s_too(tmp_path: Path) -> None:
    found = task(tmp_path, "def f():\n    import late\n    return late.X\n", late="X = 1\n")
    assert found.call("f") == 1
    assert "late" in sys.modules


def test_installed_packages_keep_their_bytecode(tmp_path: Path) -> None:
    found = task(tmp_path, "import wave\ndef f(): return wave.__cached__\n")
    assert str(found.call("f")).endswith(".pyc")


def test_what_a_metric_was_called_with_is_told(tmp_path: Path) -> None:
    found = task(tmp_path, "def metric(outputs, targets): return targets['box'][3]\n")
    targets = {"box": np.zeros((2, 4), np.float32), "kind": np.zeros(2, np.int64)}
    with pytest.raises(TaskError) as caught:
        found.get("metric")(np.zeros((2, 10), np.float32), targets)
    assert caught.value.where == "task.py:1"
    assert caught.value.what == (
        "metric() raised IndexError: index 3 is out of bounds for axis 0 with size 2; it was called with "
        "outputs: float32 (2, 10), targets: {box: float32 (2, 4), kind: int64 (2,)}"
    )
