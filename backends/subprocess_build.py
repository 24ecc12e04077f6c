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
from pathlib import Path
from typing import Any, Protocol

from layerline.backends.process_limits import GB, Limits
from layerline.pipeline.errors import PipeError, StageError, machine_lacks
from layerline.pipeline.records.run_lock import temporary_folder

_REQUEST, _OUTCOME, _PRINTED, _SAID = "request.pickle", "outcome.pickle", "printed.txt", "said.jsonl"
_LACKS = 71
"""Exit code of a process that could not even leave its outcome: the disk is full."""
_NO_RANDOMIZE, _QUERY = 0x0040000, 0xFFFFFFFF  # ADDR_NO_RANDOMIZE, and how personality(2) is asked
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_TICK = 0.1


class Log(Protocol):
    """Where what the other process says is said here."""

    def say(self, text: str) -> None: ...


class Relay:
    """What the function of `bounded` gets to speak to the caller."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, text: str) -> None:
        """Said by the caller's log."""
        self._add("say", text)

    def suspect(self, text: str) -> None:
        """Part of the error, should the process be ended before it is done."""
        self._add("suspect", text)

    def _add(self, kind: str, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: text}) + "\n")


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` gives in another process. Function, arguments and result are pickled.

    Raises:
        PipeError: whatever of these the function raises.
        Unavailable: the system refused it room, memory or a file.
        StageError: the process crashed; says by which signal and what it printed last.
    """
    with temporary_folder() as place:
        with _fixed_addresses():
            process = _start(place, function, args, None)
        _finish(process)
        return _outcome(place, process.returncode, "the builder's process", StageError("", where="engine"))


def bounded(function: Callable[..., Any], *args: Any, limits: Limits, log: Log) -> Any:
    """What `function(*args, relay)` gives in a process whose memory and time are bounded; Ctrl-C ends it at once.

    Raises:
        PipeError: whatever of these the function raises.
        Unavailable: the system refused it room or a file.
        StageError: it took more than `limits`, or crashed; says what the function suspected.
    """
    with temporary_folder() as place:
        process = _start(place, function, args, limits)
        end, said = time.monotonic() + limits.seconds, 0
        while process.returncode is None:
            _finish(process, _TICK)
            lines = _said(place)
            for line in lines[said:]:
                if "say" in line:
                    log.say(line["say"])
            said = len(lines)
            if process.returncode is None and time.monotonic() > end:
                process.kill()
                process.wait()
                raise _told(place, f"{limits.what} took longer than {limits.seconds:g} s", limits.hint)
        template = _told(place, limits.what, f"it may take {limits.memory / GB:.1f} GB of memory; {limits.hint}")
        return _outcome(place, process.returncode, "its process", template)


def _start(
    place: Path, function: Callable[..., Any], args: tuple[Any, ...], limits: Limits | None
) -> subprocess.Popen[bytes]:
    (place / _REQUEST).write_bytes(pickle.dumps((function, args, limits)))
    # glibc reserves addresses for each thread, which would count against a limit of memory.
    arenas = {} if limits is None else {"MALLOC_ARENA_MAX": "2"}
    env = {**os.environ, "PYTHONHASHSEED": "0", **arenas}
    with (place / _PRINTED).open("wb") as printed:
        return subprocess.Popen(  # noqa: S603  # this interpreter and this module
            [sys.executable, "-m", __name__], cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=printed,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def _outcome(place: Path, code: int, process: str, template: StageError) -> Any:
    """The result that a process left; its crash is told like `template`."""
    if code == _LACKS:
        raise machine_lacks(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place)))
    if not (place / _OUTCOME).is_file():
        raise _crash(code, place, process, template)
    # Written a moment ago by our own process into our own folder.
    outcome = pickle.loads((place / _OUTCOME).read_bytes())  # noqa: S301
    if isinstance(outcome, PipeError):
        raise outcome
    return outcome


def _said(place: Path) -> list[dict[str, str]]:
    """The whole lines that a process has written."""
    path = place / _SAID
    text = path.read_text("utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _told(place: Path, what: str, hint: str) -> StageError:
    suspects = [line["suspect"] for line in _said(place) if "suspect" in line]
    return StageError("; ".join([what, *suspects]), hint=hint)


def repeatable() -> bool:
    """Whether this process runs at the same addresses every time."""
    return bool(_personality(_QUERY) & _NO_RANDOMIZE)


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
    found: int = ctypes.CDLL(None).personality(ctypes.c_ulong(persona))
    return max(found, 0)


def _finish(process: subprocess.Popen[bytes], seconds: float | None = None) -> None:
    """Waits for a process, so long at most; whatever ends the wait ends the process as well."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    except BaseException:
        process.kill()
        process.wait()
        raise


def _crash(code: int, place: Path, process: str, template: StageError) -> StageError:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    printed = (place / _PRINTED).read_text("utf-8", errors="replace").strip().splitlines()[-3:]
    last = " | ".join(line.strip() for line in printed) or "nothing"
    memory = "signal 9 is most often the system running out of memory" if code == -9 else ""
    what = f"{process} {how}; it printed last: {last}"
    return StageError(
        f"{template.what}: {what}" if template.what else what,
        where=template.where,
        hint="; ".join(filter(None, [memory, template.hint])),
    )


def main() -> None:
    """The other process: reads the request in its working folder and leaves the outcome there.

    glibc gives a new thread memory of its own, so that the size of the environment and of the request, which moves what
    lies on the main heap, moves nothing there.
    """
    _die_with_parent()
    function, args, limits = pickle.loads(Path(_REQUEST).read_bytes())  # noqa: S301
    place = Path(_OUTCOME).absolute()
    if limits is not None:
        args = (*args, Relay(Path(_SAID).absolute()))
        limits.apply()
    outcome: Any
    try:
        with ThreadPoolExecutor(1) as fresh:
            outcome = fresh.submit(function, *args).result()
    except PipeError as error:
        outcome = error
    except MemoryError as error:
        outcome = machine_lacks(error) if limits is None else _too_much(limits)
    except OSError as error:
        outcome = machine_lacks(error)
    partial = place.with_suffix(".partial")
    try:
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(place)
    except OSError:
        sys.exit(_LACKS)


def _too_much(limits: Limits) -> StageError:
    return StageError(f"{limits.what} takes more than {limits.memory / GB:.1f} GB of memory", hint=limits.hint)


def _die_with_parent() -> None:
    """A process whose caller was killed ends too, where the system does that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


if __name__ == "__main__":
    main()
