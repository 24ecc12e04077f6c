"""Prepares an imported ONNX file: a version that the runtime reads, and names for all nodes; the numbers stay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from layerline.backends.base import MODULE
from layerline.backends.light import Light
from layerline.graph.analysis.ir_queries import Array, fresh_name
from layerline.graph.analysis.proto_queries import first_output, metadata
from layerline.graph.fusion.fuse import rewrite
from layerline.graph.fusion.rules import RULES
from layerline.graph.io import onnx_files
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.opset import IR_VERSION, opset_of, raise_opset
from layerline.pipeline.errors import ConfigError, StageError

# The rules that can decide the condition of an If.
_DECIDING = ("constants", "fold", "shape-constants", "constant-branch", "dead-code")
_INLINED = re.compile(r"__Inline_\d+__(?=/)")


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A file before and after its preparation.

    Attributes:
        original: the file's model; only node names, module paths and the format version differ.
        light: with functions inlined and the opset raised.
        notes: what was changed.
    """

    original: Light
    light: Light
    notes: tuple[str, ...]


def adopt(original: Light, opset: int) -> Adopted:
    """Names the nodes, inlines functions, makes initializers that were inputs constants, raises the opset.

    Args:
        original: names and module paths are written into it.
        opset: the least version of ONNX's own operators.

    Raises:
        StageError: a version that can't be raised or is not known here, a sparse initializer.
    """
    notes = [*_readable(original.model), *name_nodes(original.model)]
    stamp(original.model)
    prepared, prepare_notes = prepare(original)
    raised = raise_opset(prepared, opset)
    before = opset_of(prepared.model)
    after = opset_of(raised.model)
    if after != before:
        notes.append(f"raised from opset {before} to {after}")
        _inherit(prepared.model, raised.model)
    _readable(raised.model)
    name_nodes(raised.model)
    stamp(raised.model)
    return Adopted(original=original, light=raised, notes=(*notes, *prepare_notes))


