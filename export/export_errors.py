"""Explains an exception of torch's exporter: the module, the line, the construct, and what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import onnx_ir as ir
from torch import fx, nn
from torch.export import ExportedProgram

from layerline.backends.base import MODULE, SOURCE
from layerline.export import dynamic_axes as axis_names
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call, place_of
from layerline.export.program_queries import dropout
from layerline.graph.analysis.ir_queries import model_nodes
from layerline.graph.io.module_identity import frames_in, innermost, source
from layerline.pipeline.errors import StageError, first_line

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The two ways in which torch.export names an axis: L['x'].size()[0] and inputs['x'].shape[0].
_AXIS = re.compile(r"(?:L\['(\w+)'\]((?:\[[^\]]+\])*)\.size\(\)\[(\d+)\]|inputs((?:\['?\w+'?\])+)\.shape\[(\d+)\])")
_FIXED = re.compile(r"(?:to be a constant|a static shape of) \(?(\d+)\)?")

# (pattern in the exception's text, construct, what to change); the first match wins.
_CONSTRUCTS = (
    (r"data-dependent|specialized integer|GuardOnDataDependentSymNode",
     "Python control flow (if, while, assert) or a Python number (.item(), int(), float()) depends on a tensor's value",
     "make it a tensor operation (torch.where, masking, torch.cond), or compute it outside of the model"),
    (r"\.numpy\(\) is not supported|converting.*numpy|__array__",
     "a tensor is turned into a numpy array", "stay in torch: numpy is not traced"),
    (r"attributes? .*(?:assigned|mutated)|was assigned during export",
     "forward() assigns a tensor to an attribute of the module", "keep no state: make it an input and an output"),
)  # fmt: skip
_NUMPY = re.compile(r"\.numpy\(|\b(?:np|numpy)\.\w+(?:\.\w+)*\(")
_UNEXPLAINED = "change what forward() does there; --debug shows the whole traceback"


def blame(error: BaseException, call: Call, axes: Axes, root: Path) -> StageError:
    """The exporter's exception as one that names module, line and construct."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    text = _COLOURS.sub("", "\n".join(f"{type(each).__name__}: {each}" for each in chain))
    frames: list[tuple[FrameType, int]] = []
    for each in chain:
        frames += traceback.walk_tb(each.__traceback__)
    # A constraint on a declared axis explains more than the line that torch names.
    fixed = _fixed_axis(text, axes, _fixing_line([frame for frame, _ in frames], root))
    if fixed is not None:
        return fixed
    if "ConversionError" in text:
        # The node that the exporter was converting, from its innermost frame that has one.
        for frame, _ in reversed(frames):
            node = frame.f_locals.get("node")
            if isinstance(node, fx.Node):
                return _no_operator(node, chain, root)
    # The text names the user's stack where torch traced; the traceback only where forward() itself ran.
    places = frames_in(text)
    if not innermost(places):
        places = [(frame.f_code.co_filename, line) for frame, line in frames]
    # The module whose forward() was running, from the frames' own `self`.
    paths = {id(module): path for path, module in call.module.named_modules()}
    running = ""
    for frame, _ in frames:
        running = paths.get(id(frame.f_locals.get("self")), running)
    where = _where(running, source(places, root))
    for pattern, construct, change in _CONSTRUCTS:
        if re.search(pattern, text, re.IGNORECASE):
            return StageError(f"the exporter can't follow this: {construct}", where=where, hint=change)
    what = f"the exporter failed: {type(chain[-1]).__name__}: {_first_line(chain[-1])}"
    return StageError(what, where=where, hint=_UNEXPLAINED)


def _first_line(error: BaseException) -> str:
    return first_line(_COLOURS.sub("", str(error)).lstrip()) or "no message"


def refused(model: ir.Model, error: StageError) -> StageError:
    """onnxruntime's complaint about an exported model, with the module and line of the node that it names."""
    words = set(re.findall(r"[\w./-]+", error.what))
    for node in model_nodes(model):
        if node.name and node.name in words:
            hint = error.hint
            if "Could not find an implementation" in error.what:
                hint = (
                    f"onnxruntime has no {node.op_type} for these types: compute in float32 there (.float()); half "
                    "precision is for quantize to choose"
                )
            where = _where(node.metadata_props.get(MODULE, ""), node.metadata_props.get(SOURCE, ""))
            return StageError(error.what, where=where, hint=hint)
    return error


