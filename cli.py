"""The command `pipe`: parse, call one function, render, exit code."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer import Argument, Option

from layerline import __version__
from layerline.pipeline import process_env
from layerline.pipeline.errors import ConfigError, PipeError, failure_fields
from layerline.pipeline.inputs.untrusted import launched
from layerline.views import exit_codes
from layerline.views.exit_codes import print_json, say

if TYPE_CHECKING:
    from layerline.pipeline.config.project import Project
    from layerline.pipeline.plan import Planner
    from layerline.pipeline.records.lookup import Beside
    from layerline.pipeline.report import Report
    from layerline.pipeline.stage import Stage
    from layerline.views.terminal import Live


app = typer.Typer(
    name="pipe",
    help="From a trained PyTorch model to a TensorRT engine: every artifact hashed, every layer compared.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Folder = Annotated[Path, Option("--project", "-C", help="The project's folder.", show_default="current folder")]
Sets = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a field of pipe.yaml.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document.")]
STAGES = "train, ema, export, fuse, quantize, engine; import-weights or import-onnx where the project starts there"
if "--help" in sys.argv:  # looking through all installed packages takes too long for every command
    _others = sorted(entry.name for entry in metadata.entry_points(group="layerline.stages"))
    STAGES = "; ".join([STAGES, *_others])
StageName = Annotated[str, Argument(metavar="STAGE", help=f"One of {STAGES}.")]
RunId = Annotated[
    str | None,
    Option("--run", metavar="RUN", help="An id from `pipe runs`, `last` or `previous`.", show_default="last"),
]
DEBUGGED = "export or fuse"
TOP = 20  # values that `pipe diff` shows where nobody says how many
_HERE = Path()
_DEBUG = False


def main() -> NoReturn:
    """Runs the command line and exits; `views/exit_codes.py` says with which code."""
    global _DEBUG
    arguments = sys.argv[1:]
    _DEBUG = "--debug" in arguments  # understood wherever it stands
    command = [a for a in arguments if a != "--debug"]
    as_json = "--json" in arguments
    try:
        process_env.own_process()  # from here on Ctrl-C raises KeyboardInterrupt
        process_env.prepare()
        code = exit_codes.exit_code(lambda: _dispatch(command), as_json=as_json, debug=_DEBUG)
        code = process_env.ended(code)
    except KeyboardInterrupt:  # before the command began, or while its end was being told
        process_env.interrupt_at_once()
    sys.exit(code)


def _dispatch(arguments: list[str]) -> Any:
    """Runs a command. `-C DIR` is an option of every command; before the command it means the same."""
    from layerline.pipeline.config.document import check_options

    count = 0
    if arguments and arguments[0] in ("-C", "--project"):
        count = 2
    elif arguments and arguments[0].startswith(("-C", "--project=")):
        count = 1
    folder, rest = arguments[:count], arguments[count:]
    command = [*rest[:1], *folder, *rest[1:]]
    check_options(command)
    return app(command, prog_name="pipe", standalone_mode=False)


@app.callback(invoke_without_command=True)
def _options(
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options of every command; `main` has handled --debug."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of the new project.")],
    template: Annotated[str | None, Option(help="Template: mnist or blank.", show_default="mnist")] = None,
    onnx: Annotated[Path | None, Option("--from-onnx", metavar="FILE", help="Start from an ONNX model.")] = None,
    weights: Annotated[
        Path | None,
        Option("--from-checkpoint", metavar="FILE", help="Start from weights; needs --model."),
    ] = None,
    model: Annotated[
        str | None,
        Option(metavar="MODULE:FACTORY", help="Function that builds the network."),
    ] = None,
    data: Annotated[
        Path | None, Option(metavar="NPZ", help="Samples: one array per input, and optionally `label`.")
    ] = None,
    trust: Annotated[bool, Option("--trust", help="Allow the checkpoint to run pickled code.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a project: a pipe.yaml and task.py that run unchanged."""
    from layerline.pipeline.init.from_files import begin

    written, step = begin(folder, template=template, onnx=onnx, weights=weights, model=model, data=data, trust=trust)
    if as_json:
        print_json({"written": [str(path) for path in written], "next": step})
        return
    for path in written:
        say(f"wrote {path}")
    say(f"next: {step}")


