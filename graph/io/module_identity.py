"""Who is who: the module path and source line of every value, kept in the ONNX nodes' own metadata."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

import onnx

from layerline.backends.base import MODULE, SOURCE
from layerline.graph.io import onnx_files

_SCOPES, _TRACE = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"
_OURS = Path(__file__).resolve().parent
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
# What torch calls the scope of a node that belongs to no module, and how it marks a module's second call.
_NO_MODULE, _AGAIN = "_empty_nn_module_stack_from_metadata_hook", re.compile(r"@\d+")


def modules(model: onnx.ModelProto) -> dict[str, str]:
    """Module path of every value that the main graph's nodes produce, where it belongs to a module."""
    return _recorded(model, MODULE)


def sources(model: onnx.ModelProto) -> dict[str, str]:
    """Line of the user's file (`task.py:31`) that produced each value, where known."""
    return _recorded(model, SOURCE)


def owners(model: onnx.ModelProto) -> dict[str, str]:
    """The exporter's own record of each value: the node of the exported program that it lies in; before `stamp`."""
    return {o: scopes[-1] for n in model.graph.node if (scopes := _scopes(n)) for o in n.output if o}


def stamp(model: onnx.ModelProto, root: Path) -> None:
    """Writes module paths and source lines, in place, from what torch's exporter left (`graph.io.save` takes that out).

    Args:
        root: the project's folder, for the source lines.
    """
    for graph in onnx_files.graphs(model):
        for node in graph.node:
            scopes, trace = _scopes(node), _get(node, _TRACE)
            _set(node, MODULE, _AGAIN.sub("", scopes[-2]) if len(scopes) > 1 else "")
            _set(node, SOURCE, source(((f, int(n)) for f, n in _FRAME.findall(trace)), root))


def source(frames: Iterable[tuple[str, int]], root: Path) -> str:
    """The innermost frame outside of torch and of this package, as `file:line`; empty where there is none.

    Args:
        frames: file and line, outermost first.
        root: the project's folder; files in it are given relative to it, others from their package on.
    """
    found = innermost(frames)
    if found is None:
        return ""
    file, package = Path(found[0]).resolve(), _package(found[0])
    inside = not package and root.resolve() in file.parents
    short = file.relative_to(root.resolve()) if inside else PurePath(*(package or file.parts[-1:]))
    return f"{short.as_posix()}:{found[1]}"


def innermost(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """The innermost frame outside of torch and of this package."""
    for file, line in reversed(list(frames)):
        torchs = "torch" in (*_package(file)[:1], *PurePath(file).parts[:1]) or file.startswith("<")
        if not torchs and Path(file).resolve().parent != _OURS:
            return file, line
    return None


def _package(file: str) -> tuple[str, ...]:
    """The parts of an installed file's path from its package on; none for any other file."""
    parts = PurePath(file).parts
    return parts[len(parts) - parts[::-1].index("site-packages") :] if "site-packages" in parts else ()


def _recorded(model: onnx.ModelProto, key: str) -> dict[str, str]:
    return {o: value for n in model.graph.node if (value := _get(n, key)) for o in n.output if o}


def _scopes(node: onnx.NodeProto) -> list[str]:
    scopes: list[str] = ast.literal_eval(_get(node, _SCOPES) or "[]")
    return [s for s in scopes if s != _NO_MODULE]


def _get(node: onnx.NodeProto, key: str) -> str:
    return next((p.value for p in node.metadata_props if p.key == key), "")


def _set(node: onnx.NodeProto, key: str, value: str) -> None:
    if value:
        node.metadata_props.add(key=key, value=value)
