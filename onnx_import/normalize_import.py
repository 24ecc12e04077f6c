"""Prepares an imported ONNX file: a version that the runtime reads, and names for all nodes; the numbers stay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from layerline.backends.base import MODULE
from layerline.graph.analysis.ir_queries import Array, first_output, fresh_name, model_nodes
from layerline.graph.fusion.fuse import rewrite
from layerline.graph.fusion.rules import RULES
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.opset import IR_VERSION, opset_of, raise_opset
from layerline.pipeline.errors import ConfigError, StageError

# The rules that can decide the condition of an If.
_DECIDING = ("constants", "fold", "shape-constants", "constant-branch", "dead-code")
_INLINED = re.compile(r"__Inline_\d+__(?=/)")


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A file's model before and after its preparation, and what was changed.

    Of the original only node names, module paths and the format version differ from the file.
    """

    original: ir.Model
    model: ir.Model
    notes: tuple[str, ...]


def adopt(original: ir.Model, opset: int) -> Adopted:
    """Names the nodes, inlines functions, makes initializers that were inputs constants, raises the opset.

    Names and module paths are written into `original`. Raises StageError: a version that can't be raised or is not
    known here, or a sparse initializer.
    """
    notes = [*_readable(original), *name_nodes(original)]
    stamp(original)
    prepared, prepare_notes = prepare(original)
    raised = raise_opset(prepared, opset)
    before = opset_of(prepared)
    after = opset_of(raised)
    if after != before:
        notes.append(f"raised from opset {before} to {after}")
    # The conversion adds nodes without a name, and writes a version of its own.
    _readable(raised)
    name_nodes(raised)
    stamp(raised)
    return Adopted(original=original, model=raised, notes=(*notes, *prepare_notes))


def freeze(model: ir.Model, values: Mapping[str, float | Sequence[float]]) -> dict[str, Array]:
    """Makes inputs constants, in place: each gets one number throughout, or a number for each place of its one axis.

    Returns the arrays that the original has to be fed with instead. Raises ConfigError: no such input, one whose shape
    varies, another count of numbers than elements, or a number that its type can't hold.
    """
    graph = model.graph
    inputs = {value.name or "": value for value in graph.inputs}
    frozen: dict[str, Array] = {}
    for name, number in values.items():
        if name not in inputs:
            raise ConfigError(f"there is no input {name!r}", where="values", hint=f"inputs: {', '.join(inputs)}")
        value = inputs[name]
        assert value.dtype is not None and value.shape is not None  # every input has been named
        array = np.full(_frozen_shape(name, value.shape, number), number).astype(value.dtype.numpy())
        # Floats may be rounded; an integer that changes is another one.
        if array.dtype.kind in "iub" and (array != number).any():
            raise ConfigError(f"{array.dtype} can't hold {number}", where=f"values.{name}")
        frozen[name] = array
        graph.inputs.remove(value)
        value.shape = ir.Shape(array.shape)
        value.const_value = ir.tensor(array, name=name)
        graph.register_initializer(value)
    return frozen


def _frozen_shape(name: str, shape: ir.Shape, number: float | Sequence[float]) -> list[int]:
    """The shape of a constant in place of an input. Numbers along an axis fix its size."""
    where = f"values.{name}"
    several = isinstance(number, Sequence)
    if not shape.is_static() and not (several and len(shape) == 1):
        raise ConfigError("its shape varies, so it can't be a constant", where=where, hint="fix it in `dims`")
    if not isinstance(number, Sequence):
        return list(shape.numpy())
    fits = len(shape) == 1 and (not shape.is_static() or shape[0] == len(number))
    if not fits:
        declared = ", ".join(map(str, shape))
        raise ConfigError(f"{len(number)} numbers for an input of shape ({declared})", where=where)
    return [len(number)]


def take_branches(adopted: Adopted) -> Adopted:
    """Replaces every If whose condition is constant by the branch that it takes.

    The other branch may be invalid at these sizes, such as a Squeeze of an axis of size 4, and a runtime refuses that
    before it runs anything. A model without such an If is returned as it is.
    """
    if not any(node.op_type == "If" for node in adopted.model.graph):
        return adopted
    rewritten = rewrite(adopted.model, [rule for rule in RULES if rule.name in _DECIDING])
    decided = [firing.site.value for firing in rewritten.firings if firing.site.rule == "constant-branch"]
    if not decided:
        return adopted
    notes = [f"If {value} has a constant condition: the branch that it takes replaces it" for value in decided]
    return replace(adopted, model=rewritten.model, notes=(*adopted.notes, *notes))


def name_nodes(model: ir.Model) -> list[str]:
    """Gives every node a unique name, in place: `<operator>_<first output>` if it has none or a repeated one."""
    nodes = list(model_nodes(model))
    taken = {node.name or "" for node in nodes}
    used = {""}
    renamed = 0
    for node in nodes:
        if (node.name or "") in used:
            node.name = fresh_name(f"{node.op_type}_{first_output(node) or 'none'}", taken)
            # Exporters leave constants without a name, which says nothing about the file.
            if node.op_type != "Constant":
                renamed += 1
        used.add(node.name or "")
    if not renamed:
        return []
    return [f"{renamed} nodes had no unique name and are called after their first output"]


def stamp(model: ir.Model) -> None:
    """Writes a module path on every node that carries none, in place, made from its name."""
    for node in model.graph.all_nodes():
        path = module_path(node.name or "", node.op_type)
        if path and not node.metadata_props.get(MODULE):
            node.metadata_props[MODULE] = path


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


def _readable(model: ir.Model) -> list[str]:
    """Lowers the format version to what the operators need, in place: runtimes lag behind onnx."""
    before = model.ir_version
    newest = onnx.defs.onnx_opset_version()
    opset = opset_of(model)
    if opset > newest:
        what = f"the model is at opset {opset}; the installed onnx knows versions up to {newest}"
        raise StageError(what, where="opset", hint="update onnx, or export the model at a lower opset")
    imports = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    needed: int = helper.find_min_ir_version_for(imports, ignore_unknown=True)
    model.ir_version = max(needed, IR_VERSION)
    if model.ir_version >= before:
        return []
    return [f"ir_version {before} became {model.ir_version}, which onnxruntime reads"]
