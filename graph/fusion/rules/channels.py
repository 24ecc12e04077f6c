"""Channels that hold a constant are cut out: pruning by whole channels makes the network smaller.

Connected layers are found by following each channel from the weights that make it to the weights that read it
(graph/fusion/channel_groups.py). What can't be followed keeps all its channels, and says why.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.backends.base import MODULE
from layerline.graph.analysis.ir_queries import Array, constant, optional_input, rank
from layerline.graph.analysis.provenance import SOURCES, sources
from layerline.graph.fusion.channel_groups import Group, constants, gather, removable
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import Rule

NAME = "channels"


def run(work: Rewriting) -> None:
    graph = work.model.graph
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
        first = next(n for n in order if n in group.consumers)
        if not work.permits(NAME, first.outputs[0]):
            return False
        return _Cut(group, held, gone).carry_out(order, work)
    except Declined as declined:
        work.decline(NAME, node.outputs[0], str(declined))
        return False


def _has_empty_channel(node: ir.Node) -> bool:
    """Whether all weights of an output channel are zero; a value keeps its tensor for life, so it is read once."""
    value = node.inputs[1]
    if value is None:
        return False
    by_output = node.op_type == "Conv" or bool(node.attributes.get_int("transB", 0))
    key = f"empty channel {by_output}"
    if key not in value.meta:
        value.meta[key] = _empty(constant(value), by_output=by_output)
    return bool(value.meta[key])


def _empty(weight: Array | None, *, by_output: bool) -> bool:
    if weight is None or weight.ndim < 2 or weight.dtype.kind != "f" or not weight.size:
        return False
    rows = weight if by_output else np.moveaxis(weight, -1, 0)
    return not bool(rows.reshape(len(rows), -1).any(axis=1).all())


class _Cut:
    """Copies of a group's nodes without the channels that go.

    Args:
        group: the connected values.
        held: what their channels hold.
        gone: True for each channel that goes.
    """

    def __init__(self, group: Group, held: dict[ir.Value, Array], gone: Array) -> None:
        self.group, self.held, self.gone, self.kept = group, held, gone, ~gone
        self.tape = Tape()
        self.new: dict[ir.Value, ir.Value] = {}

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
        if not work.swap(NAME, pairs, self.tape):
            return False
        work.model.graph.sort()
        return True

    def _layer(self, node: ir.Node) -> ir.Value:
        weight = constant(node.inputs[1])
        assert weight is not None
        attributes = dict(node.attributes)
        bias_value = optional_input(node, 2)
        bias = constant(bias_value)
        data = node.inputs[0]
        assert data is not None
        transposed = node.op_type == "Conv" or bool(node.attributes.get_int("transB", 0))
        # A Conv's weight is (outputs, inputs, kernel…), as a transposed matrix; other matrices are (inputs, outputs).
        output_axis = weight.ndim - 1
        input_axis = weight.ndim - 2
        if transposed:
            output_axis = 0
            input_axis = 1
        if node in self.group.consumers:
            bias = self._absorbed(node, weight, bias, data, input_axis)
            weight = np.compress(np.repeat(self.kept, self.group.spread[data]), weight, axis=input_axis)
            data = self.new[data]
        if node in self.group.producers:
            weight = np.compress(self.kept, weight, axis=output_axis)
            if bias is not None and bias.size > 1:
                bias = np.compress(self.kept, bias, axis=bias.ndim - 1)
        inputs = [data, self._stored(node.inputs[1], weight)]
        if bias is not None:
            inputs.append(self._stored(bias_value or node.inputs[1], bias, "bias" if bias_value is None else ""))
        op = node.op_type
        if op == "MatMul" and len(inputs) == 3:
            op = "Gemm"
        return self._copy(node, inputs, attributes, op)

    def _absorbed(self, node: ir.Node, weight: Array, bias: Array | None, data: ir.Value, axis: int) -> Array | None:
        """The bias with what the channels that go add to each output."""
        numbers = np.where(self.gone, np.nan_to_num(self.held[data]), 0.0)
        if not numbers.any():
            return bias
        wide = np.moveaxis(weight, axis, -1).astype(np.float64)
        if node.op_type == "Conv":  # (outputs, kernel…, inputs)
            added = (wide * np.repeat(numbers, self.group.spread[data])).reshape(len(wide), -1).sum(axis=1)
        else:
            added = wide @ np.repeat(numbers, self.group.spread[data])
        alpha = node.attributes.get_float("alpha", 1.0)
        beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
        if node.op_type == "Gemm" and (alpha != 1.0 or beta != 1.0):
            raise Declined(f"Gemm {node.outputs[0].name} scales its product or bias")
        before = 0.0 if bias is None else bias.astype(np.float64)
        return np.asarray(before + added, weight.dtype)

    def _between(self, node: ir.Node) -> ir.Value:
        inputs: list[ir.Value | None] = []
        attributes: dict[str, Any] = dict(node.attributes)
        channels, out = self.group.channels, node.outputs[0]
        for place, value in enumerate(node.inputs):
            stored = constant(value)
            if value is None or stored is None:
                inputs.append(self.new[value] if value in self.new and value is not None else value)
            elif node.op_type == "Reshape":
                shape = np.array(stored)
                if int(shape[1]) > 0:
                    shape[1] = int(self.kept.sum()) * self.group.spread[out]
                inputs.append(self._stored(value, shape))
            elif node.op_type == "Conv" or (node.op_type == "BatchNormalization" and place):
                inputs.append(self._stored(value, np.compress(self.kept, stored, axis=0)))
            elif node.op_type in ("Add", "Sub", "Mul") and stored.size > 1:
                inputs.append(self._sliced(value, stored, out))
            else:
                inputs.append(value)
        if node.op_type == "Conv" and "group" in attributes:
            attributes["group"] = int(self.kept.sum())
        assert channels == len(self.kept)
        return self._copy(node, inputs, attributes, node.op_type)

    def _sliced(self, value: ir.Value, stored: Array, out: ir.Value) -> ir.Value:
        axis = self.group.axes[out] - ((rank(out) or 0) - stored.ndim)
        if axis < 0 or stored.shape[axis] == 1:
            return value
        return self._stored(value, np.compress(np.repeat(self.kept, self.group.spread[out]), stored, axis=axis))

    def _stored(self, like: ir.Value | None, array: Array, suffix: str = "") -> ir.Value:
        end = f"_{suffix}" if suffix else ""
        return self.tape.initializer(ir.tensor(np.ascontiguousarray(array)), f"{_name(like)}{end}")

    def _copy(
        self, node: ir.Node, inputs: list[ir.Value | None] | list[ir.Value], attributes: dict[str, Any], op: str
    ) -> ir.Value:
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
    name = (value.name if value is not None else None) or "constant"
    return f"{name.removesuffix('/cut')}/cut"


RULE = Rule(NAME, "constant channels out of the layers around them", run)
