"""What `pipe verify` and `pipe gc` print, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerline.pipeline.errors import StageError
from layerline.pipeline.records.housekeeping import Garbage, Problem, counted

_REPAIR = "pipe run all makes them again"


def damage(checked: int, problems: Sequence[Problem]) -> StageError | None:
    """The error that `pipe verify` ends with; None where nothing is damaged."""
    if not problems:
        return None
    return StageError(f"{len(problems)} of {checked} are damaged", hint=_REPAIR)


def verified(checked: int, problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems:
        yield f"{problem.what}: {problem.fault}"
    repair = f"; {_REPAIR}" if problems else ""
    yield f"{checked} checked, {len(problems)} damaged{repair}"


def collected(garbage: Sequence[Garbage] | None, *, dry_run: bool, verbose: bool) -> Iterator[str]:
    """What was removed, or would be with `dry_run`. None means that a run was in progress, so nothing was removed."""
    if garbage is None:
        yield "a run is going on in this project: nothing was removed; try again when it is done"
        return
    if not garbage:
        yield "nothing to remove"
        return
    verb = "would remove" if dry_run else "removed"
    if verbose:
        for item in garbage:
            yield f"{verb} {item.path}"
    megabytes = sum(item.size for item in garbage) / 1e6
    yield f"{verb} {', '.join(counted(garbage))}, {megabytes:.1f} MB"
