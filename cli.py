"""The command `pipe`: parse, call one function, render, exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from layerline import __version__
from layerline.pipeline import process_env
from layerline.pipeline.errors import PipeError
from layerline.pipeline.untrusted import launched
from layerline.views import exit_codes
from layerline.views import options as opt
from layerline.views.exit_codes import print_json, say
from layerline.views.shared import Shared, project_command

app = typer.Typer(
    name="pipe",
    help="From a trained PyTorch model to a TensorRT engine: every artifact hashed, every layer compared.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_command = partial(project_command, app)
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
        # From here on handlers that user code registered for the exit can change nothing.
        code = process_env.ended(code)
    except KeyboardInterrupt:  # before the command began, or while its end was being told
        process_env.interrupt_at_once()
    sys.exit(code)


def _dispatch(arguments: list[str]) -> Any:
    """Runs a command. `-C DIR` is an option of every command; before the command it means the same."""
    # How many words the option takes: `-C DIR` two, `-CDIR` and `--project=DIR` one.
    count = 0
    if arguments and arguments[0] in ("-C", "--project"):
        count = 2
    elif arguments and arguments[0].startswith(("-C", "--project=")):
        count = 1
    folder, rest = arguments[:count], arguments[count:]
    return app([*rest[:1], *folder, *rest[1:]], prog_name="pipe", standalone_mode=False)


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
    folder: opt.NewFolder,
    template: opt.Template = None,
    onnx: opt.FromOnnx = None,
    weights: opt.FromCheckpoint = None,
    model: opt.Factory = None,
    data: opt.Samples = None,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
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


@_command
def run(shared: Shared, stages: opt.StageNames, force: opt.Force = False) -> None:
    """Run stages that are out of date, and the stages that they need.

    Lists the later stages that are out of date afterwards.
    """
    _run(shared, stages, force=force)


@_command
def tune(shared: Shared, max_drop: opt.MaxDrop = None) -> None:
    """Find the cheapest formats of layers that keep the accuracy.

    Runs quantize with quantize.search, and shows what each layer costs and saves, and what was chosen.
    """
    from layerline.pipeline.config.quantize_fields import takes_fp8

    options = ["quantize.search=true"]
    if max_drop is not None:
        options.append(f"quantize.max_drop={max_drop}")
    if takes_fp8(shared.project.stages):
        options.append("quantize.try_fp8=true")
    # What the user sets comes last, and so wins.
    shared = replace(shared, sets=(*options, *shared.sets))
    _run(shared, ["quantize"], tables=("repairs", "search", "slices", "flipped answers"))


def _run(shared: Shared, stages: Sequence[str], *, force: bool = False, tables: Sequence[str] = ()) -> NoReturn:
    """Runs stages, shows these tables of the last one's report, and exits."""
    from layerline.pipeline.commands import lookup
    from layerline.views import json_output, report_output, screen, terminal
    from layerline.views.journal import watched_run

    project = shared.project
    names = lookup.asked_for(project, stages)
    # Before anything is said to run: a project without its task file has nothing to run.
    project.require_task(names)
    rank, _ = launched()
    silent = shared.as_json or rank > 0  # of several ranks the first one speaks
    with shared.at_work(project.stages, silent=silent) as live:
        done = watched_run(project, live, names, force=force)
    # A failure of a stage is part of the outcome; only --debug asks for its traceback.
    if _DEBUG and done.error:
        raise done.error
    report = None
    for result in done.results[-1:]:
        if tables and result.record:
            report = shared.planner.ledger.report(result.record)
    if shared.as_json and not rank:
        print_json(json_output.run(done, report))
    elif report is not None and not silent:
        report_output.report_tables(screen.console(), report, tables)
    for result in done.results:
        if result.error is not None:
            screen.error(result.error)
    if not silent:
        # The tables are those of `pipe tune`, whose note says how to keep the choice.
        terminal.run_outcome(screen.console(), done, shared.where, shared.sets, note_advises=bool(tables))
    raise typer.Exit(done.exit_code)


@_command
def check(shared: Shared) -> None:
    """Check pipe.yaml and task.py in seconds, without training.

    Calls every hook on two samples and looks up every name of pipe.yaml in the model.
    """
    from layerline.pipeline.run.check import check_and_remember
    from layerline.views import terminal

    shared.project.require_task()
    with shared.at_work(()):
        done = check_and_remember(shared.project)
    shared.show(done.to_json(), lambda out: terminal.check(out, done))
    raise typer.Exit(done.exit_code)


