"""`pipe check`: what a run would find out late, looked at early. Every hook on two samples, every name on the model.

Stages do the looking, each in its `check()`; what one has built (the model, its signature) those after it look at.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import PipeError, TaskError, Unavailable
from layerline.pipeline.files import write_own
from layerline.pipeline.inspection import CalledOnce, Finding, Inspection
from layerline.pipeline.keys import canonical
from layerline.pipeline.keys.trees import bound_names
from layerline.pipeline.nearest import closest
from layerline.pipeline.run.plan import Planner, check_file, open_planner
from layerline.pipeline.task import HOOKS
from layerline.pipeline.untrusted import read_json

# What other frameworks and tutorials call a hook.
_ALSO_CALLED = {
    "model": "build_model create_model get_model make_model net",
    "train_data": "train_dataset train_loader train_dataloader training_data",
    "eval_data": "test_data valid_data validation_data val_data val_dataset val_loader",
    "metric": "accuracy compute_metrics evaluate",
    "loss": "criterion loss_fn loss_function",
    "calib_data": "calib calibrate calibration",
    "example_inputs": "dummy_inputs example examples",
}
_CLOSE = 0.75  # how much of two names must agree
ROOM = 200 << 20
"""Bytes of free disk below which a project has little hope to file anything."""
_PASSED = "checked.json"


@dataclass(frozen=True)
class Checked:
    """What a check found, in the order in which it looked."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.state == "error")

    @property
    def exit_code(self) -> int:
        """0 nothing is wrong, 2 something is, 3 the machine lacks something and nothing else is wrong."""
        return min((f.exit_code for f in self.errors), default=0)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"passed": not self.errors}
        if self.errors:
            document |= failure(self.errors).to_json()
        return {**document, "findings": [finding.to_json() for finding in self.findings]}


def check(project: Project) -> Checked:
    """Looks at everything that a run of all stages needs; trains nothing and files nothing."""
    look = Inspection(project.root, CalledOnce(project.root / project.task, project.root))
    uses_task = any(stage.hooks() for stage in project.stages)
    # A check must not change the draws of the training behind it.
    with _as_before():
        if uses_task:
            with look.item(project.task):
                _check_names(look)
        if not look.findings or look.findings[-1].state != "error":
            for stage in project.stages:
                look.stage = stage.name
                # A stage whose file is missing is not looked at further: all else would follow from that.
                before = len(look.findings)
                with look.item(f"{stage.name}.file"):
                    for name in stage.files():
                        check_file(look.root, stage, name)
                if len(look.findings) == before:
                    with look.item(stage.name):
                        stage.check(look)
            look.stage = ""
        _check_disk(look)
        if project.track is not None:
            with look.item("track"):
                require_tracker(project.track)
                look.ok("track", project.track)
        look.shared.clear()
        findings = tuple(look.findings)
        del look
        gc.collect()  # what was built must not lie beside what will be trained
    return Checked(findings)


def require_tracker(name: str) -> None:
    """Raises Unavailable: a package that the tracker of pipe.yaml needs is not installed."""
    packages = [name]
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        packages.append("sqlalchemy")  # for a local store
    for package in packages:
        if importlib.util.find_spec(package) is None:
            hint = "pip install 'layerline[track]', or remove the field"
            raise Unavailable(f"{package} is not installed", where="track", hint=hint)


def check_and_remember(project: Project) -> Checked:
    """As `check`; one without an error is not repeated by the next run."""
    done = check(project)
    if not done.errors:
        planner = open_planner(project)
        remember(project, digest(planner))
        planner.hasher.save()
    return done


def failure(errors: Sequence[Finding]) -> PipeError:
    """Several findings as one error: the first in full, and how many more there are."""
    first = errors[0].error()
    if len(errors) > 1:
        first.what += f" (and {len(errors) - 1} more)"
        hints = [first.hint, "`pipe check` shows all"]
        first.hint = "; ".join(filter(None, hints))
    return first


