"""What is done to a project's state as a whole: start it, re-hash it, clean it up."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from filelock import FileLock, Timeout

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.files import Hasher
from layerline.pipeline.ledger import Ledger
from layerline.pipeline.plan import Planner
from layerline.pipeline.project import Project
from layerline.pipeline.store import DamagedError, Store


@dataclass(frozen=True)
class Problem:
    """Something in the state that is not what it was when written."""

    what: str
    fault: str


@dataclass(frozen=True)
class Garbage:
    """Something that no kept run needs; its path below the project, and its bytes."""

    path: str
    size: int


def templates() -> list[str]:
    """Names of the projects that `pipe init` can start from."""
    root = resources.files("layerline").joinpath("templates")
    return sorted(t.name for t in root.iterdir() if t.is_dir() and t.joinpath("pipe.yaml").is_file())


def init(folder: Path, template: str) -> list[Path]:
    """Writes a project's pipe.yaml and task.py into `folder`.

    Raises:
        ConfigError: no such template, or a file is there already; nothing is overwritten.
    """
    if template not in templates():
        raise ConfigError(f"there is no template {template!r}", hint=f"there are: {', '.join(templates())}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError("it is a file, not a folder", where=str(folder))
    source = resources.files("layerline").joinpath("templates").joinpath(template)
    targets = {folder / name: source.joinpath(name).read_text("utf-8") for name in ("pipe.yaml", "task.py")}
    for path in targets:
        if path.exists():
            raise ConfigError("it is there already", where=str(path), hint="choose another folder; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in targets.items():
        path.write_text(text, "utf-8")
    return list(targets)


def verify(project: Project) -> tuple[int, list[Problem]]:
    """Re-hashes every artifact and report, remembering nothing; the number checked and what is wrong."""
    store, ledger = Store(project.state / "store", Hasher(project.state / "no-memo")), Ledger(project.state / "ledger")
    problems, checked = [], 0
    for digest in store.digests():
        checked += 1
        try:
            store.get(digest)
        except DamagedError as error:
            problems.append(Problem(f"artifact {digest[:12]}", str(error)))
    for record in {r.report: r for run in ledger.runs() for r in run.records}.values():
        checked += 1
        if not ledger.report_is_whole(record.report):
            problems.append(Problem(f"report of {record.stage} {record.report[:12]}", "missing or damaged"))
        if (record.digest not in store.digests()) and ledger.get(record.key) == record:
            problems.append(Problem(f"artifact {record.digest[:12]} of {record.stage}", "missing"))
    return checked, problems


def collect(project: Project, keep: int, *, dry_run: bool) -> list[Garbage]:
    """Removes what neither the newest `keep` runs nor the project as it stands need.

    Args:
        project: whose state.
        keep: how many runs stay whole.
        dry_run: only list.
    """
    hasher = Hasher(project.state / "cache" / "digests.json")
    store, ledger = Store(project.state / "store", hasher), Ledger(project.state / "ledger")
    current = {s.artifact.digest for s in Planner(project, store, ledger, hasher).steps() if s.artifact}
    in_use = current | {r.digest for run in list(ledger.runs())[:keep] for r in run.records}
    garbage: list[Garbage] = []

    def drop(path: Path) -> None:
        garbage.append(Garbage(path.relative_to(project.root).as_posix(), _size(path)))

    for digest in store.digests():
        if digest not in in_use:
            drop(store.root / digest)
            if not dry_run:
                store.remove(digest)
    for path in [*ledger.forget(keep, in_use), *_leftovers(project.state)]:
        drop(path)
        if not dry_run:
            _remove(path)
    return garbage


def _leftovers(state: Path) -> list[Path]:
    """Work folders nobody is working in, and artifacts whose removal was cut short."""
    found = list((state / "store").glob(".gone-*"))
    for lock in (state / "work").glob("*.lock"):
        try:
            with FileLock(lock, timeout=0):
                found += [p for p in (lock, lock.with_suffix("")) if p.exists()]
        except Timeout:
            continue  # someone is working there
    return found


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
