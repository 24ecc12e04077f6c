"""Calls a function in a process of its own, whose addresses are the same every time.

TensorRT-RTX names the inner values of a dynamic engine after whichever of several equal ones a table of pointers gives
first, so its bytes change with the addresses that the system hands out. A process without address randomisation gives
the same bytes for the same model. It also keeps a crash inside a builder, and what it prints, away from the caller.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerline.pipeline.errors import PipeError, StageError, machine_lacks
from layerline.pipeline.presence import temporary_folder

_REQUEST, _OUTCOME = "request.pickle", "outcome.pickle"
_LACKS = 71
"""Exit code of a process that could not even leave its outcome: the disk is full."""
_NO_RANDOMIZE, _QUERY = 0x0040000, 0xFFFFFFFF  # ADDR_NO_RANDOMIZE, and how personality(2) is asked


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` gives in another process. Function, arguments and result are pickled.

    Raises:
        PipeError: whatever of these the function raises.
        Unavailable: the system refused it room, memory or a file.
        StageError: the process crashed; says by which signal and what it printed last.
    """
    with temporary_folder() as place:
        (place / _REQUEST).write_bytes(pickle.dumps((function, args)))
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        with _fixed_addresses():
            process = subprocess.Popen(  # noqa: S603  # this interpreter and this module
                [sys.executable, "-m", __name__], cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        printed = _finish(process)
        if process.returncode == _LACKS:
            raise machine_lacks(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place)))
        if not (place / _OUTCOME).is_file():
            raise _crash(process.returncode, printed)
        # Written a moment ago by our own process into our own folder.
        outcome = pickle.loads((place / _OUTCOME).read_bytes())  # noqa: S301
    if isinstance(outcome, PipeError):
        raise outcome
    return outcome


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


def _finish(process: subprocess.Popen[bytes]) -> str:
    try:
        return process.communicate()[0].decode(errors="replace")
    except BaseException:
        process.kill()
        process.wait()
        raise


def _crash(code: int, printed: str) -> StageError:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    last = " | ".join(line.strip() for line in printed.strip().splitlines()[-3:])
    memory = "signal 9 is most often the system running out of memory" if code == -9 else ""
    return StageError(f"the builder's process {how}; it printed last: {last or 'nothing'}", where="engine", hint=memory)


def main() -> None:
    """The other process: reads the request in its working folder and leaves the outcome there.

    glibc gives a new thread memory of its own, so that the size of the environment and of the request, which moves what
    lies on the main heap, moves nothing there.
    """
    function, args = pickle.loads(Path(_REQUEST).read_bytes())  # noqa: S301
    place = Path(_OUTCOME).absolute()
    outcome: Any
    try:
        with ThreadPoolExecutor(1) as fresh:
            outcome = fresh.submit(function, *args).result()
    except PipeError as error:
        outcome = error
    except (OSError, MemoryError) as error:
        outcome = machine_lacks(error)
    partial = place.with_suffix(".partial")
    try:
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(place)
    except OSError:
        sys.exit(_LACKS)


if __name__ == "__main__":
    main()