def freeze(light: Light, values: Mapping[str, float | Sequence[float]]) -> dict[str, Array]:
    """Makes inputs constants, in place: each gets one number throughout, or a number for each place of its one axis.

    Returns:
        The arrays that the original has to be fed with instead.

    Raises:
        ConfigError: no such input, one whose shape varies, another count of numbers than elements, or a number that its
            type can't hold.
    """
    graph = light.model.graph
    inputs = {value.name: value for value in graph.input}
    frozen: dict[str, Array] = {}
    for name, number in values.items():
        if name not in inputs:
            raise ConfigError(f"there is no input {name!r}", where="values", hint=f"inputs: {', '.join(inputs)}")
        tensor_type = inputs[name].type.tensor_type
        shape = _frozen_shape(name, tensor_type.shape.dim, number)
        array = np.full(shape, number).astype(helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
        if array.dtype.kind in "iub" and (array != number).any():
            raise ConfigError(f"{array.dtype} can't hold {number}", where=f"values.{name}")
        frozen[name] = array
        graph.initializer.append(numpy_helper.from_array(array, name))
        graph.input.remove(inputs[name])
    return frozen


def _frozen_shape(
    name: str, dims: Sequence[onnx.TensorShapeProto.Dimension], number: float | Sequence[float]
) -> list[int]:
    """The shape of a constant in place of an input. Numbers along an axis fix its size."""
    where = f"values.{name}"
    several = isinstance(number, Sequence)
    varies = any(dim.dim_param for dim in dims)
    if varies and not (several and len(dims) == 1):
        raise ConfigError("its shape varies, so it can't be a constant", where=where, hint="fix it in `dims`")
    if not isinstance(number, Sequence):
        return [dim.dim_value for dim in dims]
    # 0 is the value of a dimension that has a name instead.
    if len(dims) != 1 or dims[0].dim_value not in (0, len(number)):
        declared = ", ".join(str(dim.dim_value or dim.dim_param) for dim in dims)
        raise ConfigError(f"{len(number)} numbers for an input of shape ({declared})", where=where)
    return [len(number)]


def take_branches(adopted: Adopted) -> Adopted:
    """Replaces every If whose condition is constant by the branch that it takes.

    The other branch may be invalid at these sizes, such as a Squeeze of an axis of size 4, and a runtime refuses that
    before it runs anything. A model without such an If is returned as it is.
    """
    light = adopted.light
    if not any(node.op_type == "If" for node in light.model.graph.node):
        return adopted
    rewritten = rewrite(light, [rule for rule in RULES if rule.name in _DECIDING])
    decided = [firing.site.value for firing in rewritten.firings if firing.site.rule == "constant-branch"]
    if not decided:
        return adopted
    notes = [f"If {value} has a constant condition: the branch that it takes replaces it" for value in decided]
    return replace(adopted, light=rewritten.light, notes=(*adopted.notes, *notes))


def name_nodes(model: onnx.ModelProto) -> list[str]:
    """Gives every node a unique name, in place: `<operator>_<first output>` if it has none or a repeated one."""
    nodes = onnx_files.nodes(model)
    taken = {node.name for node in nodes}
    used = {""}
    renamed = 0
    for node in nodes:
        if node.name in used:
            node.name = fresh_name(f"{node.op_type}_{first_output(node) or 'none'}", taken)
            if node.op_type != "Constant":
                renamed += 1
        used.add(node.name)
    if not renamed:
        return []
    return [f"{renamed} nodes had no unique name and are called after their first output"]


def stamp(model: onnx.ModelProto) -> None:
    """Writes a module path on every node that carries none, in place, made from its name."""
    for graph in onnx_files.graphs(model):
        for node in graph.node:
            path = module_path(node.name, node.op_type)
            if path and not metadata(node, MODULE):
                node.metadata_props.add(key=MODULE, value=path)


def module_path(name: str, op: str) -> str:
    """The module path in a node's name: torch writes layer1.0.conv1 as `/layer1/layer1.0/conv1/Conv`.

    Any other name is returned as it is. An inlined graph puts its own name first; it becomes the outermost module.
    """
    path = f"/{_INLINED.sub('', name)}" if _INLINED.search(name) else name
    folder, _, last = path.rpartition("/")
    if not path.startswith("/") or not re.fullmatch(rf"{re.escape(op)}(_\d+)?", last):
        return name
    parts: list[str] = []
    for part in folder.split("/"):
        if not part:
            continue
        # A member of a Sequential or ModuleList repeats its parent's name.
        if parts and part.startswith(parts[-1] + "."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def _readable(model: onnx.ModelProto) -> list[str]:
    """Lowers the format version to what the operators need, in place: runtimes lag behind onnx."""
    before = model.ir_version
    newest = onnx.defs.onnx_opset_version()
    opset = opset_of(model)
    if opset > newest:
        raise StageError(
            f"the model is at opset {opset}; the installed onnx knows versions up to {newest}",
            where="opset",
            hint="update onnx, or export the model at a lower opset",
        )
    needed: int = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(needed, IR_VERSION)
    if model.ir_version >= before:
        return []
    return [f"ir_version {before} became {model.ir_version}, which onnxruntime reads"]


def _inherit(before: onnx.ModelProto, raised: onnx.ModelProto) -> None:
    """Gives nodes that a conversion added the module of the node that reads their value, in place."""
    old_values: set[str] = set()
    for graph in onnx_files.graphs(before):
        for node in graph.node:
            old_values.update(node.output)
    for graph in onnx_files.graphs(raised):
        module_of_reader: dict[str, str] = {}
        for node in reversed(graph.node):
            for value in node.input:
                module_of_reader[value] = metadata(node, MODULE)
        for node in reversed(graph.node):
            output = first_output(node)
            path = module_of_reader.get(output)
            if path and output not in old_values and not metadata(node, MODULE):
                node.metadata_props.add(key=MODULE, value=path)
                module_of_reader |= dict.fromkeys(node.input, path)
