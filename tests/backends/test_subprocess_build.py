"""Calls in another process: their results, errors and crashes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from layerline.backends.subprocess_build import call, repeatable
from layerline.pipeline.errors import ConfigError, StageError, Unavailable


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions below are found by name in the other process."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def add(a: int, b: int) -> tuple[int, int]:
    print("chatter")
    return a + b, os.getpid()


def refuse() -> None:
    raise StageError("no", where="tensor x", hint="do this")


def crash(how: str) -> None:
    print("before the end", flush=True)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(3)
    raise ZeroDivisionError("a bug of ours")


def test_the_result_comes_back_and_nothing_is_printed(capfd) -> None:
    total, process = call(add, 2, 3)
    assert total == 5 and process != os.getpid()
    assert capfd.readouterr() == ("", "")


def test_an_error_for_people_comes_back_whole() -> None:
    with pytest.raises(StageError) as caught:
        call(refuse)
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("no", "tensor x", "do this")
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("signal", "was killed by signal 11; it printed last: before the end"),
        ("exit", "ended with exit code 3; it printed last: before the end"),
        ("bug", "ended with exit code 1; .*ZeroDivisionError: a bug of ours"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_a_crash_is_told_with_its_last_words(how, told) -> None:
    with pytest.raises(StageError, match=told):
        call(crash, how)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the switch")
def test_this_process_keeps_its_own_addresses() -> None:
    before = repeatable()
    call(add, 1, 1)
    assert repeatable() is before


def too_large(bytes_allowed: int, value_bytes: int) -> bytes:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, bytes_allowed))
    if value_bytes == 0:
        Path("engine.tmp").write_bytes(bytes(2 * bytes_allowed))
    return bytes(value_bytes)


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX")
@pytest.mark.parametrize("value_bytes", [0, 50_000])
def test_a_full_disk_is_something_the_machine_lacks(value_bytes: int) -> None:
    with pytest.raises(Unavailable, match="File too large" if value_bytes == 0 else "No space left on device"):
        call(too_large, 10_000, value_bytes)
