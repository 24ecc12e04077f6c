"""What `pipe verify` and `pipe gc` say, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerline.pipeline.errors import StageError
from layerline.pipeline.records.housekeeping import Garbage, Problem, counted

_AGAIN = "pipe run all makes them again"


def damage(checked: int, problems: Sequence[Problem]) -> StageError | None:
    """The failure of `pipe verify`, where anything is damaged."""
    return StageError(f"{len(problems)} of {checked} are damaged", hint=_AGAIN) if problems else None


def verified(checked: int, problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems:
        yield f"{problem.what}: {problem.fault}"
    yield f"{checked} checked, {len(problems)} damaged" + (f"; {_AGAIN}" if problems else "")


def collected(found: Sequence[Garbage] | None, *, dry_run: bool, verbose: bool) -> Iterator[str]:
    """What went or would go; None says that a run was going on."""
    if found is None:
        yield "a run is going on in this project: nothing was removed; try again when it is done"
        return
    if not found:
        yield "nothing to remove"
        return
    verb = "would remove" if dry_run else "removed"
    for item in found if verbose else ():
        yield f"{verb} {item.path}"
    yield f"{verb} {', '.join(counted(found))}, {sum(g.size for g in found) / 1e6:.1f} MB"
