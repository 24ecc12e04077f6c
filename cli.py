"""The command `pipe`: parse, call one function, render, exit code."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer
from typer import Argument, Option

from layerline import __version__
from layerline.pipeline import process_env
from layerline.pipeline.errors import ConfigError, PipeError, failure_fields
from layerline.pipeline.inputs.untrusted import launched
from layerline.views import exit_codes
from layerline.views.exit_codes import print_json, say

if TYPE_CHECKING:
    from layerline.pipeline.commands.lookup import Beside
    from layerline.pipeline.config.project import Project
    from layerline.pipeline.plan import Planner
    from layerline.pipeline.report import Report
    from layerline.pipeline.runner import Outcome
    from layerline.pipeline.stage import Stage
    from layerline.pipeline.why import Trial
    from layerline.views.screen import Screen
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
_Command = TypeVar("_Command", bound=Callable[..., None])
TOP = 20  # values that `pipe diff` shows where nobody says how many
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


@dataclass
class Shared:
    """What every command about a project is given: the options that all of them have, and what follows from these."""

    folder: Path
    sets: Sequence[str]
    as_json: bool

    @cached_property
    def project(self) -> Project:
        from layerline.pipeline.config.project import load  # here, so that `pipe --help` doesn't wait for pydantic

        # What is no folder is named in the error as it was typed.
        return load(self.folder.resolve() if self.folder.is_dir() else self.folder, self.sets)

    @cached_property
    def planner(self) -> Planner:
        from layerline.pipeline.plan import open_planner

        return open_planner(self.project)

    def show(self, document: Mapping[str, Any], draw: Callable[[Screen], object]) -> None:
        """Prints the result: a JSON document, or what `draw` puts on the terminal."""
        from layerline.views import screen

        if self.as_json:
            print_json(document)
        else:
            draw(screen.console())

    @contextlib.contextmanager
    def at_work(self, stages: Sequence[Stage], *, silent: bool | None = None) -> Iterator[Live]:
        """Around whatever runs the user's code: its folder is the current one, and its prints can't reach the JSON."""
        from layerline.views import terminal

        silent = self.as_json if silent is None else silent
        quiet = process_env.stdout_to_stderr() if silent else contextlib.nullcontext()
        live = terminal.listener(stages, silent=silent)
        with process_env.inside(self.project.root), quiet, contextlib.closing(live):
            yield live

    @property
    def where(self) -> str:
        """The option that a suggested command needs to be about the same project."""
        return "" if self.folder == Path() else f" -C {shlex.quote(str(self.folder))}"


def _command(function: _Command, *, sets: bool = True) -> _Command:
    """Registers a command about a project: `--json`, `-C` and, with `sets`, `--set` become its `shared`."""

    @wraps(function)
    def command(*arguments: Any, **options: Any) -> None:
        shared = Shared(options.pop("folder"), options.pop("sets", None) or (), options.pop("as_json"))
        function(shared, *arguments, **options)

    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    common = [("sets", Sets, None), ("as_json", AsJson, False), ("folder", Folder, Path())]
    for name, annotation, default in common[0 if sets else 1 :]:
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    app.command()(command)
    return function


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


@_command
def run(
    shared: Shared,
    stages: Annotated[list[str], Argument(metavar="all | STAGE…", help=f"Stages to run: {STAGES}.")],
    force: Annotated[bool, Option("--force", help="Run the named stages even when they are fresh.")] = False,
) -> None:
    """Run stages that are out of date, and the stages that they need.

    Lists the later stages that are out of date afterwards.
    """
    _run(shared, stages, force=force)


@_command
def tune(
    shared: Shared,
    max_drop: Annotated[
        str | None,
        Option(
            metavar="BUDGET",
            help="As quantize.max_drop: 0.01, 0.5% or {accuracy: 0.5%}.",
            show_default="that of pipe.yaml, else 0.5%",
        ),
    ] = None,
) -> None:
    """Find the cheapest formats of layers that keep the accuracy.

    Runs quantize with quantize.search, and shows what each layer costs and saves, and what was chosen.
    """
    from layerline.pipeline.config.quantize_fields import takes_fp8

    options = ["quantize.search=true"]
    if max_drop is not None:
        options.append(f"quantize.max_drop={max_drop}")
    if takes_fp8(shared.project.stages):
        options.append("quantize.try_fp8=true")
    shared = replace(shared, sets=(*options, *shared.sets))
    _run(shared, ["quantize"], tables=("repairs", "search", "slices", "flipped answers"))


def _watched_run(project: Project, live: Live, names: Sequence[str] | None, *, force: bool) -> Outcome:
    """Runs stages. The first rank keeps the file for `pipe report --serve`, and logs where pipe.yaml says."""
    from layerline.pipeline.records.ledger import new_run_id
    from layerline.pipeline.runner import Runner
    from layerline.views import journal

    if launched()[0]:
        return Runner(project, live).run(names, force=force)
    listener = journal.Listeners(live, journal.Journal(project))
    if project.track is None:
        return Runner(project, listener).run(names, force=force)
    from layerline.views.track import Tracking  # here: it imports the page

    run_id = new_run_id()
    tracking = Tracking(project, run_id, live)
    done = None
    try:
        done = Runner(project, journal.Listeners(listener, tracking)).run(names, force=force, run_id=run_id)
    finally:
        tracking.end(done)
    return done


def _run(shared: Shared, stages: Sequence[str], *, force: bool = False, tables: Sequence[str] = ()) -> NoReturn:
    """Runs stages, shows these tables of the last one's report, and exits."""
    from layerline.pipeline.commands import lookup
    from layerline.views import json_output, screen, terminal

    project = shared.project
    names = lookup.asked_for(project, stages)
    project.require_task(names)
    rank, _ = launched()
    silent = shared.as_json or rank > 0  # of several ranks the first one speaks
    with shared.at_work(project.stages, silent=silent) as live:
        done = _watched_run(project, live, names, force=force)
    if _DEBUG and done.error:
        raise done.error
    report = None
    for result in done.results[-1:]:
        if tables and result.record:
            report = shared.planner.ledger.report(result.record)
    if shared.as_json and not rank:
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
        terminal.run_outcome(screen.console(), done, shared.where, shared.sets)
    raise typer.Exit(done.exit_code)


