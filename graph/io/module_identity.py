"""Who is who: the module path and source line of every value, kept in the ONNX nodes' own metadata."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

import onnx_ir as ir

from layerline.backends.base import MODULE, SOURCE, TRACED
from layerline.backends.light import Model
from layerline.graph.analysis.ir_queries import model_nodes, names
from layerline.graph.analysis.provenance import SOURCES
from layerline.graph.io.ir_convert import as_ir

_SCOPES, _TRACE = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"
# On the nodes of a file that the export stage, or torch's exporter, wrote; provenance adds the values that were merged.
_OWN_WORD = frozenset({SOURCE, TRACED, SOURCES, _SCOPES, _TRACE})
# The packages whose frames call the user's module while it is traced; they are never the place of a fault in it.
_TRACING = tuple(Path(__file__).resolve().parents[2] / name for name in ("export", "parity"))
_FRAME = re.compile(r'File "(.+?)", line ([0-9]{1,9})')
# What torch calls the scope of a node that belongs to no module, and how it marks a module's second call.
_NO_MODULE, _AGAIN = "_empty_nn_module_stack_from_metadata_hook", re.compile(r"@\d+")


def modules(model: Model) -> dict[str, str]:
    """Module path of every value that the main graph's nodes produce, where it belongs to a module."""
    return _recorded(model, MODULE)


def sources(model: Model) -> dict[str, str]:
    """Line of the user's file (`task.py:31`) that produced each value, where known."""
    return _recorded(model, SOURCE)


def owners(model: ir.Model) -> dict[str, str]:
    """The exporter's own record of each value: the node of the exported program that it lies in; before `stamp`."""
    nodes: dict[str, str] = {}
    for node in model.graph:
        scopes = _scopes(node)
        if scopes:
            nodes.update((name, scopes[-1]) for name in names(node.outputs))
    return nodes


def stamp(model: ir.Model, root: Path) -> None:
    """Writes module paths and source lines, in place, from what torch's exporter left; `root`: the project's folder."""
    for node in model.graph.all_nodes():
        scopes = _scopes(node)
        # The last scope is the node of the exported program itself.
        module = _AGAIN.sub("", scopes[-2]) if len(scopes) > 1 else ""
        line = source(frames_in(node.metadata_props.get(_TRACE, "")), root)
        for key, entry in ((MODULE, module), (SOURCE, line)):
            if entry:
                node.metadata_props[key] = entry


def distrust(model: ir.Model) -> None:
    """Takes out, in place, what would make a file from elsewhere pass for one that was traced here.

    The shapes that a traced file declares for its inner values are built on; those of any other file are not.
    """
    for node in model_nodes(model):
        for key in _OWN_WORD & node.metadata_props.keys():
            del node.metadata_props[key]


def all_names(model: Model) -> set[str]:
    """Names of values, nodes and modules."""
    model = as_ir(model)
    everything: set[str] = set()
    for paths in modules(model).values():
        everything.update(paths.split(", "))
    for node in model_nodes(model):
        everything.update((node.name or "", *names(node.inputs), *names(node.outputs)))
    return everything - {""}


def source(frames: Iterable[tuple[str, int]], root: Path) -> str:
    """The innermost frame outside of torch and of this package, as `file:line`; empty where there is none.

    Files in the project's folder `root` are given relative to it, others from their package on.
    """
    frame = innermost(frames)
    if frame is None:
        return ""
    name, line = frame
    file = Path(name).resolve()
    package = _package(name)
    if package:
        short = PurePath(*package)
    elif root.resolve() in file.parents:
        short = file.relative_to(root.resolve())
    else:
        short = PurePath(*file.parts[-1:])
    return f"{short.as_posix()}:{line}"


def frames_in(text: str) -> list[tuple[str, int]]:
    """File and line of every frame that a traceback or a stack of torch's names, outermost first."""
    return [(file, int(line)) for file, line in _FRAME.findall(text)]


def innermost(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """The innermost frame outside of torch and of this package."""
    for file, line in reversed(list(frames)):
        # torch names some of its files from the package on; "<string>" and the like are code it made.
        is_torch = "torch" in (*_package(file)[:1], *PurePath(file).parts[:1]) or file.startswith("<")
        if not is_torch and Path(file).resolve().parent not in _TRACING:
            return file, line
    return None


def _package(file: str) -> tuple[str, ...]:
    """The parts of an installed file's path from its package on; none for any other file."""
    parts = PurePath(file).parts
    if "site-packages" not in parts:
        return ()
    # The last one, for an environment may lie inside of another.
    last = len(parts) - 1 - parts[::-1].index("site-packages")
    return parts[last + 1 :]


def _recorded(model: Model, key: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for node in as_ir(model).graph:
        entry = node.metadata_props.get(key)
        if entry:
            entries.update((name, entry) for name in names(node.outputs))
    return entries


def _scopes(node: ir.Node) -> list[str]:
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES) or "[]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # a file from elsewhere may hold any text here
        return []
    if not isinstance(scopes, list):
        return []
    return [scope for scope in scopes if isinstance(scope, str) and scope != _NO_MODULE]
