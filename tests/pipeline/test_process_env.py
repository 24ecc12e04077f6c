"""What user code does to the process: nothing of it ends in exit code 0 without a word, or reaches standard output."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from layerline.pipeline.errors import PipeError, StageError, TaskError, brief, exit_code, words
from layerline.pipeline.process_env import INTERRUPTED
from layerline.pipeline.task import Task
from tests.pipeline import driver, fakes
from tests.pipeline.fakes import Folder

OURS = "from layerline.pipeline.errors import PipeError\n"
DEATHS = {
    "os._exit in a hook": ("def model():\n    import os\n    os._exit(0)", "ended the process: os._exit(0)"),
    "exec in a hook": ("def model():\n    import os\n    os.execvp('true', ['true'])", "ended the process: os.execv"),
    "os._exit at exit": (
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef model():\n    raise ValueError('no')",
        "model() raised ValueError: no",
    ),
    "an error of ours with code 0": (
        f"{OURS}class Fine(PipeError):\n    exit_code = 0\ndef model():\n    raise Fine('all is well')",
        "model() raised Fine: all is well",
    ),
    "descriptors closed": (
        "import os\ndef model():\n    os.close(1)\n    raise ValueError('no')",
        "raised ValueError: no",
    ),
    "closes standard error": (
        "import sys\nsys.stderr.close()\ndef model(): raise ValueError('no')",
        "raised ValueError: no",
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="execvp returns at once there")
@pytest.mark.parametrize("name", DEATHS)
def test_nothing_passes_by_dying(name: str, folder: Folder) -> None:
    text, told = DEATHS[name]
    folder.write("task.py", fakes.TASK + text + "\n")
    done = driver.run(folder.root, "run", "source")
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert not list(folder.state.glob("ledger/keys/*"))


def test_a_package_that_exits_with_0_is_an_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerline.views import exit_codes

    def exits(_stage: object, _work: object) -> None:
        raise SystemExit(0)  # no line of the project is on the way

    monkeypatch.setattr(fakes.Double, "run", exits)
    assert exit_codes.exit_code(lambda: folder.run().exit_code, as_json=False, debug=False) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="the C library has another name there")
def test_an_end_below_python_is_told_by_the_next_command(folder: Folder) -> None:
    folder.write("task.py", fakes.TASK + "def eval_data():\n    import ctypes\n    ctypes.CDLL(None)._exit(0)\n")
    assert driver.run(folder.root, "run", "all").returncode == 0, "no Python code sees it"
    (run,) = folder.runner().ledger.runs()
    assert [r.stage for r in run.records] == ["source", "double"] and not run.passed
    for command in (["status"], ["run", "double"]):
        assert "an earlier run did not come to its end" in (lambda done: done.stderr + done.stdout)(
            driver.run(folder.root, *command)
        )
    assert "did not come to its end" not in driver.run(folder.root, "status").stderr, "told until the next run"


RAISED = {
    "class Own(BaseException): pass\n@raise Own('x')": "raised Own: x",
    "@raise GeneratorExit('x')": "raised GeneratorExit: x",
    "@raise SystemExit(0)": "raised SystemExit: 0",
    "class Own(Exception):\n    def __str__(self): raise SystemExit(0)\n@raise Own": "its text can't be made",
    "class Own(Exception):\n    def __str__(self): return 'x' * 10**6\n@raise Own": "raised Own: xxx",
    "@raise SyntaxError('x', ('f', 'line', 1, 'y'))": "raised SyntaxError: x",
    f"{OURS}class Own(PipeError): exit_code = 0\n@raise Own('x')": "raised Own: x",
}


@pytest.mark.parametrize("place", ["at import", "in a hook"])
@pytest.mark.parametrize("text", RAISED)
def test_whatever_task_py_raises_is_one_error_with_code_2(text: str, place: str, tmp_path: Path) -> None:
    before, _, statement = text.partition("@")
    body = statement if place == "at import" else f"def model():\n    {statement}"
    (tmp_path / "task.py").write_text(f"{before}{body}\n")
    with pytest.raises(TaskError) as caught:
        Task(tmp_path / "task.py").call("model")
    assert RAISED[text] in str(caught.value) and len(str(caught.value)) < 10_000
    assert exit_code(caught.value) == 2


def test_a_low_recursion_limit_is_raised_again(tmp_path: Path) -> None:
    before = sys.getrecursionlimit()
    (tmp_path / "task.py").write_text("import sys\ndef model():\n    sys.setrecursionlimit(200)\n    return 5\n")
    assert Task(tmp_path / "task.py").call("model") == 5
    assert sys.getrecursionlimit() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import json\njson.dumps = lambda *a, **k: 'x'\n", "importing it replaced json.dumps,"),
        ("import json, hashlib\njson.loads = hashlib.sha256 = None\n", "replaced hashlib.sha256 and json.loads,"),
        ("import hashlib\nhashlib.blake2b = hashlib.blake2s\n", "importing it replaced hashlib.blake2b,"),
    ],
)
def test_a_function_that_results_are_stored_by_is_not_replaced(text: str, said: str, tmp_path: Path) -> None:
    before = json.dumps, json.loads, hashlib.sha256, hashlib.blake2b
    (tmp_path / "task.py").write_text(text + "def model(): return 1\n")
    with pytest.raises(TaskError, match=said) as error:
        Task(tmp_path / "task.py").call("model")
    assert (json.dumps, json.loads, hashlib.sha256, hashlib.blake2b) == before
    assert "under another name" in error.value.hint


def test_nor_by_code_that_runs_outside_of_a_hook(tmp_path: Path) -> None:
    """As forward() does while a stage trains."""
    (tmp_path / "task.py").write_text("import json\ndef forward(): json.dumps = None\n")
    before = json.dumps
    task = Task(tmp_path / "task.py")
    with pytest.raises(TaskError, match=r"code of the project replaced json\.dumps,"), task.border():
        task._load().forward()
    assert json.dumps is before


def test_an_error_s_code_is_never_0() -> None:
    error = PipeError("x")
    for code in (0, True, -1, "0", None, 256):
        error.exit_code = code  # type: ignore[misc,assignment]
        assert exit_code(error) == 2
    assert exit_code(StageError("x")) == 1

    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("x")

    assert brief(Mute()) == "Mute: its text can't be made" and words(ValueError("a")) == "a"


def test_what_the_project_raises_under_a_stage_is_its_own(folder: Folder) -> None:
    folder.write(
        "task.py",
        fakes.TASK.replace("return model * x", "return Odd()")
        + """
