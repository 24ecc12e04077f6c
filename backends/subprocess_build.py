"""Calls a function in a process of its own, whose addresses are the same every time.

TensorRT-RTX names the inner values of a dynamic engine after whichever of several equal ones a table of pointers gives
first, so its bytes change with the addresses that the system hands out. A process without address randomisation gives
the same bytes for the same model. It also keeps a crash inside a builder, and what it prints, away from the caller,
and bounds the memory and time of what runs somebody else's model.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from layerline.pipeline.errors import PipeError, StageError, machine_lacks
from layerline.pipeline.records.run_lock import temporary_folder

GB = 10**9
_REQUEST, _OUTCOME, _PRINTED, _SAID = "request.pickle", "outcome.pickle", "printed.txt", "said.jsonl"
_LACKS = 71
"""Exit code of a process that could not even leave its outcome: the disk is full."""
_NO_RANDOMIZE, _QUERY = 0x0040000, 0xFFFFFFFF  # ADDR_NO_RANDOMIZE, and how personality(2) is asked
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_TICK = 0.1
_SLACK = 512 << 20
"""Addresses that the libraries and the stacks of their threads take, whatever the model."""
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class ProcessDied(StageError):
    """A process ended without leaving a result: it crashed, or was ended from outside."""


class OutputLog(Protocol):
    """Gets what the other process says."""

    def say(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a process.

    Attributes:
        memory: bytes that it may take beyond what it has when the bounds are set.
        seconds: from its start to its end.
        what: what it does, for errors.
        hint: where the bounds are set.
    """

    memory: int
    seconds: float
    what: str
    hint: str

    def apply(self) -> None:
        """Bounds this process' memory, where the system has such a limit (Linux; elsewhere nothing changes)."""
        if sys.platform != "linux":
            return
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + _SLACK + self.memory
        # A limit that the user has set stays the upper one.
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


class Relay:
    """Passed to the function of `bounded` as its last argument: speaks to the caller."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, text: str) -> None:
        """Passed on to the caller's log."""
        self._add("say", text)

    def suspect(self, text: str) -> None:
        """Becomes part of the error if the process is ended before it is done."""
        self._add("suspect", text)

    def _add(self, kind: str, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: text}) + "\n")


def call(
    function: Callable[..., Any], *args: Any, process_name: str = "the builder's process", where: str = "engine"
) -> Any:
    """Runs `function(*args)` in another process. Function, arguments and result are pickled.

    Args:
        process_name: what errors call the process.
        where: the place that errors name.

    Raises:
        PipeError: whatever of these the function raises.
        Unavailable: the system refused it room, memory or a file.
        ProcessDied: the process crashed; says by which signal and what it printed last.
    """
    with temporary_folder() as folder:
        # The personality is inherited when the process starts; the caller keeps its own.
        with _fixed_addresses():
            process = _start(folder, function, args, None)
        _wait(process)
        return _outcome(folder, process.returncode, process_name, where=where)


def bounded(function: Callable[..., Any], *args: Any, limits: Limits, log: OutputLog) -> Any:
    """Runs `function(*args, relay)` in a process whose memory and time are bounded; Ctrl-C ends it at once.

    Raises:
        PipeError: whatever of these the function raises.
        Unavailable: the system refused it room or a file.
        StageError: it took more than `limits`, or crashed; says what the function suspected.
    """
    with temporary_folder() as folder:
        process = _start(folder, function, args, limits)
        end = time.monotonic() + limits.seconds
        passed_on = 0
        while process.returncode is None:
            _wait(process, _TICK)
            texts = _said(folder, "say")
            # The file grows by whole lines, so what was passed on before is not read twice.
            for text in texts[passed_on:]:
                log.say(text)
            passed_on = len(texts)
            if process.returncode is None and time.monotonic() > end:
                process.kill()
                process.wait()
                what = f"{limits.what} took longer than {limits.seconds:g} s"
                raise StageError("; ".join([what, *_said(folder, "suspect")]), hint=limits.hint)
        what = "; ".join([limits.what, *_said(folder, "suspect")])
        hint = f"it may take {limits.memory / GB:.1f} GB of memory; {limits.hint}"
        return _outcome(folder, process.returncode, f"{what}: its process", hint=hint)