@_command
def resume(shared: Shared, prove: opt.Prove = False, steps: opt.Steps = None) -> None:
    """Resume the most recent interrupted training.

    Uses the original --set values. `pipe run train` with the same values resumes it too.
    With --prove, trains a few steps with and without an interruption and compares the results bit by bit.
    """
    from layerline.pipeline.commands import resume as resuming

    if prove:
        _prove_resume(shared, steps or 10)
        return
    if steps is not None:
        raise PipeError("--steps needs --prove", hint="pipe.yaml says how long to train")
    stage = resuming.resumable(shared.project)
    sets, message = resuming.going_on(shared.project, stage)
    if message:
        say(message, err=shared.as_json)
    _run(replace(shared, sets=sets), [stage.name])


def _prove_resume(shared: Shared, steps: int) -> None:
    from layerline.pipeline.commands import resume as resuming
    from layerline.views import json_output, report_output

    project, stage, message = resuming.to_prove(shared.project)
    if message:
        say(message, err=shared.as_json)
    project.require_task([stage.name])
    with shared.at_work([stage]) as live:
        proof = resuming.prove(project, steps, live)
    failure = None
    if not proof.passed:
        failure = proof.failure()
    if failure is None or shared.as_json:
        shared.show(json_output.proof(stage.name, proof, failure), lambda out: report_output.findings(out, proof))
    _end(failure)


@_command
def status(shared: Shared) -> None:
    """Show which stages are fresh, which would run, and why."""
    from layerline.pipeline.commands import lookup
    from layerline.pipeline.records import run_lock
    from layerline.pipeline.run.runner import BROKEN_OFF
    from layerline.views import json_output, terminal

    shared.project.require_task()
    steps, states = lookup.status(shared.planner)
    # On standard error: scripts read the table.
    if run_lock.was_broken_off(shared.project.state):
        say(BROKEN_OFF, err=True)
    shared.show(json_output.status(steps, states), lambda out: terminal.status(out, steps, states))


@partial(_command, sets=False)
def runs(shared: Shared) -> None:
    """List the runs that changed something or failed, newest first."""
    from layerline.views import json_output, terminal

    listed = json_output.runs(shared.planner.ledger.runs())
    if listed["runs"] or shared.as_json:
        shared.show(listed, lambda out: terminal.runs(out, listed["runs"]))
    else:
        say(f"there is no run yet: pipe run all{shared.where}")


@_command
def explain(shared: Shared, stage: opt.StageName) -> None:
    """Show each part of a stage's key, with its old and its new value."""
    from layerline.pipeline.commands import lookup
    from layerline.views import json_output, terminal

    step, old, prints = lookup.explained(shared.planner, shared.project.stage(stage).name)
    shared.show(json_output.explain(step, old, prints), lambda out: terminal.explain(out, step, old, prints))