class Odd:
    def __float__(self):
        raise Own("no number")

class Own(BaseException):
    pass
""",
    )
    (result, *_) = folder.run(["source"]).results
    assert result.error is not None and "raised Own: no number" in result.error.what
    assert result.error.where.startswith("task.py:")


PRINTS = """
import atexit, ctypes, os, subprocess, sys, threading, time

libc = ctypes.CDLL(None)
atexit.register(lambda: print("at exit"))
atexit.register(lambda: os.write(1, b"at exit, raw"))

def later():
    for _ in range(200):
        print("from a thread")
        time.sleep(0.005)

def model():
    print("print")
    sys.__stdout__.write("dunder")
    os.write(1, b"raw")
    libc.puts(b"from C")
    subprocess.run(["echo", "from a child"])
    threading.Thread(target=later, daemon=True).start()
    sys.stdout.close()
    return 1
"""


@pytest.mark.skipif(sys.platform == "win32", reason="echo and libc are POSIX")
def test_nothing_that_task_py_prints_gets_into_the_document(folder: Folder) -> None:
    folder.write("task.py", fakes.TASK + PRINTS)
    done = driver.run(folder.root, "run", "source", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["passed"], done.stderr
    for text in ("print", "dunder", "raw", "from C", "from a child", "at exit", "at exit, raw"):
        assert text in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell that closes descriptors")
def test_a_closed_standard_output_is_no_fault(folder: Folder) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = f"{sys.executable} -m tests.pipeline.driver run source >&-"
    done = subprocess.run(["sh", "-c", command], cwd=folder.root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.parametrize("after", [0.0, 0.2, 0.5, 1.0])
def test_ctrl_c_at_any_moment_is_one_sentence(after: float, folder: Folder) -> None:
    folder.write("pipe.yaml", "slow: {steps: 100, seconds: 0.1}\n")
    ready = folder.root / "ready"
    process = driver.start(folder.root, "run", "all", READY_TO=str(ready))
    while not ready.exists():
        time.sleep(0.005)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.strip().splitlines()[-1] == INTERRUPTED and "Traceback" not in err


def test_a_file_of_many_functions_and_a_long_sum(tmp_path: Path) -> None:
    from layerline.pipeline.hashing import Hasher
    from layerline.pipeline.keys.fingerprint import Reader

    (tmp_path / "task.py").write_text(
        "\n".join(f"def f{i}(x):\n    return f{i + 1}(x)" for i in range(6000)) + "\ndef model(): return f0(1)\n"
    )
    assert len(Reader(tmp_path / "task.py", Hasher(None)).hook("model").reached) == 6001
    (tmp_path / "task.py").write_text(f"def model(): return {'+'.join('1' * 20_000)}\n")
    with pytest.raises(TaskError, match="nested too deeply"):
        Reader(tmp_path / "task.py", Hasher(None)).hook("model")
