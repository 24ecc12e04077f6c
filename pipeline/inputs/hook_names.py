"""Functions at the top of a task file whose names come close to a hook's: most often a hook that nobody calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from layerline.pipeline.nearest import closest
from layerline.pipeline.task import HOOKS

_CLOSE = 0.75
# What other frameworks and tutorials call the same thing.
_ALSO_CALLED = {
    "accuracy": "metric",
    "build_model": "model",
    "calib": "calib_data",
    "calibrate": "calib_data",
    "calibration": "calib_data",
    "compute_metrics": "metric",
    "create_model": "model",
    "criterion": "loss",
    "dummy_inputs": "example_inputs",
    "evaluate": "metric",
    "example": "example_inputs",
    "examples": "example_inputs",
    "get_model": "model",
    "loss_fn": "loss",
    "loss_function": "loss",
    "make_model": "model",
    "net": "model",
    "test_data": "eval_data",
    "train_dataset": "train_data",
    "train_loader": "train_data",
    "train_dataloader": "train_data",
    "training_data": "train_data",
    "validation_data": "eval_data",
    "val_dataset": "eval_data",
    "val_loader": "eval_data",
}


def near_misses(code: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, nearest hook) of each function that is no hook, is called nowhere, and looks like one that is not
    there."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # told when the file is imported
        return
    functions = {n.name: n.lineno for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    bound = {a.asname or a.name for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    bound |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    missing = [hook for hook in HOOKS if hook not in functions and hook not in bound]
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for name, line in functions.items():
        if name in HOOKS or name in read or name.startswith("_"):
            continue
        hook = nearest_hook(name, missing)
        if hook:
            yield line, name, hook


def nearest_hook(name: str, missing: list[str]) -> str:
    """The hook, of those that are missing, that a function was most likely meant to be; empty where none is near."""
    also = _ALSO_CALLED.get(name.lower(), "")
    if also in missing:
        return also
    return closest(name, missing, _CLOSE)
