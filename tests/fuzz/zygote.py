"""A process that has imported everything once and runs each command of `pipe` in a fork of itself.

A command then takes as long as its work, has a process of its own that may crash, hang or exhaust its memory, and
leaves nothing behind in the next one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODULES = (
    "onnx",
    "onnx_ir.passes.common",
    "onnxruntime",
    "ruamel.yaml",
    "safetensors.torch",
    "torch",
    "layerline.cli",
)
"""What commands import, beside all of Layerline's own modules."""
_MEMORY = 3 << 30
"""Bytes that a command may take beyond what the zygote has."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, or minus the signal that killed it; None where its time was over.
        peak: bytes of memory that it took, at most.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    peak: int


class Zygote:
    """The process, seen from the tests."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, place: Path, arguments: Sequence[str], seconds: float) -> Ended:
        """Runs `pipe ARGUMENTS` in a folder, with a temporary folder and a home of its own beside it."""
        assert self._process.stdin and self._process.stdout
        request = {"place": str(place), "arguments": list(arguments), "seconds": seconds}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline())
        out, err = (Path(f"{place}.{name}").read_text("utf-8", "replace") for name in ("out", "err"))
        return Ended(said["code"], out, err, said["seconds"], said["peak"])

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def _serve() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    for part in ("cli", "pipeline", "views", "graph", "layers", "stages", "calib", "training"):
        for found in pkgutil.walk_packages([str(Path(__file__).parents[2] / part)], f"layerline.{part}."):
            importlib.import_module(found.name)

    gc.freeze()  # so that a collection in a fork touches, and copies, none of this
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        child = os.fork()
        if not child:
            _command(Path(request["place"]), request["arguments"])
        code, peak = _wait(child, request["seconds"])
        answers.write(json.dumps({"code": code, "seconds": time.monotonic() - began, "peak": peak}) + "\n")
        answers.flush()


def _wait(child: int, seconds: float) -> tuple[int | None, int]:
    end, done = time.monotonic() + seconds, 0
    while not done and time.monotonic() < end:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if not done:
            time.sleep(0.002)
    if not done:
        os.killpg(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
        return None, usage.ru_maxrss << 10
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10


def _command(place: Path, arguments: Sequence[str]) -> None:
    """The fork: becomes `pipe ARGUMENTS`, and ends."""
    leave = os._exit  # before `pipe` watches over it
    ended_with = 70
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(place)
    os.environ |= {"TMPDIR": str(place.parent / "tmp"), "HOME": str(place.parent / "home")}
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["pipe", *arguments]
    try:
        from layerline import cli
        from layerline.backends import subprocess_build
        from layerline.pipeline.keys import stage_code

        subprocess_build.bounded = _bounded
        stage_code.digest = lambda stage, hasher: "0" * 64  # of Layerline's own modules: the same in every case
        cli.main()
    except SystemExit as ended:
        ended_with = ended.code if isinstance(ended.code, int) else 71
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__):
            with contextlib.suppress(Exception):
                stream.flush()
        leave(ended_with)


class _Relay:
    def __init__(self, log: Any) -> None:
        self.say = log.say

    def suspect(self, text: str) -> None: ...


def _bounded(function: Callable[..., Any], *args: Any, limits: Any, log: Any) -> Any:
    """In this process, which is a fork and bounded already."""
    from layerline.pipeline.errors import StageError

    limits.apply()
    try:
        return function(*args, _Relay(log))
    except MemoryError:
        # As the process of its own says it.
        raise StageError(f"{limits.what} takes more than {limits.memory} bytes of memory", hint=limits.hint) from None


if __name__ == "__main__":
    _serve()
