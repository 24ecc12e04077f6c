"""What is done to a project's state as a whole: re-hash it, clean it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerline.pipeline.commands.resume import cut_short
from layerline.pipeline.config.project import STATE, Project
from layerline.pipeline.files import GONE, entries, is_partial, remove
from layerline.pipeline.records.run_lock import abandoned, alone
from layerline.pipeline.records.store import DamagedError
from layerline.pipeline.run.plan import open_planner
from layerline.pipeline.untrusted import is_digest

# Where in the state lies what a person counts.
_COUNTED = {"ledger/runs": "run", "store": "artifact", "work": "unfinished stage"}


@dataclass(frozen=True)
class Problem:
    """A file of the state folder that is damaged or was changed."""

    what: str
    fault: str


@dataclass(frozen=True)
class Garbage:
    """Something that no kept run needs; its path below the project (that of a temporary folder whole), its bytes."""

    path: str
    size: int


def verify(project: Project) -> tuple[int, list[Problem]]:
    """Re-hashes every artifact and report, remembering nothing; the number checked and what is wrong."""
    planner = open_planner(project, memo=False)
    store, ledger = planner.store, planner.ledger
    problems = []
    present = list(store.digests())
    checked = len(present)
    for digest in present:
        try:
            store.get(digest)
        except DamagedError as error:
            problems.append(Problem(f"artifact {digest[:12]}", str(error)))
    # Each report once: runs repeat the records of stages that were cached.
    for record in {r.report: r for run in ledger.runs() for r in run.records}.values():
        checked += 1
        if not ledger.report_is_whole(record.report):
            problems.append(Problem(f"report of {record.stage} {record.report[:12]}", "missing or damaged"))
        if record.digest not in present and ledger.get(record.key) == record:
            problems.append(Problem(f"artifact {record.digest[:12]} of {record.stage}", "missing"))
    for what, fault in ledger.damaged():
        checked += 1
        problems.append(Problem(what, f"damaged: {fault}"))
    return checked, problems


def collect(project: Project, keep: int, *, dry_run: bool) -> list[Garbage] | None:
    """Removes what none of the newest `keep` runs, the project as it is and `pipe resume` need, or only lists it.

    While a run is going on, here or in another process, nothing is removed: None.
    """
    if dry_run or not project.state.exists():
        return [_garbage(project, path) for path in _unneeded(project, keep)]
    # A run may be about to read what looks unneeded.
    with alone(project.state) as idle:
        if not idle:
            return None
        for lock in entries(project.works, "*.lock"):
            if is_digest(lock.stem):
                remove(lock)  # nobody holds one now
        return [_remove(project, path) for path in _unneeded(project, keep)]


def counted(gone: Sequence[Garbage]) -> list[str]:
    """What went, in words: "3 runs", "10 artifacts"; keys and reports go with those and aren't counted."""
    places = Counter(place for g in gone for place in _COUNTED if g.path.startswith(f"{STATE}/{place}/"))
    words = [_plural(places[place], noun) for place, noun in _COUNTED.items() if places[place]]
    return words or [_plural(len(gone), "record")]


def _plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def _unneeded(project: Project, keep: int) -> list[Path]:
    planner = open_planner(project)
    store, ledger, steps = planner.store, planner.ledger, planner.steps()
    # What the project as it stands has would be made again at once.
    in_use = {s.artifact.digest for s in steps if s.artifact}
    kept = list(ledger.runs())[:keep]
    in_use |= {r.digest for run in kept for r in run.records}
    # Work that was cut short is resumed: by the project as it stands, or by `pipe resume` with the `--set` it had.
    resumable = {s.key for s in steps if s.key and not s.artifact}
    if (training := cut_short(project)) is not None:
        resumable.add(training[0].name)
    artifacts = [store.root / digest for digest in store.digests() if digest not in in_use]
    work = [path for path in entries(project.works) if is_digest(path.name) and path.name not in resumable]
    # Renamed and not removed yet when its process was killed.
    half_gone = entries(store.root, f"{GONE}*")
    written = (project.state, project.state / "cache", *entries(project.works))
    half_written = [path for place in written for path in entries(place, ".*") if is_partial(path.name)]
    return [*artifacts, *ledger.forget(keep, in_use), *work, *half_gone, *half_written, *abandoned()]


def _garbage(project: Project, path: Path) -> Garbage:
    size = 0
    files: list[Path] = []
    if not path.is_symlink():  # of a link only the link goes
        files = [path, *path.rglob("*")]
    for file in files:
        with suppress(FileNotFoundError):  # a run that goes on may take it away
            if file.is_file():
                size += file.stat().st_size
    name = str(path)
    if path.is_relative_to(project.root):
        name = path.relative_to(project.root).as_posix()
    return Garbage(name, size)


def _remove(project: Project, path: Path) -> Garbage:
    garbage = _garbage(project, path)
    remove(path)
    return garbage
