"""Errors for users. Everything that a user can cause is one of these; any other exception is a bug of Layerline."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

_HINTS = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "the project lies on a read-only file system: copy it to one that can be written",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or run `pipe gc`; what was finished is kept"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of that path"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file lies where a folder should be: move it away"),
}


class PipeError(Exception):
    """Wrong usage or configuration (exit code 2).

    Args:
        what: what failed, in one sentence, with what was seen and expected.
        where: file:line:column, field, tensor, node or module.
        hint: what to do next.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = str(what), str(where), str(hint)

    def to_json(self) -> dict[str, Any]:
        """The fields of a failure under `--json`; None for an empty one."""
        code = exit_code(self)
        return {"error": self.what, "where": self.where or None, "hint": self.hint or None, "exit_code": code}

    def __str__(self) -> str:
        text = located(self.where, self.what)
        return "\n  ".join(part for part in (text, self.hint) if part)


class ConfigError(PipeError):
    """pipe.yaml, --set or a command-line argument is wrong."""


class TaskError(PipeError):
    """A hook in the user's task.py is missing, raised, or returned the wrong thing."""


class StageError(PipeError):
    """A stage cannot do its work on this input; the message names the tensor, node or parameter (exit code 1)."""

    exit_code = 1


class Unavailable(PipeError):
    """This machine lacks something: a package, a device, disk space, write permission (exit code 3)."""

    exit_code = 3


_EXIT_CODES = (1, 2, 3, 130)


def exit_code(error: PipeError) -> int:
    """The exit code for an error. A subclass in user code may define any value, so it is checked."""
    code = error.exit_code
    if type(code) is int and code in _EXIT_CODES:
        return code
    return PipeError.exit_code


def located(where: str | None, what: str) -> str:
    """A sentence with the place it is about before it, where there is one."""
    return ": ".join(part for part in (where, what) if part)


def failure_fields(error: PipeError | None) -> dict[str, Any]:
    """The fields that a JSON document has where something failed."""
    if error is None:
        return {}
    return error.to_json()


def words(error: BaseException, limit: int = 4000) -> str:
    """The text of a foreign error; it may be very long, or raise an error itself."""
    try:
        return str(error)[:limit]
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):
            raise
        return "its text can't be made"


def first_line(text: str) -> str:
    """The first line of a message that says something; some libraries append pages."""
    return next((line for line in text.splitlines() if line.strip()), "")


def brief(error: BaseException) -> str:
    """A foreign error in one line, with its type."""
    return f"{type(error).__name__}: {first_line(words(error))}"


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, recognised by name so that torch need not be imported."""
    if any(cls.__name__ in ("MemoryError", "OutOfMemoryError") for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in words(error)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns failed allocations into one error, Unavailable."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise machine_lacks(MemoryError()) from error


def machine_lacks(error: OSError | MemoryError) -> Unavailable:
    """An error of the operating system, with a hint for the user."""
    if isinstance(error, MemoryError):
        return Unavailable("this machine ran out of memory", hint="lower the batch size or the number of samples")
    where = str(error.filename or "disk")
    return Unavailable(error.strerror or str(error), where=where, hint=_HINTS.get(error.errno or 0, ""))


def as_pipe_error(error: PipeError | OSError | MemoryError) -> PipeError:
    """The error itself, or what the operating system refused as one."""
    if isinstance(error, PipeError):
        return error
    return machine_lacks(error)
