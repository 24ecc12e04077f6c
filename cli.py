"""The command `pipe`: parse, call one function, render, exit code."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from layerline import __version__
from layerline.pipeline.errors import PipeError, Unavailable
from layerline.pipeline.project import Project
from layerline.pipeline.project import load as load_project

app = typer.Typer(
    name="pipe",
    help="From a trained PyTorch model to a TensorRT engine: every artifact hashed, every layer compared.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Folder = Annotated[Path, typer.Option("--project", "-C", help="The project's folder.", show_default="this one")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field of pipe.yaml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
StageName = Annotated[str, typer.Argument(metavar="STAGE", help="train, ema, export, fuse, quantize or engine.")]
_HERE = Path()
_DEBUG = False


def main() -> NoReturn:
    """Runs the command line and exits: 0 done, 1 a gate failed, 2 wrong usage, 3 something this machine lacks."""
    try:
        app()  # exits by itself, also on wrong usage
    except (PipeError, OSError, MemoryError) as error:
        code = _tell(error)
    except Exception as error:  # the one boundary: a bug of ours is told as one
        if _DEBUG:
            raise
        print(f"error: internal error, {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        print("  this is a fault of layerline; --debug shows the traceback for a bug report", file=sys.stderr)  # noqa: T201
        code = 1
    sys.exit(code)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    global _DEBUG
    _DEBUG = debug
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the project goes.")],
    template: Annotated[str, typer.Option(help="What to start from.")] = "mnist",
) -> None:
    """Start a project: two files, pipe.yaml and task.py, that run at once."""
    from layerline.pipeline import housekeeping

    for path in housekeeping.init(folder, template):
        typer.echo(f"wrote {path}")
    typer.echo(f"next: cd {folder} && pipe run all")


@app.command()
def run(
    stages: Annotated[list[str], typer.Argument(metavar="all | STAGE…", help="What to bring up to date.")],
    force: Annotated[bool, typer.Option("--force", help="Rerun the named stages even when they are fresh.")] = False,
    sets: Sets = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Bring stages up to date, with whatever they need; then say what is out of date after them."""
    from layerline.pipeline.runner import Runner
    from layerline.views import terminal

    project = load_project(folder, sets or ())
    names = None if stages == ["all"] else stages
    if as_json:
        with (
            _interruptible(),
            contextlib.redirect_stdout(sys.stderr),
        ):  # whatever task.py prints must not break the document
            done = Runner(project, terminal.Silent()).run(names, force=force)
        _print_json(done.to_json())
    else:
        live = terminal.Live(terminal.console(), width=max(len(s.name) for s in project.stages))
        with _interruptible(), contextlib.closing(live):
            done = Runner(project, live).run(names, force=force)
        terminal.outcome(terminal.console(), done, "" if folder == _HERE else f" -C {folder}")
    for result in done.results:
        if result.error is not None:
            terminal.error(result.error)
            if _DEBUG:
                raise result.error
    raise typer.Exit(done.exit_code)


