"""A foreign ONNX file made ready for the pipeline: readable by the runtime, named throughout, the same numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from layerline.backends.base import MODULE
from layerline.backends.light import Light
from layerline.graph.analysis.fresh_names import fresh_name
from layerline.graph.analysis.ir_queries import Array
from layerline.graph.analysis.proto_queries import metadata
from layerline.graph.fusion import apply_rules
from layerline.graph.fusion.rules import RULES
from layerline.graph.io import onnx_files
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.opset import IR_VERSION, opset_of, raise_opset
from layerline.pipeline.errors import ConfigError, StageError

# What it takes to know a condition.
_DECIDING = ("constants", "fold", "shape-constants", "constant-branch", "dead-code")
_INLINED = re.compile(r"__Inline_\d+__(?=/)")


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A file as given and as the pipeline goes on with it.

    Attributes:
        original: as given, but for node names, module paths and a format version that the runtime reads.
        light: inlined and raised.
        notes: what was done to it.
    """

    original: Light
    light: Light
    notes: tuple[str, ...]


def adopt(given: Light, opset: int) -> Adopted:
    """Names the nodes, inlines functions, makes initializers that were inputs constants, raises the opset.

    Args:
        given: becomes `original`: names and module paths are written into it.
        opset: the least version of ONNX's own operators.

    Raises:
        StageError: a version that can't be raised or is not known here, a sparse initializer.
    """
    notes = [*_readable(given.model), *name_nodes(given.model)]
    stamp(given.model)
    prepared, told = prepare(given)
    raised = raise_opset(prepared, opset)
    if (now := opset_of(raised.model)) != (had := opset_of(prepared.model)):
        notes.append(f"raised from opset {had} to {now}")
        _inherit(prepared.model, raised.model)
    _readable(raised.model)
    name_nodes(raised.model)
    stamp(raised.model)
    return Adopted(original=given, light=raised, notes=(*notes, *told))


def freeze(light: Light, values: Mapping[str, float | Sequence[float]]) -> dict[str, Array]:
    """Makes inputs constants, in place: each gets its one number all over, or a number for each place of its one axis.

    Returns:
        What the original has to be fed with in their place.

    Raises:
        ConfigError: no such input, one whose shape varies, another count of numbers than elements, or a number that its
            type can't hold.
    """
    graph, made = light.model.graph, dict[str, Array]()
    inputs = {i.name: i for i in graph.input}
    for name, number in values.items():
        if name not in inputs:
            raise ConfigError(f"there is no input {name!r}", where="values", hint=f"inputs: {', '.join(inputs)}")
        kind = inputs[name].type.tensor_type
        several = isinstance(number, Sequence)
        if any(d.dim_param for d in kind.shape.dim) and not (several and len(kind.shape.dim) == 1):
            raise ConfigError(
                "its shape varies, so it can't be a constant", where=f"values.{name}", hint="fix it in `dims`"
            )
        shape = [len(number)] if isinstance(number, Sequence) else [d.dim_value for d in kind.shape.dim]
        if several and (len(kind.shape.dim) != 1 or kind.shape.dim[0].dim_value not in (0, *shape)):
            seen = ", ".join(str(d.dim_value or d.dim_param) for d in kind.shape.dim)
            raise ConfigError(f"{shape[0]} numbers for an input of shape ({seen})", where=f"values.{name}")
        array = np.full(shape, number).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if array.dtype.kind in "iub" and (array != number).any():
            raise ConfigError(f"{array.dtype} can't hold {number}", where=f"values.{name}")
        made[name] = array
        graph.initializer.append(numpy_helper.from_array(array, name))
        graph.input.remove(inputs[name])
    return made


def take_branches(adopted: Adopted) -> Adopted:
    """The model with the branch that is taken in place of every If that its sizes and constants decide.

    The branch that is never taken need not even be valid at these sizes: a Squeeze of an axis that is 4 now, which the
    runtime refuses before it runs anything. A model without such an If is given back as it is.
    """
    light = adopted.light
    if not any(n.op_type == "If" for n in light.model.graph.node):
        return adopted
    rewritten = apply_rules.rewrite(light, [r for r in RULES if r.name in _DECIDING])
    taken = [f.site.value for f in rewritten.firings if f.site.rule == "constant-branch"]
    if not taken:
        return adopted
    notes = [f"If {value} is decided by what is fixed: the branch it takes stands in its place" for value in taken]
    return replace(adopted, light=rewritten.light, notes=(*adopted.notes, *notes))


def name_nodes(model: onnx.ModelProto) -> list[str]:
    """Gives every node a name of its own, in place: `<operator>_<first output>` where there is none or it is taken."""
    nodes = onnx_files.nodes(model)
    taken, named = {n.name for n in nodes}, 0
    seen = {""}
    for node in nodes:
        if node.name in seen:
            node.name = fresh_name(f"{node.op_type}_{next(filter(None, node.output), 'none')}", taken)
            named += node.op_type != "Constant"
        seen.add(node.name)
    return [f"{named} nodes had no name of their own and are called after their first output"] if named else []


def stamp(model: onnx.ModelProto) -> None:
    """Writes a module path on every node that carries none, in place, made from its name."""
    for graph in onnx_files.graphs(model):
        for node in graph.node:
            if not metadata(node, MODULE) and (path := module_path(node.name, node.op_type)):
                node.metadata_props.add(key=MODULE, value=path)


def module_path(name: str, op: str) -> str:
    """`/layer1/layer1.0/conv1/Conv` is torch's way to write layer1.0.conv1; any other name stands for itself.

    A graph that was inlined left its own name before that: it stays, as the outermost module.
    """
    written = f"/{_INLINED.sub('', name)}" if _INLINED.search(name) else name
    folder, _, last = written.rpartition("/")
    if not written.startswith("/") or not re.fullmatch(rf"{re.escape(op)}(_\d+)?", last):
        return name
    parts: list[str] = []
    for part in filter(None, folder.split("/")):
        # A member of a Sequential or ModuleList repeats its parent's name.
        if parts and part.startswith(parts[-1] + "."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def _readable(model: onnx.ModelProto) -> list[str]:
    """Writes the format version that its operators need and no newer one, in place: runtimes lag behind onnx.

    Raises:
        StageError: operators of a version that the installed onnx does not know.
    """
    had, newest = model.ir_version, onnx.defs.onnx_opset_version()
    if (opset := opset_of(model)) > newest:
        raise StageError(
            f"the model is at opset {opset}; the installed onnx knows versions up to {newest}",
            where="opset",
            hint="update onnx, or export the model at a lower opset",
        )
    needed: int = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(needed, IR_VERSION)
    return [f"ir_version {had} became {model.ir_version}, which onnxruntime reads"] if model.ir_version < had else []


def _inherit(before: onnx.ModelProto, raised: onnx.ModelProto) -> None:
    """Nodes that a conversion added belong where the value they help to compute does."""
    known = {o for g in onnx_files.graphs(before) for n in g.node for o in n.output}
    for graph in onnx_files.graphs(raised):
        reader = {v: metadata(n, MODULE) for n in reversed(graph.node) for v in n.input}
        for node in reversed(graph.node):
            made = next(filter(None, node.output), "")
            if not metadata(node, MODULE) and made not in known and (path := reader.get(made)):
                node.metadata_props.add(key=MODULE, value=path)
                reader |= dict.fromkeys(node.input, path)