def machine_memory() -> int:
    """Bytes of memory that this machine has, or the container it is."""
    sizes = [16 * GB]  # where no portable call gives it
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in map(Path, _CGROUPS):
        text = file.read_text("ascii").strip() if file.is_file() else ""
        if text.isdecimal():
            sizes.append(int(text))
    return min(sizes)


def repeatable() -> bool:
    """Whether this process runs at the same addresses every time."""
    return bool(_personality(_QUERY) & _NO_RANDOMIZE)


def _start(
    folder: Path, function: Callable[..., Any], args: tuple[Any, ...], limits: Limits | None
) -> subprocess.Popen[bytes]:
    # By file, not by a pipe: a pipe that nobody reads would hold both processes up.
    (folder / _REQUEST).write_bytes(pickle.dumps((function, args, limits)))
    # Sets of strings are gone through in the same order every time.
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    if limits is not None:
        # glibc reserves addresses for each thread, which would count against a limit of memory.
        env["MALLOC_ARENA_MAX"] = "2"
    with (folder / _PRINTED).open("wb") as printed:
        return subprocess.Popen(  # noqa: S603  # this interpreter and this module
            [sys.executable, "-m", __name__], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=printed,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def _wait(process: subprocess.Popen[bytes], seconds: float | None = None) -> None:
    """Waits for a process, so long at most; whatever else ends the wait ends the process as well."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    except BaseException:
        process.kill()
        process.wait()
        raise


def _said(folder: Path, kind: str) -> list[str]:
    """The texts of one kind in the whole lines that a process has written."""
    path = folder / _SAID
    text = path.read_text("utf-8") if path.is_file() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return [line[kind] for line in lines if kind in line]


def _outcome(folder: Path, code: int, process: str, where: str = "", hint: str = "") -> Any:
    """The result that a process left."""
    if code == _LACKS:
        raise machine_lacks(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)))
    if (folder / _OUTCOME).is_file():
        # Written a moment ago by our own process into our own folder.
        outcome = pickle.loads((folder / _OUTCOME).read_bytes())  # noqa: S301
        if isinstance(outcome, PipeError):
            raise outcome
        return outcome
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by signal {-code}"
    if code == -9:  # SIGKILL, which Windows does not name
        hint = "; ".join(filter(None, ["signal 9 is most often the system running out of memory", hint]))
    printed = (folder / _PRINTED).read_text("utf-8", errors="replace").strip().splitlines()[-3:]
    last = " | ".join(line.strip() for line in printed) or "nothing"
    raise ProcessDied(f"{process} {how}; it printed last: {last}", where=where, hint=hint)


@contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Processes started inside inherit it; where the system has no such switch, or forbids it, nothing changes."""
    before = _personality(_QUERY)
    _personality(before | _NO_RANDOMIZE)
    try:
        yield
    finally:
        _personality(before)


def _personality(persona: int) -> int:
    if sys.platform != "linux":
        return 0
    previous: int = ctypes.CDLL(None).personality(ctypes.c_ulong(persona))
    return max(previous, 0)


def main() -> None:
    """The other process: reads the request in its working folder and leaves the outcome there.

    glibc gives a new thread memory of its own, so that the size of the environment and of the request, which moves what
    lies on the main heap, moves nothing there.
    """
    if sys.platform == "linux":
        # Ends with a caller that was killed.
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    function, args, limits = pickle.loads(Path(_REQUEST).read_bytes())  # noqa: S301
    place = Path(_OUTCOME).absolute()
    if limits is not None:
        args = (*args, Relay(Path(_SAID).absolute()))
        limits.apply()
    outcome: Any
    try:
        # A thread of its own: see above.
        with ThreadPoolExecutor(1) as fresh:
            outcome = fresh.submit(function, *args).result()
    except PipeError as error:
        outcome = error
    except MemoryError as error:
        outcome = machine_lacks(error)
        if limits is not None:
            what = f"{limits.what} takes more than {limits.memory / GB:.1f} GB of memory"
            outcome = StageError(what, hint=limits.hint)
    except OSError as error:
        outcome = machine_lacks(error)
    # Renamed when it is whole: the caller takes a file that is there for the outcome.
    partial = place.with_suffix(".partial")
    try:
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(place)
    except OSError:
        sys.exit(_LACKS)


if __name__ == "__main__":
    main()