def dropped(program: ExportedProgram, root: Path) -> StageError | None:
    """The error for an operator that still drops values at random (Dropout in training mode); None where none does."""
    node_and_share = dropout(program)
    if node_and_share is None:
        return None
    node, share = node_and_share
    what = f"{node.target} drops values at random (p={share}): it is in training mode"
    hint = "use nn.Dropout, which eval() switches off, or pass training=self.training"
    return StageError(what, where=_origin(node, root), hint=hint)


def unrolled(error: StageError, module: nn.Module) -> StageError:
    """An axis that came out fixed where the module has an nn.RNN: the exporter writes one step after the other."""
    if "has it fixed at" not in error.what:
        return error
    for path, inner in module.named_modules():
        if type(inner) is nn.RNN:
            hint = f"torch's exporter unrolls nn.RNN (module {path or 'model'}) over the example's length: use nn.LSTM "
            hint += "or nn.GRU, which it keeps as one operator, or leave that axis out of `dynamic`"
            return StageError(error.what, where=error.where, hint=hint)
    return error


def _fixed_axis(text: str, axes: Axes, line: str) -> StageError | None:
    """Which declared axis a constraint of torch.export is about."""
    if not re.search("specialized it|static shape|Constraints violated", text):
        return None
    size_text = "one size"
    size = _FIXED.search(text)
    if size is not None:
        size_text = size[1]
    fixed = set(places(text))
    for name, bound in axes.bounds.items():
        # A derived axis (4*_h) is named by its own symbol.
        if bound.step > 1 and re.search(rf"\b_{name}\b", text):
            fixed.add(axes.places(name)[0])
    for input_name, axis in sorted(fixed & axes.names.keys()):
        return axis_names.baked(input_name, axis, axes.names[input_name, axis], size_text, line)
    return None


def places(text: str) -> list[tuple[str, int]]:
    """Input and axis of every size that a text of torch.export names, such as `L['x'].size()[1]`."""
    named: list[tuple[str, int]] = []
    for local, local_keys, local_axis, input_path, input_axis in _AXIS.findall(text):
        path = input_path
        if local:
            path = f"['{local}']{local_keys}"
        named.append(("_".join(re.findall(r"\w+", path)), int(local_axis or input_axis)))
    return named


def _fixing_line(frames: Sequence[FrameType], root: Path) -> str:
    """Where a size became a constant, from the notes of torch's shape environment; empty if that is inside torch."""
    environments = filter(None, [frame.f_locals.get("shape_env") for frame in frames])
    environment: Any = next(environments, None)
    for symbol, locations in getattr(environment, "var_to_range_sloc", {}).items():
        bounds = environment.var_to_range.get(symbol)
        location = getattr(locations.upper, "framework_loc", None)
        if bounds is not None and bounds.lower == bounds.upper and location is not None:
            return source([(location.filename, location.lineno)], root)
    return ""


def _no_operator(node: fx.Node, chain: Sequence[BaseException], root: Path) -> StageError:
    """The error for a node that the exporter can't convert."""
    needed = {node}
    for candidate in reversed(node.graph.nodes):
        if candidate in needed:
            needed.update(candidate.all_input_nodes)
    for candidate in node.graph.nodes:
        if candidate in needed and _NUMPY.search(str(candidate.meta.get("stack_trace") or "")):
            # torch turns numpy's functions into operators that the user never wrote.
            what = f"a tensor is turned into a numpy array, and {node.target} of that has no counterpart in ONNX"
            hint = "stay in torch: numpy is not traced"
            return StageError(f"the exporter can't follow this: {what}", where=_origin(candidate, root), hint=hint)
    if not any("No ONNX function found" in str(link) for link in chain):
        # There is a counterpart, and writing it failed: torch's own words explain it best.
        what = f"the exporter could not convert {node.target}: {type(chain[-1]).__name__}: {_first_line(chain[-1])}"
        return StageError(what, where=_origin(node, root), hint=_UNEXPLAINED)
    what = f"{node.target} has no counterpart in ONNX"
    hint = "write it with operators that ONNX has, or compute it outside of the model"
    return StageError(what, where=_origin(node, root), hint=hint)


def _origin(node: fx.Node, root: Path) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    module = ""
    if stack:
        module, _ = next(reversed(stack.values()))
    return _where(str(module), source(frames_in(node.meta.get("stack_trace") or ""), root))


def _where(module: str, line: str) -> str:
    place = place_of(module)
    return f"{place} ({line})" if line else place
