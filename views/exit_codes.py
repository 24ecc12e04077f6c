"""How a command ends: with an exit code, and where it failed with one sentence, or one JSON document under `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import typer

from layerline.pipeline import process_env
from layerline.pipeline.errors import PipeError, machine_lacks, words
from layerline.pipeline.errors import exit_code as own_code
from layerline.pipeline.inputs.untrusted import printable

# By its place, not its name: typer carries its own copy of click, or uses the installed one, by version.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


def exit_code(command: Callable[[], int | None], *, as_json: bool, debug: bool) -> int:
    """Runs a command: 0 done, 1 a gate failed, 2 wrong usage, 3 something this machine lacks, 130 interrupted.

    Args:
        command: parses and works; it prints its own result.
        as_json: whether a failure is a JSON document on standard output, beside the sentence on standard error.
        debug: whether errors keep their traceback.
    """
    try:
        code = command() or 0
        if code != _Interrupted.exit_code:
            return code
        error: PipeError = _interrupted()  # typer turns an interrupt into this code
    except (KeyboardInterrupt, typer.Abort):
        error = _interrupted()
    except typer.Exit as done:  # what there was to say has been said
        return done.exit_code
    except _UsageError as wrong:
        if not sys.argv[1:]:  # `pipe` alone: what it says is its help
            typer.echo(cast("Any", wrong).format_message(), err=True)
            return 2
        error = _usage(wrong)
        _tell(error)
    except SystemExit:  # click's, where whoever read standard output has gone
        raise
    except BaseException as raised:  # the one boundary: a bug of ours is told as one
        error = _told(raised)
        if debug:
            _document(error, as_json=as_json)
            raise
        _tell(error)
    _document(error, as_json=as_json)
    return own_code(error)


def say(sentence: str, *, err: bool = False) -> None:
    """A line of text, with control characters as escapes."""
    typer.echo(printable(sentence, keep="\n"), err=err)


def print_json(document: Mapping[str, Any]) -> None:
    """The one document of a command. Its text is ASCII: no control character reaches a terminal through it."""
    typer.echo(json.dumps(document, allow_nan=False), file=process_env.output())


def _tell(error: PipeError) -> None:
    from layerline.views import screen  # here, so that `pipe --help` doesn't wait for rich

    screen.error(error)


def _document(error: PipeError, *, as_json: bool) -> None:
    from layerline.pipeline.runner import rank

    if as_json and not rank():  # of several ranks the first one speaks
        with suppress(OSError):  # whoever read it has gone; the sentence is on standard error
            print_json(error.to_json())


class _Interrupted(PipeError):
    exit_code = 130

    def __init__(self) -> None:
        what, hint = process_env.INTERRUPTED.split("; ")
        super().__init__(what, hint=hint)


def _interrupted() -> PipeError:
    error = _Interrupted()
    say(f"\n{error.what}; {error.hint}", err=True)
    return error


class _Bug(PipeError):
    exit_code = 1


def _told(raised: BaseException) -> PipeError:
    if isinstance(raised, PipeError):
        return raised
    if isinstance(raised, OSError | MemoryError):
        return machine_lacks(raised)
    hint = "this is a fault of layerline; --debug shows the traceback for a bug report"
    return _Bug(f"internal error, {type(raised).__name__}: {words(raised)}", hint=hint)


def _usage(wrong: Any) -> PipeError:
    """A mistake on the command line, in typer's words, with the command it is about."""
    if not wrong.ctx:
        return PipeError(wrong.format_message())
    usage = wrong.ctx.get_usage().replace("Usage: ", "usage: ")
    return PipeError(wrong.format_message(), where=wrong.ctx.command_path, hint=usage)