@_command
def check(shared: Shared) -> None:
    """Check pipe.yaml and task.py in seconds, without training.

    Calls every hook on two samples and looks up every name of pipe.yaml in the model.
    """
    from layerline.pipeline.check import check_and_remember
    from layerline.views import terminal

    shared.project.require_task()
    with shared.at_work(()):
        done = check_and_remember(shared.project)
    shared.show(done.to_json(), lambda out: terminal.check(out, done))
    raise typer.Exit(done.exit_code)


@_command
def resume(
    shared: Shared,
    prove: Annotated[bool, Option("--prove", help="Show that resuming changes no bit of the result.")] = False,
    steps: Annotated[
        int | None,
        Option(min=1, help="With --prove: optimizer steps before and after the checkpoint.", show_default="10"),
    ] = None,
) -> None:
    """Resume the most recent interrupted training.

    Uses the original --set values. `pipe run train` with the same values resumes it too.
    With --prove, trains a few steps with and without an interruption and compares the results bit by bit.
    """
    from layerline.pipeline.commands import resume as resuming
    from layerline.views import json_output, screen, terminal

    if prove:
        project, stage, message = resuming.to_prove(shared.project)
        if message:
            say(message, err=shared.as_json)
        project.require_task([stage.name])
        with shared.at_work([stage]) as live:
            proof = resuming.prove(project, steps or 10, live)
        failure = None if proof.passed else proof.failure()
        if shared.as_json:
            document = {"stage": stage.name, "passed": proof.passed, **failure_fields(failure)}
            print_json({**document, "report": json_output.plain(proof)})
        if failure:
            screen.error(failure)
            raise typer.Exit(failure.exit_code)
        if not shared.as_json:
            terminal.findings(screen.console(), proof)
        return
    if steps is not None:
        raise PipeError("--steps needs --prove", hint="pipe.yaml says how long to train")
    stage = resuming.resumable(shared.project)
    sets, message = resuming.going_on(shared.project, stage)
    if message:
        say(message, err=shared.as_json)
    _run(replace(shared, sets=sets), [stage.name])


@_command
def status(shared: Shared) -> None:
    """Show which stages are fresh, which would run, and why."""
    from layerline.pipeline.commands import lookup
    from layerline.pipeline.records import run_lock
    from layerline.pipeline.runner import BROKEN_OFF
    from layerline.views import json_output, terminal

    shared.project.require_task()
    steps, states = lookup.status(shared.planner)
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
def explain(shared: Shared, stage: StageName) -> None:
    """Show each part of a stage's key, with its old and its new value."""
    from layerline.pipeline.commands import lookup
    from layerline.views import json_output, terminal

    step, old, prints = lookup.explained(shared.planner, shared.project.stage(stage).name)
    shared.show(json_output.explain(step, old, prints), lambda out: terminal.explain(out, step, old, prints))


