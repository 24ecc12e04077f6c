"""Ends a command: an exit code and, after a failure, one sentence, with `--json` also one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import typer

from layerline.pipeline import process_env
from layerline.pipeline.errors import PipeError, as_pipe_error, words
from layerline.pipeline.errors import exit_code as own_code
from layerline.pipeline.untrusted import launched, printable

# click's UsageError. Depending on its version, typer bundles a copy of click or uses the installed one, so the class is
# taken from typer instead of imported from click.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


def exit_code(command: Callable[[], int | None], *, as_json: bool, debug: bool) -> int:
    """Runs a command, which prints its result, and returns its exit code; a failure may be a JSON document too.

    0 done, 1 a gate failed, 2 wrong usage, 3 this machine lacks something, 130 interrupted.
    """
    try:
        code = command() or 0
        if code != _Interrupted.exit_code:
            return code
        error: PipeError = _interrupted()  # typer turns an interrupt into this code
    except (KeyboardInterrupt, typer.Abort):
        error = _interrupted()
    except typer.Exit as done:  # the command has printed everything
        return done.exit_code
    except _UsageError as wrong:
        if not sys.argv[1:]:  # `pipe` alone prints its help
            typer.echo(cast("Any", wrong).format_message(), err=True)
            return 2
        details = cast("Any", wrong)
        error = PipeError(details.format_message())
        if details.ctx:  # with the usage of the command
            usage = details.ctx.get_usage().replace("Usage: ", "usage: ")
            error = PipeError(error.what, where=details.ctx.command_path, hint=usage)
        _print_error(error)
    except SystemExit as ended:
        if ended.code not in (None, 0):  # raised by click when the reader of standard output has closed it
            raise
        error = PipeError(f"a package ended the process: SystemExit({ended.code})", hint="nothing was filed")
        _print_error(error)
    except BaseException as raised:  # the program's outermost border: everything becomes a message
        hint = "this is a fault of layerline; --debug shows the traceback for a bug report"
        error = _Bug(f"internal error, {type(raised).__name__}: {words(raised)}", hint=hint)
        if isinstance(raised, PipeError | OSError | MemoryError):
            error = as_pipe_error(raised)
        if debug:
            _print_document(error, as_json=as_json)
            raise
        _print_error(error)
    _print_document(error, as_json=as_json)
    return own_code(error)


def say(sentence: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text, with control characters as escapes; without `nl` it ends as it is."""
    typer.echo(printable(sentence, keep="\n"), err=err, nl=nl)


def print_json(document: Mapping[str, Any]) -> None:
    """Prints the document of a command. It is ASCII, so no control character reaches a terminal through it."""
    typer.echo(json.dumps(document, allow_nan=False), file=process_env.output())


def _print_error(error: PipeError) -> None:
    from layerline.views import screen  # imported late: rich would slow down `pipe --help`

    screen.error(error)


def _print_document(error: PipeError, *, as_json: bool) -> None:
    is_first = True
    with suppress(PipeError):  # the error that is printed
        is_first = launched()[0] == 0
    if as_json and is_first:  # of several ranks only the first one prints
        with suppress(OSError):  # the reader has closed the pipe; the sentence is on standard error
            print_json(error.to_json())


class _Interrupted(PipeError):
    exit_code = 130


class _Bug(PipeError):
    exit_code = 1


def _interrupted() -> PipeError:
    say(f"\n{process_env.INTERRUPTED}", err=True)
    what, hint = process_env.INTERRUPTED.split("; ")
    return _Interrupted(what, hint=hint)
