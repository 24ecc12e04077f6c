"""What an exporter's exception means: which module, which line, which construct, and what to change."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import onnx
from torch import fx, nn
from torch.export import ExportedProgram

from layerline.backends.base import MODULE, SOURCE
from layerline.export import dynamic_axes as axis_names
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.random_values import dropout
from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import innermost, source
from layerline.pipeline.errors import StageError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# How the various checks of torch.export name an axis.
_AXIS = re.compile(r"(?:L\['(\w+)'\]((?:\[[^\]]+\])*)\.size\(\)\[(\d+)\]|inputs((?:\['?\w+'?\])+)\.shape\[(\d+)\])")
_FIXED = re.compile(r"(?:to be a constant|a static shape of) \(?(\d+)\)?")

_VALUE = "make it a tensor operation (torch.where, masking, torch.cond), or compute it outside of the model"
# What the exception says -> (construct, what to change). First match wins.
_CONSTRUCTS = (
    (r"data-dependent|specialized integer|GuardOnDataDependentSymNode",
     "Python control flow (if, while, assert) depends on a tensor's value", _VALUE),
    (r"\.numpy\(\) is not supported|converting.*numpy|__array__",
     "a tensor is turned into a numpy array", "stay in torch: numpy is not traced"),
    (r"attributes? .*(?:assigned|mutated)|was assigned during export",
     "forward() assigns a tensor to an attribute of the module", "keep no state: make it an input and an output"),
)  # fmt: skip
_NUMPY = re.compile(r"\.numpy\(|\b(?:np|numpy)\.\w+(?:\.\w+)*\(")
_TO_NUMBER = re.compile(r"\.item\(|\.tolist\(|\b(?:int|float|bool|range)\(")


def blame(error: BaseException, call: Call, axes: Axes, root: Path) -> StageError:
    """The exporter's exception as one that names module, line and construct."""
    chain = list(_chain(error))
    text = _COLOURS.sub("", "\n".join(f"{type(e).__name__}: {e}" for e in chain))
    frames = [f for e in chain for f in traceback.walk_tb(e.__traceback__)]
    if fixed := _fixed_axis(text, axes, _fixing_line([f for f, _ in frames], root)):
        return fixed
    node = next((v for f, _ in reversed(frames) if isinstance(v := f.f_locals.get("node"), fx.Node)), None)
    if "ConversionError" in text and node is not None:
        return _no_operator(node, chain, root)
    places = _user_frames(text)
    places = places if innermost(places) else [(f.f_code.co_filename, n) for f, n in frames]
    where = _where(_innermost(call.module, error), source(places, root))
    for pattern, construct, change in _CONSTRUCTS:
        if re.search(pattern, text, re.IGNORECASE):
            if change is _VALUE and _TO_NUMBER.search(linecache.getline(*(innermost(places) or ("", 0)))):
                construct = "a tensor's value becomes a Python number (.item(), int(), float(), .tolist())"
            return StageError(f"the exporter can't follow this: {construct}", where=where, hint=change)
    last = chain[-1]
    first = next((t for t in _COLOURS.sub("", str(last)).splitlines() if t.strip()), "no message")
    return StageError(
        f"the exporter failed: {type(last).__name__}: {first}",
        where=where,
        hint="change what forward() does there; --debug shows the whole traceback",
    )


def refused(model: onnx.ModelProto, error: StageError) -> StageError:
    """onnxruntime's complaint about an exported model, with the module and line of the node that it names."""
    words = set(re.findall(r"[\w./-]+", error.what))
    node = next((n for g in onnx_files.graphs(model) for n in g.node if n.name and n.name in words), None)
    if node is None:
        return error
    known = {p.key: p.value for p in node.metadata_props}
    where, hint = _where(known.get(MODULE, ""), known.get(SOURCE, "")), error.hint
    if "Could not find an implementation" in error.what:
        hint = (
            f"onnxruntime has no {node.op_type} for these types: compute in float32 there (.float()); half precision "
        )
        hint += "is for quantize to choose"
    return StageError(error.what, where=where, hint=hint)


def dropped(program: ExportedProgram, root: Path) -> StageError | None:
    """The error for an operator that still drops values at random (Dropout in training mode); None where none does."""
    found = dropout(program)
    return found and StageError(
        f"{found[0].target} drops values at random (p={found[1]}): it is in training mode",
        where=_origin(found[0], root),
        hint="use nn.Dropout, which eval() switches off, or pass training=self.training",
    )