@app.command()
def status(sets: Sets = None, as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """What is fresh, what would run, and why."""
    from layerline.views import terminal

    steps = _planner(load_project(folder, sets or ())).steps()
    if not as_json:
        terminal.status(terminal.console(), steps)
        return
    rows = [
        {
            "name": s.stage.name,
            "state": "fresh" if s.artifact else "would run",
            "reason": s.reason,
            "key": s.key,
            "digest": s.artifact.digest if s.artifact else None,
            "passed": s.record.passed if s.artifact and s.record else None,
        }
        for s in steps
    ]
    _print_json({"stages": rows})


@app.command()
def explain(stage: StageName, sets: Sets = None, as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """Each part of a stage's key: same or changed, old and new value."""
    from layerline.pipeline.plan import changes, shown
    from layerline.views import terminal

    project = load_project(folder, sets or ())
    planner, name = _planner(project), project.stage(stage).name
    step = next(s for s in planner.steps() if s.stage.name == name)
    before = step.record or planner.ledger.head(name)
    old = before.parts if before else None
    prints = {hook: planner.fingerprint(hook) for hook in step.stage.hooks()}
    if not as_json:
        terminal.explain(terminal.console(), step, old, prints)
        return
    changed = changes(old or {}, shown(step.parts))
    parts = {n: {"now": v, "before": (old or {}).get(n), "changed": n in changed} for n, v in shown(step.parts).items()}
    gone = {n: {"now": None, "before": o, "changed": True} for n, (o, v) in changed.items() if v is None}
    reached = {h: {"reached": p.reached, "whole": dict(p.whole), "files": dict(p.files)} for h, p in prints.items()}
    _print_json({"stage": name, "key": step.key, "reason": step.reason, "parts": parts | gone, "hooks": reached})


@app.command()
def diff(
    stage: StageName,
    against: Annotated[str | None, typer.Option(metavar="RUN", help="Show another run's figures beside.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many values to show.")] = 20,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """The per-layer table of a stage's newest run, worst first."""
    from layerline.views import terminal

    project = load_project(folder)
    ledger, name = _planner(project).ledger, project.stage(stage).name
    report = ledger.report(_head(project, name))
    other = None
    if against is not None:
        past = ledger.find_run(against)
        record = next((r for r in past.records if r.stage == name), None)
        if record is None:
            raise PipeError(f"run {past.id} has no stage {name}", hint="name a run that went through it")
        other, against = ledger.report(record), past.id
    if as_json:
        documents = {"report": json.loads(report.to_json()), "against": json.loads(other.to_json()) if other else None}
        _print_json({"stage": name, "run": against, **documents})
    else:
        terminal.diff(terminal.console(), report, top, other, against or "")


@app.command()
def report(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("report.html"),
    run_id: Annotated[str, typer.Option("--run", metavar="RUN", help="Which run.")] = "last",
    folder: Folder = _HERE,
) -> None:
    """One self-contained HTML page for a run."""
    from layerline.pipeline.files import write_atomic
    from layerline.views import html

    project = load_project(folder)
    ledger = _planner(project).ledger
    found = ledger.find_run(run_id)
    write_atomic(output, html.page(project.name, found, {r.stage: ledger.report(r) for r in found.records}))
    typer.echo(f"wrote {output}")


@app.command()
def path(stage: StageName, folder: Folder = _HERE) -> None:
    """The folder of a stage's newest artifact, for scripts."""
    project = load_project(folder)
    artifact = _planner(project).store.get(_head(project, project.stage(stage).name).digest)
    if artifact is None:
        raise PipeError(f"the artifact of {stage} is gone from the store", hint=f"make it again with: pipe run {stage}")
    typer.echo(artifact.path)


@app.command()
def verify(as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """Re-hash everything in the store."""
    from layerline.pipeline import housekeeping

    checked, problems = housekeeping.verify(load_project(folder))
    if as_json:
        _print_json({"checked": checked, "problems": [{"what": p.what, "fault": p.fault} for p in problems]})
    else:
        for problem in problems:
            typer.echo(f"{problem.what}: {problem.fault}")
        typer.echo(
            f"{checked} checked, {len(problems)} damaged" + ("; pipe run all makes them again" if problems else "")
        )
    raise typer.Exit(1 if problems else 0)


@app.command()
def gc(
    keep: Annotated[int, typer.Option(min=0, help="How many of the newest runs stay whole.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Remove what neither the newest runs nor the project as it stands need."""
    from layerline.pipeline import housekeeping

    gone = housekeeping.collect(load_project(folder), keep, dry_run=dry_run)
    size = sum(g.size for g in gone)
    if as_json:
        _print_json({"removed": [g.path for g in gone], "bytes": size, "dry_run": dry_run})
        return
    for item in gone:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {item.path}")
    typer.echo(f"{len(gone)} {'would go' if dry_run else 'gone'}, {size / 1e6:.1f} MB")


def _planner(project: Project) -> Any:
    from layerline.pipeline.runner import Runner
    from layerline.views.terminal import Silent

    return Runner(project, Silent()).planner


def _head(project: Project, stage: str) -> Any:
    record = _planner(project).ledger.head(stage)
    if record is None:
        raise PipeError(f"stage {stage} has not run yet", hint=f"pipe run {stage}")
    return record


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends in one sentence, whatever was at work."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is kept, and the same command goes on from there", file=sys.stderr)  # noqa: T201
        raise typer.Exit(130) from None


def _tell(error: PipeError | OSError | MemoryError) -> int:
    from layerline.views import terminal

    if _DEBUG:
        raise error
    if isinstance(error, OSError):
        error = _machine_lacks(error)
    elif isinstance(error, MemoryError):
        error = Unavailable("this machine ran out of memory", hint="lower the batch size or the number of samples")
    terminal.error(error)
    return error.exit_code


def _machine_lacks(error: OSError) -> Unavailable:
    hints = {
        errno.ENOSPC: "make room, or run `pipe gc`; what was finished is kept",
        errno.EDQUOT: "make room, or run `pipe gc`; what was finished is kept",
        errno.EROFS: "the project lies on a read-only file system: copy it to one that can be written",
        errno.EACCES: "check the permissions of that path",
        errno.EPERM: "check the permissions of that path",
    }
    return Unavailable(
        error.strerror or str(error), where=str(error.filename or "disk"), hint=hints.get(error.errno or 0, "")
    )


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    main()