@_command
def diff(
    shared: Shared,
    stage: opt.DiffFirst,
    other: opt.DiffSecond = None,
    data: opt.DiffData = None,
    run_id: opt.RunId = None,
    against: opt.Against = None,
    on: opt.On = None,
    sort: opt.Sort = None,
    top: opt.Top = None,
    module: opt.Module = None,
    fail_under: opt.FailUnder = None,
    repro: opt.DiffRepro = None,
    by_channel: opt.ByChannel = "",
    as_csv: opt.AsCsv = False,
) -> None:
    """Show each layer's errors, of a stage or between two stages, runs or ONNX files.

    Of the newest run, of the run given with --run, or of the newest run with the settings given with --set.
    docs/cli.md and the page of `pipe report` explain the columns.
    """
    from layerline.pipeline.commands import diff_on, lookup
    from layerline.pipeline.commands.debug import refuse_used
    from layerline.pipeline.report import CHANNELS
    from layerline.views import json_output, report_output, screen, selection, tables, terminal

    options = {"run": run_id, "set": shared.sets, "json": shared.as_json, "csv": as_csv, "data": data, "on": on}
    # Each kind of comparison takes some of the options, and refuses the others by name.
    options |= {"against": against, "module": module, "repro": repro, "by-channel": by_channel}
    kind = opt.diff_kind(stage, other, options)
    limits = selection.read_limits(fail_under or ())
    # Progress would stand between the lines of a document.
    silent = shared.as_json or as_csv
    beside = None
    if kind == "one stage":
        if "@" in stage:
            opt.refuse({"run": run_id}, f"says another run than {stage}")
        name, run_id = lookup.stage_and_run(stage, run_id)
        lookup.one_choice(shared.project, run_id)
        if on is None:
            report, beside = lookup.filed_report(shared.planner, name, run_id, against)
        else:
            with shared.at_work([shared.project.stage(name)], silent=silent) as live:
                report = diff_on.diff_on(shared.project, name, on, live, run_id)
    else:
        # Measuring effects takes another pass over the samples.
        measures_effect = sort in ("effect", "gain") or "effect" in limits
        further: dict[str, Any] = {"effect": measures_effect, "order": sort or "own", "channels": by_channel}
        if repro is not None:
            refuse_used(repro)
            further["repro"] = repro.resolve()
        with contextlib.closing(terminal.listener([], silent=silent)) as log:
            if kind == "two files":
                report = diff_on.diff_files(Path(stage), other, data, log, further)
            else:
                report = diff_on.diff_stages(shared.project, (stage, str(other)), log, run_id, further)
    if module is not None:
        report = selection.of_module(report, module)
        if beside is not None:
            beside = replace(beside, report=selection.matching(beside.report, module))
    # What fell below a limit is told after the table, and ends the command with code 1.
    failing = selection.below(report, limits)
    failure = selection.failure(failing, report.stage)
    order = sort or ("network" if silent and not top else report.order)
    if as_csv:
        then = screen.cleaned(beside.report) if beside else None
        say(tables.csv_text(screen.cleaned(report), order, then, top), nl=False)
    else:
        document = json_output.diff(report.stage, report, beside, order, top, failing, failure)
        if by_channel:
            shared.show(document, lambda out: report_output.report_tables(out, report, (CHANNELS,)))
        else:
            shared.show(document, lambda out: report_output.diff(out, report, top or opt.TOP, order, beside))
    if repro is not None and not silent:
        say(f"wrote {repro}: the smallest model that shows the first value; repro.py runs it")
    _end(failure)


@_command
def why(shared: Shared, run_id: opt.RunId = None, try_it: opt.Try = False, repro: opt.WhyRepro = None) -> None:
    """Show where accuracy was lost, why, and what to change.

    Evaluates what each stage of the newest run left, or of the run given with --run. --try runs the stages again with
    the advised --set; pipe.yaml stays as it is.
    """
    from layerline.pipeline.commands.debug import refuse_used
    from layerline.pipeline.diagnosis import why as reasons
    from layerline.views import json_output, report_output

    project = shared.project
    project.require_task()
    if repro is not None:
        repro = repro.resolve()  # the hooks run in another folder
        refuse_used(repro)
    trial, shown, failure = None, None, None
    with shared.at_work(project.stages) as live:
        explained = reasons.explain(project, live, run_id)
        try:
            if repro is not None:
                shown = reasons.reproduce(project, explained, live, repro)
            if try_it:
                trial = reasons.attempt(project, explained.causes, live, run_id)
        except PipeError as error:
            failure = error  # what was measured is printed all the same
    report = explained.report
    shared.show(
        json_output.why(report, failure, repro, shown, trial),
        lambda out: report_output.why_and_trial(out, report, trial),
    )
    if repro is not None and not shared.as_json:
        if shown is not None:
            say(f"wrote {repro}: the smallest model that shows it, in {shown.name}; repro.py runs it")
        elif failure is None:
            say("nothing to show: no cause was found")
    _end(failure)


@_command
def report(
    shared: Shared,
    output: opt.Page = Path("report.html"),
    run_id: opt.RunId = None,
    compare: opt.Compare = None,
    serve: opt.Serve = False,
    port: opt.Port = None,
) -> None:
    """Write a self-contained HTML page about a run.

    About the newest run, the run given with --run, or the newest run with the settings given with --set. With --serve,
    first shows a run that is going on in a browser, and writes its page when it has ended.
    """
    from layerline.pipeline.commands import lookup
    from layerline.pipeline.files import check_replaceable, write_atomic
    from layerline.views import html, live

    # Before the run is watched, which may take hours.
    check_replaceable(output)
    if not output.parent.is_dir():
        raise PipeError(f"there is no folder {output.parent}", hint="create it, or choose another file with -o")
    if serve:
        reason = "chooses a run that has ended, and --serve shows one that is going on"
        opt.refuse({"run": run_id, "set": shared.sets}, reason)
        with live.served(shared.project, port or 0) as server:
            say(f"{server.url} shows the run; Ctrl-C closes the view, not the run", err=shared.as_json)
            watched = server.watch(shared.project)
            run = lookup.find_run(shared.planner, None)
            for filed in shared.planner.ledger.runs():
                if filed.id == watched:
                    run = filed
            if watched not in ("", run.id):
                what = "the run left no record of its own: nothing changed, or it was stopped"
                say(f"note: {what}; the page is of {run.id}", err=True)
            text = html.of_run(shared.planner, run, compare or ())
            write_atomic(output, text)
            server.hand_over(text)
    else:
        opt.refuse({"port": port}, "needs --serve")
        run = lookup.find_run(shared.planner, run_id)
        write_atomic(output, html.of_run(shared.planner, run, compare or ()))
    shared.show({"run": run.id, "page": str(output)}, lambda _: say(f"wrote {output}"))