@app.command()
def run(
    stages: Annotated[list[str], Argument(metavar="all | STAGE…", help=f"Stages to run: {STAGES}.")],
    force: Annotated[bool, Option("--force", help="Run the named stages even when they are fresh.")] = False,
    sets: Sets = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Run stages that are out of date, and the stages that they need.

    Lists the later stages that are out of date afterwards.
    """
    _run(stages, sets, force=force, as_json=as_json, folder=folder)


@app.command()
def tune(
    max_drop: Annotated[
        str | None,
        Option(
            metavar="BUDGET",
            help="As quantize.max_drop: 0.01, 0.5% or {accuracy: 0.5%}.",
            show_default="that of pipe.yaml, else 0.5%",
        ),
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Find the cheapest formats of layers that keep the accuracy.

    Runs quantize with quantize.search, and shows what each layer costs and saves, and what was chosen.
    """
    options = ["quantize.search=true"]
    if max_drop is not None:
        options.append(f"quantize.max_drop={max_drop}")
    options += sets or []
    tables = ("repairs", "search", "slices", "flipped answers")
    _run(["quantize"], options, force=False, as_json=as_json, folder=folder, tables=tables)


def _run(
    stages: Sequence[str],
    sets: Sequence[str] | None,
    *,
    force: bool,
    as_json: bool,
    folder: Path,
    tables: Sequence[str] = (),
) -> NoReturn:
    """Runs stages, shows these tables of the last one's report, and exits."""
    from layerline.pipeline.records import lookup
    from layerline.pipeline.runner import Runner
    from layerline.views import json_output, screen, terminal

    project = _load(folder.resolve(), sets)
    names = lookup.asked_for(project, stages)
    project.require_task(names)
    rank, _ = launched()
    silent = as_json or rank > 0  # of several ranks the first one speaks
    with _at_work(project, project.stages, silent=silent) as live:
        done = Runner(project, live).run(names, force=force)
    if _DEBUG and done.error:
        raise done.error
    report = None
    for result in done.results[-1:]:
        if tables and result.record:
            report = _planner(project).ledger.report(result.record)
    if as_json and not rank:
        document = done.to_json()
        if report is not None:
            document["report"] = {name: json_output.plain(report)[name] for name in ("tables", "notes")}
        print_json(document)
    elif report is not None and not silent:
        terminal.report_tables(screen.console(), report, tables)
    for result in done.results:
        if result.error is not None:
            screen.error(result.error)
    if not silent:
        terminal.run_outcome(screen.console(), done, _where(folder), sets or ())
    raise typer.Exit(done.exit_code)


@app.command()
def check(sets: Sets = None, as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """Check pipe.yaml and task.py in seconds, without training.

    Calls every hook on two samples and looks up every name of pipe.yaml in the model.
    """
    from layerline.pipeline.check import check_and_remember
    from layerline.views import screen, terminal

    project = _load(folder.resolve(), sets)
    project.require_task()
    with _at_work(project, (), silent=as_json):
        done = check_and_remember(project)
    if as_json:
        print_json(done.to_json())
    else:
        terminal.check(screen.console(), done)
    raise typer.Exit(done.exit_code)


@app.command()
def resume(
    prove: Annotated[bool, Option("--prove", help="Show that resuming changes no bit of the result.")] = False,
    steps: Annotated[
        int | None,
        Option(min=1, help="With --prove: optimizer steps before and after the checkpoint.", show_default="10"),
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Resume the most recent interrupted training.

    Uses the original --set values. `pipe run train` with the same values resumes it too.
    With --prove, trains a few steps with and without an interruption and compares the results bit by bit.
    """
    from layerline.pipeline import resume as resuming
    from layerline.views import json_output, screen, terminal

    project = _load(folder.resolve(), sets)
    if prove:
        project, stage, message = resuming.to_prove(project)
        if message:
            say(message, err=as_json)
        project.require_task([stage.name])
        with _at_work(project, [stage], silent=as_json) as live:
            proof = resuming.prove(project, steps or 10, live)
        failure = None if proof.passed else proof.failure()
        if as_json:
            document = {"stage": stage.name, "passed": proof.passed, **failure_fields(failure)}
            print_json({**document, "report": json_output.plain(proof)})
        if failure:
            screen.error(failure)
            raise typer.Exit(failure.exit_code)
        if not as_json:
            terminal.findings(screen.console(), proof)
        return
    if steps is not None:
        raise PipeError("--steps needs --prove", hint="pipe.yaml says how long to train")
    stage = resuming.resumable(project)
    with_sets, message = resuming.going_on(project, stage)
    if message:
        say(message, err=as_json)
    run([stage.name], sets=list(with_sets), as_json=as_json, folder=folder)


@app.command()
def status(sets: Sets = None, as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """Show which stages are fresh, which would run, and why."""
    from layerline.pipeline.records import lookup, run_lock
    from layerline.pipeline.runner import BROKEN_OFF
    from layerline.views import json_output, screen, terminal

    project = _load(folder, sets)
    project.require_task()
    steps, states = lookup.status(_planner(project))
    if run_lock.was_broken_off(project.state):
        say(BROKEN_OFF, err=True)
    if as_json:
        print_json(json_output.status(steps, states))
    else:
        terminal.status(screen.console(), steps, states)


@app.command()
def runs(as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """List the runs that changed something or failed, newest first."""
    from layerline.views import json_output, screen, terminal

    listed = json_output.runs(_planner(_load(folder)).ledger.runs())
    if as_json:
        print_json(listed)
    elif listed["runs"]:
        terminal.runs(screen.console(), listed["runs"])
    else:
        say(f"there is no run yet: pipe run all{_where(folder)}")


@app.command()
def explain(stage: StageName, sets: Sets = None, as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """Show each part of a stage's key, with its old and its new value."""
    from layerline.pipeline.records import lookup
    from layerline.views import json_output, screen, terminal

    project = _load(folder, sets)
    planner, name = _planner(project), project.stage(stage).name
    step, old, prints = lookup.explained(planner, name)
    if as_json:
        print_json(json_output.explain(step, old, prints))
    else:
        terminal.explain(screen.console(), step, old, prints)


@app.command()
def diff(
    stage: Annotated[str, Argument(metavar="STAGE[@RUN]|FILE", help=f"One of {STAGES}; or an ONNX file.")],
    other: Annotated[
        str | None,
        Argument(metavar="[STAGE[@RUN]|FILE]", help="The stage or file whose model is compared with the first's."),
    ] = None,
    data: Annotated[Path | None, Option(metavar="NPZ", help="Samples for two files: one array per input.")] = None,
    run_id: RunId = None,
    sets: Sets = None,
    against: Annotated[
        str | None,
        Option(metavar="RUN", help="Compare with another run: an id from `pipe runs`, or `previous`."),
    ] = None,
    on: Annotated[
        str | None,
        Option(metavar="BACKEND", help="Run the stage's model on a backend and compare with onnxruntime."),
    ] = None,
    sort: Annotated[
        Literal["own", "error", "sqnr", "effect", "clipped", "network"] | None,
        Option(
            help="Sort by each layer's own error, by accumulated error (sqnr), by its effect at the outputs, or so on.",
            show_default="own where measured; network with --json",
        ),
    ] = None,
    top: Annotated[
        int | None,
        Option(min=1, help="Number of values to show.", show_default=f"{TOP}, or all with --json or --csv"),
    ] = None,
    module: Annotated[
        str | None,
        Option(metavar="PATTERN", help="Only modules of this path and below it, or that match this glob."),
    ] = None,
    fail_under: Annotated[
        list[str] | None,
        Option(
            metavar="MEASURE=VALUE",
            help="Exit with code 1 if sqnr, own, effect, weight (dB) or cosine of a layer is lower.",
        ),
    ] = None,
    repro: Annotated[
        Path | None,
        Option(metavar="DIR", help="For two models: write the smallest one that shows the first value listed."),
    ] = None,
    as_csv: Annotated[bool, Option("--csv", help="Print the table as CSV.")] = False,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Show each layer's errors, of a stage or between two stages, runs or ONNX files.

    Of the newest run, of the run given with --run, or of the newest run with the settings given with --set.
    docs/cli.md and the page of `pipe report` explain the columns.
    """
    from layerline.pipeline import diff_on
    from layerline.pipeline.debug import refuse_used
    from layerline.views import json_output, screen, selection, tables, terminal

    _only_one(csv=as_csv, json=as_json)
    _only_one(on=on, against=against)
    silent = as_json or as_csv
    limits = selection.read_limits(fail_under or ())
    beside = None
    if other is None and not stage.endswith(".onnx"):
        _refuse(data=data, repro=repro, why="needs two models: name a second stage or file")
        report, beside = _of_stage(stage, run_id, sets, against, on, folder, silent=silent)
    else:
        _refuse(against=against, on=on, why="is about one stage")
        further: dict[str, Any] = {"effect": sort == "effect" or "effect" in limits, "order": sort or "own"}
        if repro is not None:
            _only_one(repro=repro, module=module)
            refuse_used(repro)
            further["repro"] = repro.resolve()
        with contextlib.closing(terminal.listener([], silent=silent)) as log:
            if stage.endswith(".onnx") or str(other).endswith(".onnx"):
                _refuse(run=run_id, set=sets, why="is about a stage, and these are two files")
                report = diff_on.diff_files(Path(stage), other, data, log, further)
            else:
                _refuse(data=data, why="is about two ONNX files: stages are compared on their probes")
                report = diff_on.diff_stages(_load(folder.resolve(), sets), (stage, str(other)), log, run_id, further)
    if module is not None:
        report = selection.of_module(report, module)
        if beside is not None:
            beside = replace(beside, report=selection.matching(beside.report, module))
    failing = selection.below(report, limits)
    failure = selection.failure(failing, report.stage)
    order = sort or ("network" if silent and not top else report.order)
    if as_json:
        print_json(json_output.diff(report.stage, report, beside, order, top, failing, failure))
    elif as_csv:
        then = screen.cleaned(beside.report) if beside else None
        say(tables.csv_text(screen.cleaned(report), order, then, top), nl=False)
    else:
        terminal.diff(screen.console(), report, top or TOP, order, beside)
    if failure:
        screen.error(failure)
        raise typer.Exit(failure.exit_code)


def _of_stage(
    stage: str,
    run_id: str | None,
    sets: Sequence[str] | None,
    against: str | None,
    on: str | None,
    folder: Path,
    *,
    silent: bool,
) -> tuple[Report, Beside | None]:
    """The report of a stage (`STAGE` or `STAGE@RUN`), or of its model on a backend; and that of another run."""
    from layerline.pipeline import diff_on
    from layerline.pipeline.records import lookup

    name, _, run_of_stage = stage.partition("@")
    if run_of_stage:
        _refuse(run=run_id, why=f"says another run than {stage}")
    run_id = run_of_stage or run_id
    project = _load(folder.resolve(), sets)
    planner, chosen_stage = _planner(project), project.stage(name)
    if on is not None:
        with _at_work(project, [chosen_stage], silent=silent) as live:
            return diff_on.diff_on(project, name, on, live, run_id), None
    chosen = lookup.choose(planner, name, run_id)
    beside = None if against is None else lookup.beside(planner, chosen, against)
    return planner.ledger.report(chosen.record), beside


def _refuse(*, why: str, **options: object) -> None:
    """Refuses options that mean nothing here."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"it {why}", where=f"--{name}", hint="leave it out, or see: pipe diff --help")


def _only_one(**options: object) -> None:
    """Refuses two options that exclude each other."""
    used = [f"--{name}" for name, value in options.items() if value]
    if len(used) > 1:
        raise ConfigError(f"{' and '.join(used)} exclude each other", hint="give one of the two")


@app.command()
def why(
    run_id: RunId = None,
    sets: Sets = None,
    try_it: Annotated[
        bool, Option("--try", help="Make the advised change on the side and show before and after.")
    ] = False,
    repro: Annotated[
        Path | None, Option(metavar="DIR", help="Write the smallest model that shows the likeliest cause.")
    ] = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Show where accuracy was lost, why, and what to change.

    Evaluates what each stage of the newest run left, or of the run given with --run. --try runs the stages again with
    the advised --set; pipe.yaml stays as it is.
    """
    from layerline.pipeline import why as reasons
    from layerline.pipeline.debug import refuse_used
    from layerline.views import json_output, screen, terminal

    project = _load(folder.resolve(), sets)
    project.require_task()
    if repro is not None:
        repro = repro.resolve()  # the hooks run in another folder
        refuse_used(repro)
    with _at_work(project, project.stages, silent=as_json) as live:
        explained = reasons.explain(project, live, run_id)
        trial = reasons.attempt(project, explained.causes, live, run_id) if try_it else None
        shown = None if repro is None else reasons.reproduce(project, explained, live, repro)
    report = explained.report
    if as_json:
        document: dict[str, Any] = {"report": json_output.plain(report)}
        if shown is not None:
            document["repro"] = {"value": shown.name, "folder": str(repro)}
        if trial is not None:
            document["try"] = {"setting": trial.setting, "report": json_output.plain(trial.report)}
        print_json(document)
        return
    terminal.why(screen.console(), report, reasons.TABLES)
    if shown is not None:
        say(f"wrote {repro}: the smallest model that shows it, in {shown.name}; repro.py runs it")
    if trial is not None:
        say(f"with --set {shlex.quote(trial.setting)}:")
        terminal.why(screen.console(), trial.report, reasons.TABLES[:1])


@app.command()
def report(
    output: Annotated[Path, Option("--output", "-o", help="File to write.")] = Path("report.html"),
    run_id: RunId = None,
    sets: Sets = None,
    compare: Annotated[
        list[str] | None,
        Option(metavar="RUN", help="Put this run beside it; may be repeated.", show_default="the run before"),
    ] = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Write a self-contained HTML page about a run.

    About the newest run, the run given with --run, or the newest run with the settings given with --set.
    """
    from layerline.pipeline import why as reasons
    from layerline.pipeline.files import write_atomic
    from layerline.pipeline.records import lookup
    from layerline.views import html, plan_tree

    if not output.parent.is_dir():
        raise PipeError(f"there is no folder {output.parent}", hint="create it, or choose another file with -o")
    project = _load(folder, sets)
    planner = _planner(project)
    chosen_run = lookup.find_run(planner, run_id)
    now = lookup.past(planner, chosen_run)
    missing = []
    if not chosen_run.passed:
        missing = [stage.name for stage in project.stages if stage.name not in now.reports]
    logs = lookup.logs(planner, chosen_run)
    plans = lookup.files(planner, chosen_run, "quantized", plan_tree.FILE)
    text = html.page(
        project.name,
        chosen_run,
        now.reports,
        missing,
        logs,
        reasons.from_reports(project, chosen_run, now.reports, logs),
        lookup.beside_run(planner, chosen_run, compare or ()),
        {stage: plan_tree.read(path) for stage, path in plans.items()},
    )
    write_atomic(output, text)
    if as_json:
        print_json({"run": chosen_run.id, "page": str(output)})
    else:
        say(f"wrote {output}")


@app.command()
def path(
    stage: StageName, run_id: RunId = None, sets: Sets = None, as_json: AsJson = False, folder: Folder = _HERE
) -> None:
    """Print the folder of a stage's artifact, for use in scripts.

    Of the newest run, the run given with --run, or the newest run with the settings given with --set.
    """
    from layerline.pipeline.records import lookup

    artifact, doubt = lookup.artifact(_load(folder, sets), stage, run_id)
    place = artifact.path.resolve()
    if as_json:
        print_json({"stage": stage, "path": str(place), "digest": artifact.digest, "note": doubt or None})
        return
    if doubt:
        say(f"note: {doubt}", err=True)
    typer.echo(place)  # as it is: a script opens it


@app.command()
def plan(
    what: Annotated[
        str, Argument(metavar="[STAGE|FILE]", help="quantize, or a plan.json or a folder that holds one.")
    ] = "quantize",
    beside: Annotated[
        str | None,
        Option("--diff", metavar="OTHER", help="Show what differs from a run (`previous`, an id) or a plan.json."),
    ] = None,
    run_id: RunId = None,
    sets: Sets = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Show how each value is quantised, or why it is not, by module."""
    from layerline.pipeline.records import lookup
    from layerline.views import plan_tree, screen

    def read(name: str, run: str | None) -> Any:
        if Path(name).exists():
            return plan_tree.read(Path(name))
        stage = "quantize" if Path(what).exists() else what
        return plan_tree.read(lookup.artifact(_load(folder, sets), stage, run)[0].path)

    entries = read(what, run_id)
    differing = None if beside is None else plan_tree.changes(entries, read(beside, beside))
    if as_json:
        print_json({"entries": list(entries.values())} if differing is None else {"changes": differing})
    else:
        plan_tree.show(screen.console(), entries, differing)


@app.command()
def debug(
    stage: Annotated[str, Argument(metavar="STAGE", help=f"{DEBUGGED}.")],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default="debug-STAGE")
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Find where export or fuse fails, and write a minimal model of it."""
    from layerline.pipeline.debug import debug as find
    from layerline.views import json_output, screen, terminal

    project, target = _load(folder.resolve(), sets), (output or Path(f"debug-{stage}")).resolve()
    with _at_work(project, [project.stage(stage)], silent=as_json) as live:
        report, files = find(project, stage, target, live)
    if as_json:
        print_json({"stage": stage, "found": json_output.plain(report)["records"], "files": files})
    elif not report.records:
        say(f"every value of {stage} passes")
    else:
        terminal.diff(screen.console(), report, 1, "error")
        say(f"wrote {target}: {', '.join(files)}")


@app.command()
def verify(as_json: AsJson = False, folder: Folder = _HERE) -> None:
    """Hash everything in the store again, and report what is damaged."""
    from layerline.pipeline.records import housekeeping
    from layerline.views import json_output, terminal

    checked, problems = housekeeping.verify(_load(folder))
    damage = terminal.damage(checked, problems)
    if as_json:
        print_json(json_output.verify(checked, problems, damage))
    else:
        say("\n".join(terminal.verified(checked, problems)))
    if damage:
        raise typer.Exit(damage.exit_code)


@app.command()
def gc(
    keep: Annotated[int, Option(min=0, help="Number of newest runs to keep complete.")] = 3,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be removed.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="List each removed file.")] = False,
    as_json: AsJson = False,
    folder: Folder = _HERE,
) -> None:
    """Remove old artifacts and records that nothing needs any more.

    Keeps what the newest runs, the current pipe.yaml and task.py, and `pipe resume` need.
    """
    from layerline.pipeline.records import housekeeping
    from layerline.views import json_output, terminal

    removed = housekeeping.collect(_load(folder), keep, dry_run=dry_run)
    if as_json:
        print_json(json_output.gc(removed, dry_run=dry_run))
    else:
        say("\n".join(terminal.collected(removed, dry_run=dry_run, verbose=verbose)))


def _load(folder: Path, sets: Sequence[str] | None = None) -> Project:
    from layerline.pipeline.config.project import load  # here, so that `pipe --help` doesn't wait for pydantic

    return load(folder, sets or ())


def _planner(project: Project) -> Planner:
    from layerline.pipeline.plan import open_planner

    return open_planner(project)


@contextlib.contextmanager
def _at_work(project: Project, stages: Sequence[Stage], *, silent: bool) -> Iterator[Live]:
    """Around whatever runs the user's code: its folder is the current one, and its prints can't reach the JSON."""
    from layerline.views import terminal

    quiet = process_env.stdout_to_stderr() if silent else contextlib.nullcontext()
    live = terminal.listener(stages, silent=silent)
    with process_env.inside(project.root), quiet, contextlib.closing(live):
        yield live


def _where(folder: Path) -> str:
    """The option that a suggested command needs to be about the same project."""
    if folder == _HERE:
        return ""
    return f" -C {shlex.quote(str(folder))}"


if __name__ == "__main__":
    main()