def unrolled(error: StageError, module: nn.Module) -> StageError:
    """An axis that came out fixed where the module has an nn.RNN: the exporter writes one step after the other."""
    path = next((n for n, m in module.named_modules() if type(m) is nn.RNN), None)
    if path is None or "has it fixed at" not in error.what:
        return error
    return StageError(
        error.what,
        where=error.where,
        hint=f"torch's exporter unrolls nn.RNN (module {path or 'model'}) over the example's length: take nn.LSTM or "
        "nn.GRU, which it keeps as one operator, or leave that axis out of `dynamic`",
    )


def _fixed_axis(text: str, axes: Axes, line: str) -> StageError | None:
    """Which declared axis a constraint of torch.export is about."""
    if not re.search("specialized it|static shape|Constraints violated", text):
        return None
    size = _FIXED.search(text)
    places = {_place(found) for found in _AXIS.finditer(text)}
    # A derived axis (4*_h) is told by its own name.
    places |= {axes.places(n)[0] for n, b in axes.bounds.items() if b.multiple > 1 and re.search(rf"\b_{n}\b", text)}
    for given, axis in sorted(places & axes.names.keys()):
        return axis_names.baked(given, axis, axes.names[given, axis], size[1] if size else "one size", line)
    return None


def place(source: str) -> tuple[str, int] | None:
    """Input and axis of a size as torch.export tells it: `L['x'].size()[1]`."""
    found = _AXIS.search(source)
    return _place(found) if found else None


def _place(found: re.Match[str]) -> tuple[str, int]:
    path = f"['{found[1]}']{found[2]}" if found[1] else found[4]
    return "_".join(re.findall(r"\w+", path)), int(found[3] or found[5])


def _fixing_line(frames: Sequence[FrameType], root: Path) -> str:
    """Where a size became a constant, from the notes of torch's shape environment; empty where that is inside torch."""
    environment = next((e for f in frames if (e := f.f_locals.get("shape_env")) is not None), None)
    for symbol, told in getattr(environment, "var_to_range_sloc", {}).items():
        known = environment.var_to_range.get(symbol) if environment is not None else None
        frame = getattr(told.upper, "framework_loc", None)
        if known is not None and known.lower == known.upper and frame is not None:
            return source([(frame.filename, frame.lineno)], root)
    return ""


def _no_operator(node: fx.Node, chain: Sequence[BaseException], root: Path) -> StageError:
    numpy = next((n for n in _behind(node) if _NUMPY.search(str(n.meta.get("stack_trace") or ""))), None)
    if numpy is not None:
        # What torch makes of numpy's functions is what the exporter stumbles over; nobody wrote it.
        return StageError(
            f"the exporter can't follow this: a tensor is turned into a numpy array, and {node.target} of that has no "
            "counterpart in ONNX", where=_origin(numpy, root), hint="stay in torch: numpy is not traced",
        )  # fmt: skip
    if not any("No ONNX function found" in str(e) for e in chain):
        # There is a counterpart, and writing it failed: in torch's own words.
        first = next((t for t in _COLOURS.sub("", str(chain[-1])).splitlines() if t.strip()), "no message")
        return StageError(
            f"the exporter could not convert {node.target}: {type(chain[-1]).__name__}: {first}",
            where=_origin(node, root), hint="change what forward() does there; --debug shows the whole traceback",
        )  # fmt: skip
    return StageError(
        f"{node.target} has no counterpart in ONNX", where=_origin(node, root),
        hint="write it with operators that ONNX has, or compute it outside of the model",
    )  # fmt: skip


def _behind(node: fx.Node) -> list[fx.Node]:
    """The node and all that it is computed from, in the graph's order."""
    found = {node}
    for n in reversed(node.graph.nodes):
        if n in found:
            found.update(n.all_input_nodes)
    return [n for n in node.graph.nodes if n in found]


def _origin(node: fx.Node, root: Path) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    return _where(str(module), source(_user_frames(node.meta.get("stack_trace") or ""), root))


def _where(module: str, line: str) -> str:
    known = f"module {module}" if module else "model"
    return f"{known} ({line})" if line else known


def _innermost(model: nn.Module, error: BaseException) -> str:
    """Path of the module whose forward() was running, from the frames' own `self`."""
    paths = {id(m): n for n, m in model.named_modules()}
    owners = [id(f.f_locals.get("self")) for e in _chain(error) for f in _frames(e.__traceback__)]
    return next((paths[o] for o in reversed(owners) if o in paths), "")


def _frames(tb: TracebackType | None) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(tb))


def _user_frames(text: str) -> list[tuple[str, int]]:
    return [(f, int(n)) for f, n in re.findall(r'File "(.+?)", line (\d+)', text)]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
