"""What every command about a project has: `--project`, `--set` and `--json`, and what follows from these."""

from __future__ import annotations

import contextlib
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typer import Typer

from layerline.pipeline import process_env
from layerline.views import options as opt
from layerline.views.exit_codes import print_json

# Imported on use: `pipe --help` must not wait for pydantic and rich.
if TYPE_CHECKING:
    from layerline.pipeline.config.project import Project
    from layerline.pipeline.run.plan import Planner
    from layerline.pipeline.stage import Stage
    from layerline.views.screen import Screen
    from layerline.views.terminal import Live

_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass
class Shared:
    """`--project`, `--set` and `--json` of a command."""

    folder: Path
    sets: Sequence[str]
    as_json: bool

    @cached_property
    def project(self) -> Project:
        from layerline.pipeline.config.project import load

        folder = self.folder
        if folder.is_dir():  # what is none is named in the error as it was typed
            folder = folder.resolve()
        return load(folder, self.sets)

    @cached_property
    def planner(self) -> Planner:
        from layerline.pipeline.run.plan import open_planner

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

        if silent is None:
            silent = self.as_json
        live = terminal.listener(stages, silent=silent)
        with contextlib.ExitStack() as stack:
            stack.enter_context(process_env.inside(self.project.root))
            if silent:
                stack.enter_context(process_env.stdout_to_stderr())
            stack.callback(live.close)
            yield live

    @property
    def where(self) -> str:
        """The option that a suggested command needs to be about the same project."""
        if self.folder == Path():
            return ""
        return f" -C {shlex.quote(str(self.folder))}"


def project_command(app: Typer, function: _Command, *, sets: bool = True) -> _Command:
    """Registers a command about a project: `--json`, `-C` and, with `sets`, `--set` become its `shared`."""

    @wraps(function)
    def command(*arguments: Any, **options: Any) -> None:
        shared = Shared(options.pop("folder"), options.pop("sets", None) or (), options.pop("as_json"))
        function(shared, *arguments, **options)

    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    common = [("sets", opt.Sets, None), ("as_json", opt.AsJson, False), ("folder", opt.Folder, Path())]
    for name, annotation, default in common[0 if sets else 1 :]:
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    app.command()(command)
    return function
