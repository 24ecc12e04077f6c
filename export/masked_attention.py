"""Sets attention to 0 in rows whose mask hides every key, as torch does; what the exporter writes doesn't.

The exporter hides a key by adding float32's lowest number to its score. If a row has no other keys, Softmax of that is
uniform and the row becomes the mean of v; with a mask of -inf it becomes NaN. Such rows are set to 0 behind the second
product, so that product, Softmax and product stay adjacent: runtimes look for these three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_MASK = 3
"""Position of `attn_mask` among its arguments."""


def hide_rows(model: ir.Model, program: ExportedProgram) -> None:
    """Sets every row of attention to 0 whose mask hides all keys, in place; the result keeps its name."""
    values = _values(model.graph)
    open_rows: dict[str, ir.Value] = {}
    for node, mask in _masked(program):
        attended = values.get(node.name)
        mask_value = values.get(mask.name)
        if attended is None or mask_value is None:
            continue
        producer = attended.producer()
        if producer is None:
            continue
        # One mask serves all layers, so its rows are found once.
        if mask.name not in open_rows:
            open_rows[mask.name] = _open_rows(mask_value, mask.meta["val"], producer)
        _keep(attended, open_rows[mask.name], producer, node.meta["val"].dtype)


def _masked(program: ExportedProgram) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every attention of the program with a mask, and that mask."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is not _ATTENTION:
            continue
        mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
        if isinstance(mask, fx.Node) and isinstance(mask.meta.get("val"), Tensor):
            yield node, mask


def _values(graph: ir.Graph) -> Mapping[str, ir.Value]:
    """Values of the main graph by name."""
    values = [*graph.inputs, *graph.initializers.values()]
    for node in graph:
        values += node.outputs
    return {value.name: value for value in values if value.name}


def _open_rows(mask: ir.Value, meta: Tensor, before: ir.Node) -> ir.Value:
    """Which rows of a mask leave a key to attend to, with an axis of one for the keys; computed ahead of a node."""
    last = _constant(np.array([-1]), f"{mask.name}/last_axis", before)
    if meta.dtype == torch.bool:
        numbers = _add("Cast", [mask], f"{mask.name}/visible", before, to=ir.DataType.FLOAT)
        hidden = _constant(np.array(0.0, np.float32), f"{mask.name}/nothing", before)
    else:
        numbers = _add("Cast", [mask], f"{mask.name}/added", before, to=ir.DataType.FLOAT)
        hidden = _constant(np.array(-np.inf, np.float32), f"{mask.name}/hidden", before)
    greatest = _add("ReduceMax", [numbers, last], f"{mask.name}/greatest", before, keepdims=1)
    return _add("Greater", [greatest, hidden], f"{mask.name}/open_rows", before)


def _keep(attended: ir.Value, rows: ir.Value, producer: ir.Node, dtype: torch.dtype) -> None:
    """The attended values where a row is open, 0 elsewhere, under the name of the former."""
    name = attended.name or ""
    # Taken before the new node becomes a use as well.
    uses = list(attended.uses())
    graph = producer.graph
    assert graph is not None
    zero = _constant(np.zeros((), str(dtype).removeprefix("torch.")), f"{name}/zero", producer)
    kept = ir.Node("", "Where", [rows, attended, zero], metadata_props=dict(producer.metadata_props))
    kept.outputs[0].shape, kept.outputs[0].type = attended.shape, attended.type
    graph.insert_after(producer, kept)
    for use in uses:
        use.node.replace_input_with(use.idx, kept.outputs[0])
    for index, output in enumerate(graph.outputs):
        if output is attended:
            graph.outputs[index] = kept.outputs[0]
    attended.name = f"{name}/all_rows"
    kept.outputs[0].name = name


def _constant(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], name: str, before: ir.Node) -> ir.Value:
    return _add("Constant", [], name, before, value=ir.tensor(array))


def _add(
    op: str, inputs: list[ir.Value], name: str, before: ir.Node, **attributes: ir.TensorProtocol | int
) -> ir.Value:
    """A node ahead of another one, with its record of where it comes from; gives its output."""
    node = ir.node(op, inputs, attributes=attributes, metadata_props=dict(before.metadata_props))
    node.outputs[0].name = name
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return node.outputs[0]