def digest(planner: Planner) -> str:
    """What the outcome of a check depends on: the configuration, the code that hooks reach, data files, versions."""
    return canonical.digest({stage.name: planner.parts(stage)[0] for stage in planner.project.stages})


def passed_before(project: Project, key: str) -> bool:
    """Whether the last check without an error was of just this."""
    with suppress(OSError, ValueError):
        stored = read_json(project.state / "cache" / _PASSED)
        return isinstance(stored, dict) and stored.get("digest") == key
    return False


def remember(project: Project, key: str) -> None:
    """Keeps that a check found no error."""
    write_own(project.state / "cache" / _PASSED, json.dumps({"digest": key}), project.state, durable=False)


def _check_names(look: Inspection) -> None:
    """Names at the top of the task file: hooks that are there, and those that are nearly called like one."""
    path = look.task.path
    defined = {hook: look.task.get_raw(hook) for hook in HOOKS if look.task.has(hook)}
    for hook, value in defined.items():
        if hasattr(value, "state_dict"):
            raise TaskError(
                f"{hook} is a {type(value).__name__}, expected a function",
                where=path.name,
                hint=f"write `def {hook}(…):` and return it, or call it, there",
            )
    look.ok(path.name, f"defines {', '.join(f'{hook}()' for hook in defined) or 'no hook'}")
    for line, name, hook in near_misses(path.read_bytes()):  # in the encoding that it declares
        look.warn(
            path.name,
            f"{name}() is no hook and nothing calls it; there is a hook {hook}()",
            f"rename it to {hook}, or put a _ before its name",
            f"{path.name}:{line}",
        )


def near_misses(code: str | bytes) -> Iterator[tuple[int, str, str]]:
    """(line, name, nearest hook) of each function that is no hook, is called nowhere, and looks like one that is not
    there."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # told when the file is imported
        return
    functions: dict[str, int] = {}
    bound: set[str] = set()
    for statement in tree.body:
        bound |= bound_names(statement)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[statement.name] = statement.lineno
        elif isinstance(statement, ast.Assign) and _is_function(statement.value, functions):
            functions |= {target.id: statement.lineno for target in statement.targets if isinstance(target, ast.Name)}
        if isinstance(statement, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in statement.names}
    missing = [hook for hook in HOOKS if hook not in bound]
    # What something calls or passes on is a helper, whatever its name.
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for name, line in functions.items():
        if name in HOOKS or name in read or name.startswith("_"):
            continue
        hook = closest(name, HOOKS, _CLOSE)
        if hook not in missing:  # the hook that it is most like is there
            hook = ""
        for other in reversed(missing):
            if name.lower() in _ALSO_CALLED.get(other, "").split():
                hook = other
        if hook:
            yield line, name, hook


def _is_function(value: ast.expr, functions: Mapping[str, int]) -> bool:
    """Whether an expression is a lambda, or one of these functions under its name."""
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def _check_disk(look: Inspection) -> None:
    """Room for checkpoints (weights, average, moments, two of them) and for the models made of them."""
    needed = max(ROOM, 12 * int(look.shared.get("model_bytes", 0)))
    with look.item("disk"):
        free = shutil.disk_usage(look.root).free
        if free < needed:
            raise Unavailable(
                f"{free / 1e9:.2f} GB are free, checkpoints and models of this size take about {needed / 1e9:.2f} GB",
                where=str(look.root),
                hint="make room, or run `pipe gc`",
            )
        look.ok("disk", f"{free / 1e9:.1f} GB free")


@contextmanager
def _as_before() -> Iterator[None]:
    """Random draws inside leave no trace outside, and collecting garbage does not go through all that was there."""
    gc.freeze()
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    restore: list[Callable[[], object]] = [gc.unfreeze, partial(random.setstate, random.getstate())]
    if numpy is not None:
        restore.append(partial(numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        restore.append(partial(torch.set_rng_state, torch.get_rng_state()))
    try:
        yield
    finally:
        for function in restore:
            function()