@_command
def diff(
    shared: Shared,
    stage: Annotated[str, Argument(metavar="STAGE[@RUN]|FILE", help=f"One of {STAGES}; or an ONNX file.")],
    other: Annotated[
        str | None,
        Argument(metavar="[STAGE[@RUN]|FILE]", help="The stage or file whose model is compared with the first's."),
    ] = None,
    data: Annotated[Path | None, Option(metavar="NPZ", help="Samples for two files: one array per input.")] = None,
    run_id: RunId = None,
    against: Annotated[
        str | None,
        Option(metavar="RUN", help="Compare with another run: an id from `pipe runs`, or `previous`."),
    ] = None,
    on: Annotated[
        str | None,
        Option(metavar="BACKEND", help="Run the stage's model on a backend and compare with onnxruntime."),
    ] = None,
    sort: Annotated[
        Literal["own", "error", "sqnr", "effect", "gain", "clipped", "network"] | None,
        Option(
            help="Sort by each layer's own error, by accumulated error (sqnr), by its effect at the outputs, by what "
            "they gain without it, or so on.",
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
    by_channel: Annotated[
        str,
        Option(metavar="LAYER", help="For two models: show the error of each channel of a layer instead."),
    ] = "",
    as_csv: Annotated[bool, Option("--csv", help="Print the table as CSV.")] = False,
) -> None:
    """Show each layer's errors, of a stage or between two stages, runs or ONNX files.

    Of the newest run, of the run given with --run, or of the newest run with the settings given with --set.
    docs/cli.md and the page of `pipe report` explain the columns.
    """
    from layerline.pipeline.commands import diff_on
    from layerline.pipeline.debug import refuse_used
    from layerline.pipeline.report import CHANNELS
    from layerline.views import json_output, screen, selection, tables, terminal

    _only_one(csv=as_csv, json=shared.as_json)
    _only_one(on=on, against=against)
    silent = shared.as_json or as_csv
    limits = selection.read_limits(fail_under or ())
    beside = None
    if other is None and not stage.endswith(".onnx"):
        why = "needs two models: name a second stage or file, as in pipe diff fuse quantize"
        _refuse(data=data, repro=repro, by_channel=by_channel, why=why)
        report, beside = _of_stage(shared, stage, run_id, against, on, silent=silent)
    else:
        _refuse(against=against, on=on, why="is about one stage")
        further: dict[str, Any] = {"effect": sort in ("effect", "gain") or "effect" in limits, "order": sort or "own"}
        _only_one(csv=as_csv, by_channel=by_channel)
        further["channels"] = by_channel
        if repro is not None:
            _only_one(repro=repro, module=module)
            refuse_used(repro)
            further["repro"] = repro.resolve()
        with contextlib.closing(terminal.listener([], silent=silent)) as log:
            if stage.endswith(".onnx") or str(other).endswith(".onnx"):
                _refuse(run=run_id, set=shared.sets, why="is about a stage, and these are two files")
                report = diff_on.diff_files(Path(stage), other, data, log, further)
            else:
                _refuse(data=data, why="is about two ONNX files: stages are compared on their probes")
                report = diff_on.diff_stages(shared.project, (stage, str(other)), log, run_id, further)
    if module is not None:
        report = selection.of_module(report, module)
        if beside is not None:
            beside = replace(beside, report=selection.matching(beside.report, module))
    failing = selection.below(report, limits)
    failure = selection.failure(failing, report.stage)
    order = sort or ("network" if silent and not top else report.order)
    if as_csv:
        then = screen.cleaned(beside.report) if beside else None
        say(tables.csv_text(screen.cleaned(report), order, then, top), nl=False)
    else:
        document = json_output.diff(report.stage, report, beside, order, top, failing, failure)
        if by_channel:
            shared.show(document, lambda out: terminal.report_tables(out, report, (CHANNELS,)))
        else:
            shared.show(document, lambda out: terminal.diff(out, report, top or TOP, order, beside))
    if repro is not None and not silent:
        say(f"wrote {repro}: the smallest model that shows the first value; repro.py runs it")
    if failure:
        screen.error(failure)
        raise typer.Exit(failure.exit_code)


def _of_stage(
    shared: Shared, stage: str, run_id: str | None, against: str | None, on: str | None, *, silent: bool
) -> tuple[Report, Beside | None]:
    """The report of a stage (`STAGE` or `STAGE@RUN`), or of its model on a backend; and that of another run."""
    from layerline.pipeline.commands import diff_on, lookup

    if "@" in stage:
        _refuse(run=run_id, why=f"says another run than {stage}")
    name, run_id = lookup.stage_and_run(stage, run_id)
    chosen_stage = shared.project.stage(name)
    if on is not None:
        with shared.at_work([chosen_stage], silent=silent) as live:
            return diff_on.diff_on(shared.project, name, on, live, run_id), None
    chosen = lookup.choose(shared.planner, name, run_id)
    beside = None if against is None else lookup.beside(shared.planner, chosen, against)
    return shared.planner.ledger.report(chosen.record), beside


def _refuse(*, why: str, **options: object) -> None:
    """Refuses options that mean nothing here."""
    for name, value in options.items():
        if value:
            raise ConfigError(
                f"it {why}", where=f"--{name.replace('_', '-')}", hint="leave it out, or see: pipe diff --help"
            )


def _only_one(**options: object) -> None:
    """Refuses two options that exclude each other."""
    used = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if len(used) > 1:
        raise ConfigError(f"{' and '.join(used)} exclude each other", hint="give one of the two")


@_command
def why(
    shared: Shared,
    run_id: RunId = None,
    try_it: Annotated[
        bool, Option("--try", help="Make the advised change on the side and show before and after.")
    ] = False,
    repro: Annotated[
        Path | None, Option(metavar="DIR", help="Write the smallest model that shows the likeliest cause.")
    ] = None,
) -> None:
    """Show where accuracy was lost, why, and what to change.

    Evaluates what each stage of the newest run left, or of the run given with --run. --try runs the stages again with
    the advised --set; pipe.yaml stays as it is.
    """
    from layerline.pipeline import why as reasons
    from layerline.pipeline.debug import refuse_used
    from layerline.views import json_output, screen, terminal

    project = shared.project
    project.require_task()
    if repro is not None:
        repro = repro.resolve()  # the hooks run in another folder
        refuse_used(repro)
    with shared.at_work(project.stages) as live:
        explained = reasons.explain(project, live, run_id)
        trial, shown, failure = None, None, None
        try:
            if repro is not None:
                shown = reasons.reproduce(project, explained, live, repro)
            if try_it:
                trial = reasons.attempt(project, explained.causes, live, run_id)
        except PipeError as error:
            failure = error  # what was measured is printed all the same
    report = explained.report
    if shared.as_json:
        document: dict[str, Any] = {"report": json_output.plain(report), **failure_fields(failure)}
        if repro is not None:
            document["repro"] = None if shown is None else {"value": shown.name, "folder": str(repro)}
        if trial is not None:
            after = None if trial.report is None else json_output.plain(trial.report)
            document["try"] = {"setting": trial.setting or None, "report": after, "reason": trial.reason or None}
        print_json(document)
    else:
        terminal.why(screen.console(), report, reasons.TABLES)
        if trial is not None:
            _print_trial(trial, reasons.TABLES[:1])
        if shown is not None:
            say(f"wrote {repro}: the smallest model that shows it, in {shown.name}; repro.py runs it")
        elif repro is not None and failure is None:
            say("nothing to show: no cause was found")
    if failure is not None:
        screen.error(failure)
        raise typer.Exit(failure.exit_code)


def _print_trial(trial: Trial, tables: Sequence[str]) -> None:
    from layerline.views import screen, terminal

    if trial.report is None:
        say(f"nothing to try: {trial.reason}")
    else:
        say(f"with --set {shlex.quote(trial.setting)}:")
        terminal.why(screen.console(), trial.report, tables)


@_command
def report(
    shared: Shared,
    output: Annotated[Path, Option("--output", "-o", help="File to write.")] = Path("report.html"),
    run_id: RunId = None,
    compare: Annotated[
        list[str] | None,
        Option(metavar="RUN", help="Put this run beside it; may be repeated.", show_default="the run before"),
    ] = None,
    serve: Annotated[bool, Option("--serve", help="Show the run that is going on, on 127.0.0.1.")] = False,
    port: Annotated[
        int | None, Option(min=1, max=65535, help="With --serve: the port.", show_default="a free one")
    ] = None,
) -> None:
    """Write a self-contained HTML page about a run.

    About the newest run, the run given with --run, or the newest run with the settings given with --set. With --serve,
    first shows a run that is going on in a browser, and writes its page when it has ended.
    """
    from layerline.pipeline.commands import lookup
    from layerline.pipeline.files import write_atomic
    from layerline.views import html, live

    if not output.parent.is_dir():
        raise PipeError(f"there is no folder {output.parent}", hint="create it, or choose another file with -o")
    if serve:
        _refuse(run=run_id, set=shared.sets, why="chooses a run that has ended, and --serve shows one that is going on")
        with live.served(shared.project, port or 0) as server:
            say(f"{server.url} shows the run; Ctrl-C closes the view, not the run", err=shared.as_json)
            server.watch(shared.project)
            run = lookup.find_run(shared.planner, None)
            text = html.of_run(shared.planner, run, compare or ())
            write_atomic(output, text)
            server.hand_over(text)
    else:
        _refuse(port=port, why="needs --serve")
        run = lookup.find_run(shared.planner, run_id)
        write_atomic(output, html.of_run(shared.planner, run, compare or ()))
    shared.show({"run": run.id, "page": str(output)}, lambda _: say(f"wrote {output}"))


@_command
def path(shared: Shared, stage: StageName, run_id: RunId = None) -> None:
    """Print the folder of a stage's artifact, for use in scripts.

    Of the newest run, the run given with --run, or the newest run with the settings given with --set.
    """
    from layerline.pipeline.commands import lookup

    artifact, doubt = lookup.artifact(shared.project, stage, run_id)
    place = artifact.path.resolve()
    if shared.as_json:
        print_json({"stage": stage, "path": str(place), "digest": artifact.digest, "note": doubt or None})
        return
    if doubt:
        say(f"note: {doubt}", err=True)
    typer.echo(place)  # as it is: a script opens it


@_command
def plan(
    shared: Shared,
    what: Annotated[
        str, Argument(metavar="[STAGE|FILE]", help="quantize, or a plan.json or a folder that holds one.")
    ] = "quantize",
    beside: Annotated[
        str | None,
        Option("--diff", metavar="OTHER", help="Show what differs from a run (`previous`, an id) or a plan.json."),
    ] = None,
    run_id: RunId = None,
) -> None:
    """Show how each value is quantised, or why it is not, by module."""
    from layerline.pipeline.commands import lookup
    from layerline.views import plan_tree

    def read(name: str, run: str | None) -> Any:
        if Path(name).exists():
            return plan_tree.read(Path(name))
        stage = "quantize" if Path(what).exists() else what
        return plan_tree.read(lookup.artifact(shared.project, stage, run)[0].path)

    entries = read(what, run_id)
    differing = None if beside is None else plan_tree.changes(entries, read(beside, beside))
    document = {"entries": list(entries.values())} if differing is None else {"changes": differing}
    shared.show(document, lambda out: plan_tree.show(out, entries, differing))


@_command
def debug(
    shared: Shared,
    stage: Annotated[str, Argument(metavar="STAGE", help=f"{DEBUGGED}.")],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default="debug-STAGE")
    ] = None,
) -> None:
    """Find where export or fuse fails, and write a minimal model of it."""
    from layerline.pipeline.debug import debug as find
    from layerline.views import json_output, screen, terminal

    target = (output or Path(f"debug-{stage}")).resolve()
    with shared.at_work([shared.project.stage(stage)]) as live:
        report, files = find(shared.project, stage, target, live)
    if shared.as_json:
        print_json({"stage": stage, "found": json_output.plain(report)["records"], "files": files})
    elif not report.records:
        say(f"every value of {stage} passes")
    else:
        terminal.diff(screen.console(), report, 1, "error")
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
def gc(
    shared: Shared,
    keep: Annotated[int, Option(min=0, help="Number of newest runs to keep complete.")] = 3,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be removed.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="List each removed file.")] = False,
) -> None:
    """Remove old artifacts and records that nothing needs any more.

    Keeps what the newest runs, the current pipe.yaml and task.py, and `pipe resume` need.
    """
    from layerline.pipeline.commands import housekeeping
    from layerline.views import json_output, terminal

    removed = housekeeping.collect(shared.project, keep, dry_run=dry_run)
    lines = terminal.collected(removed, dry_run=dry_run, verbose=verbose)
    shared.show(json_output.gc(removed, dry_run=dry_run), lambda _: say("\n".join(lines)))


if __name__ == "__main__":
    main()
