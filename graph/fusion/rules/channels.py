"""Channels that hold a constant are cut out: pruning by whole channels makes the network smaller.

Connected layers are found by following each channel from the weights that make it to the weights that read it
(graph/fusion/channel_groups.py). What can't be followed keeps all its channels, and says why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.backends.base import MODULE
from layerline.graph.analysis.ir_queries import Array, constant, name_of, optional_input, rank
from layerline.graph.analysis.provenance import SOURCES, sources
from layerline.graph.fusion.affine_ops import outputs_come_first, rows
from layerline.graph.fusion.channel_constants import constants, removable
from layerline.graph.fusion.channel_groups import Group, gather
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import everywhere

NAME = "channels"


@everywhere("channels")
def run(work: Rewriting) -> None:
    graph = work.model.graph
    # A cut may leave the layer before it without readers of a channel, so each begins anew.
    while any(_attempt(node, work) for node in list(graph) if node.op_type in ("Conv", "Gemm", "MatMul")):
        work.infer()


def _attempt(node: ir.Node, work: Rewriting) -> bool:
    """Cuts the channels that a layer makes; False where none can go."""
    if node.graph is None or not _has_empty_channel(node):
        return False
    try:
        group = gather(node)
        order = [n for n in work.model.graph if n in group.producers or n in group.between or n in group.consumers]
        held = constants(group, order)
        gone = removable(group, held)
        if not gone.any():
            raise Declined(f"no channel of {node.op_type} {node.outputs[0].name} is constant wherever it is read")
        # A firing's place is the first value that it replaces.
        first = next(n for n in order if n in group.consumers)
        if not work.permits(NAME, first.outputs[0]):
            return False
        return _Cut(group, held, ~gone).carry_out(order, work)
    except Declined as declined:
        work.decline(NAME, node.outputs[0], str(declined))
        return False


def _has_empty_channel(node: ir.Node) -> bool:
    """Whether all weights of an output channel are zero; a value keeps its tensor for life, so it is read once."""
    value = node.inputs[1]
    if value is None:
        return False
    key = f"empty channel {outputs_come_first(node)}"
    if key not in value.meta:
        weight = constant(value)
        is_weight = weight is not None and weight.ndim >= 2 and weight.dtype.kind == "f" and weight.size > 0
        value.meta[key] = is_weight and weight is not None and not rows(node, weight).any(axis=1).all()
    return bool(value.meta[key])


@dataclass
class _Cut:
    """Copies of a group's nodes without the channels that go: `kept` is True for each channel that stays."""

    group: Group
    held: dict[ir.Value, Array]
    kept: Array
    tape: Tape = field(default_factory=Tape)
    new: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def carry_out(self, order: list[ir.Node], work: Rewriting) -> bool:
        pairs: list[tuple[ir.Value, ir.Value]] = []
        for node in order:
            # A layer may read some channels of the group and make others of it.
            if node in self.group.consumers or node in self.group.producers:
                made = self._layer(node)
            else:
                made = self._between(node)
            if node in self.group.producers or node in self.group.between:
                self.new[node.outputs[0]] = made
            else:
                pairs.append((node.outputs[0], made))
        if not work.swap(NAME, pairs, self.tape.nodes, self.tape.initializers):
            return False
        # The copies were inserted before the first consumer, and some may read what came after it.
        work.model.graph.sort()
        return True

    def _elements(self, value: ir.Value, channels: Array) -> Array:
        """One entry for each element of the axis that holds a value's channels."""
        return np.repeat(channels, self.group.places[value][1])

    def _layer(self, node: ir.Node) -> ir.Value:
        weight = constant(node.inputs[1])
        data = node.inputs[0]
        assert weight is not None and data is not None
        bias_value = optional_input(node, 2)
        bias = constant(bias_value)
        # A Conv's weight is (outputs, inputs, kernel…), as a transposed matrix; other matrices are (inputs, outputs).
        output_axis = weight.ndim - 1
        input_axis = weight.ndim - 2
        if outputs_come_first(node):
            output_axis = 0
            input_axis = 1
        if node in self.group.consumers:
            bias = self._absorbed(node, weight, bias, data, input_axis)
            weight = np.compress(self._elements(data, self.kept), weight, axis=input_axis)
            data = self.new[data]
        if node in self.group.producers:
            weight = np.compress(self.kept, weight, axis=output_axis)
            if bias is not None and bias.size > 1:
                bias = np.compress(self.kept, bias, axis=bias.ndim - 1)
        inputs: list[ir.Value | None] = [data, self._stored(node.inputs[1], weight)]
        if bias is not None and bias_value is None:
            inputs.append(self._stored(node.inputs[1], bias, "_bias"))
        elif bias is not None:
            inputs.append(self._stored(bias_value, bias))
        op = node.op_type
        # A MatMul takes no bias; where one is needed the value has rank 2, see `removable`.
        if op == "MatMul" and len(inputs) == 3:
            op = "Gemm"
        return self._copy(node, inputs, dict(node.attributes), op)

    def _absorbed(self, node: ir.Node, weight: Array, bias: Array | None, data: ir.Value, axis: int) -> Array | None:
        """The bias with what the channels that go add to each output."""
        numbers = np.where(self.kept, 0.0, np.nan_to_num(self.held[data]))
        if not numbers.any():
            return bias
        if node.op_type == "Gemm":
            alpha = node.attributes.get_float("alpha", 1.0)
            beta = node.attributes.get_float("beta", 1.0)
            if alpha != 1.0 or beta != 1.0:
                raise Declined(f"Gemm {node.outputs[0].name} scales its product or bias")
        wide = np.moveaxis(weight, axis, -1).astype(np.float64)
        elements = self._elements(data, numbers)
        if node.op_type == "Conv":  # (outputs, kernel…, inputs)
            added = (wide * elements).reshape(len(wide), -1).sum(axis=1)
        else:
            added = wide @ elements
        if bias is not None:
            added = bias.astype(np.float64) + added
        return np.asarray(added, weight.dtype)

    def _between(self, node: ir.Node) -> ir.Value:
        """A copy of a node that works channel by channel, with constants and counts for the channels that stay."""
        inputs: list[ir.Value | None] = []
        out = node.outputs[0]
        for index, value in enumerate(node.inputs):
            stored = constant(value)
            if value is None:
                inputs.append(None)
            elif stored is None:
                inputs.append(self.new.get(value, value))
            elif node.op_type == "Reshape":
                shape = np.array(stored)
                # -1 adapts by itself.
                if int(shape[1]) > 0:
                    shape[1] = int(self._elements(out, self.kept).sum())
                inputs.append(self._stored(value, shape))
            elif node.op_type == "Conv" or (node.op_type == "BatchNormalization" and index):
                inputs.append(self._stored(value, np.compress(self.kept, stored, axis=0)))
            else:
                # Constants broadcast from the last axis on, and may have fewer of them.
                axis = self.group.places[out][0] - ((rank(out) or 0) - stored.ndim)
                if node.op_type in ("Add", "Sub", "Mul") and axis >= 0 and stored.shape[axis] != 1:
                    value = self._stored(value, np.compress(self._elements(out, self.kept), stored, axis=axis))
                inputs.append(value)
        attributes: dict[str, Any] = dict(node.attributes)
        if node.op_type == "Conv" and "group" in attributes:
            attributes["group"] = int(self.kept.sum())
        return self._copy(node, inputs, attributes, node.op_type)

    def _stored(self, like: ir.Value | None, array: Array, suffix: str = "") -> ir.Value:
        return self.tape.initializer(ir.tensor(np.ascontiguousarray(array)), f"{_name(like)}{suffix}")

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None], attributes: dict[str, Any], op: str) -> ir.Value:
        made: ir.Value = self.tape.op(op, inputs, attributes)
        made.name = _name(node.outputs[0])
        made.type = node.outputs[0].type
        copy = made.producer()
        assert copy is not None
        # Each copy keeps the module of the node it stands for, and says what it replaced.
        replaced = (*sources(node), node.outputs[0].name)
        copy.metadata_props.update(
            {MODULE: "", **node.metadata_props, SOURCES: json.dumps(replaced, ensure_ascii=False)}
        )
        return made


def _name(value: ir.Value | None) -> str:
    """What stands for a value is called after it, however often it is cut."""
    name = name_of(value) or "constant"
    return f"{name.removesuffix('/cut')}/cut"