@_command
def path(shared: Shared, stage: opt.StageName, run_id: opt.RunId = None) -> None:
    """Print the folder of a stage's artifact, for use in scripts.

    Of the newest run, the run given with --run, or the newest run with the settings given with --set.
    """
    from layerline.pipeline.commands import lookup

    lookup.one_choice(shared.project, run_id)
    artifact, doubt = lookup.artifact(shared.project, stage, run_id)
    place = artifact.path.resolve()
    if shared.as_json:
        print_json({"stage": stage, "path": str(place), "digest": artifact.digest, "note": doubt or None})
        return
    if doubt:
        say(f"note: {doubt}", err=True)
    typer.echo(place)  # as it is: a script opens it


@_command
def plan(shared: Shared, what: opt.Planned = "quantize", beside: opt.PlanDiff = None, run_id: opt.RunId = None) -> None:
    """Show how each value is quantised, or why it is not, by module."""
    from layerline.pipeline.commands import lookup
    from layerline.views import plan_tree

    def read(name: str, run: str | None) -> Any:
        if Path(name).exists():
            return plan_tree.read(Path(name))
        stage = "quantize" if Path(what).exists() else what
        return plan_tree.read(lookup.artifact(shared.project, stage, run)[0].path)

    if not Path(what).exists():
        lookup.one_choice(shared.project, run_id)
    entries = read(what, run_id)
    differing = None
    document = {"entries": list(entries.values())}
    if beside is not None:
        differing = plan_tree.changes(entries, read(beside, beside))
        document = {"changes": differing}
    shared.show(document, lambda out: plan_tree.show(out, entries, differing))


@_command
def debug(shared: Shared, stage: opt.Debugged, output: opt.DebugFolder = None) -> None:
    """Find where export or fuse fails, and write a minimal model of it."""
    from layerline.pipeline.commands.debug import debug as find
    from layerline.views import json_output, report_output, screen

    # Absolute: hooks run in the folder of the project.
    target = (output or Path(f"debug-{stage}")).resolve()
    with shared.at_work([shared.project.stage(stage)]) as live:
        report, files = find(shared.project, stage, target, live)
    if shared.as_json:
        print_json({"stage": stage, "found": json_output.plain(report)["records"], "files": files})
    elif not report.records:
        say(f"every value of {stage} passes")
    else:
        report_output.diff(screen.console(), report, 1, "error")
        say(f"wrote {target}: {', '.join(files)}")


@partial(_command, sets=False)
def verify(shared: Shared) -> None:
    """Hash everything in the store again, and report what is damaged."""
    from layerline.pipeline.commands import housekeeping
    from layerline.views import json_output, terminal

    checked, problems = housekeeping.verify(shared.project)
    damage = terminal.damage(checked, problems)
    document = json_output.verify(checked, problems, damage)
    shared.show(document, lambda _: say("\n".join(terminal.verified(checked, problems))))
    if damage:
        raise typer.Exit(damage.exit_code)


@partial(_command, sets=False)
def gc(shared: Shared, keep: opt.Keep = 3, dry_run: opt.DryRun = False, verbose: opt.Verbose = False) -> None:
    """Remove old artifacts and records that nothing needs any more.

    Keeps what the newest runs, the current pipe.yaml and task.py, and `pipe resume` need.
    """
    from layerline.pipeline.commands import housekeeping
    from layerline.views import json_output, terminal

    removed = housekeeping.collect(shared.project, keep, dry_run=dry_run)
    lines = terminal.collected(removed, dry_run=dry_run, verbose=verbose)
    shared.show(json_output.gc(removed, dry_run=dry_run), lambda _: say("\n".join(lines)))


def _end(failure: PipeError | None) -> None:
    """Ends a command that has shown its result with the error that it found, if any."""
    from layerline.views import screen

    if failure is not None:
        screen.error(failure)
        raise typer.Exit(failure.exit_code)


if __name__ == "__main__":
    main()
