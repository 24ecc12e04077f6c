"""Sets attention to 0 in rows whose mask hides every key, as torch does; what the exporter writes doesn't.

The exporter hides a key by adding float32's lowest number to its score. If a row has no other keys, Softmax of that is
uniform and the row becomes the mean of v; with a mask of -inf it becomes NaN. Such rows are set to 0 behind the second
product, so that product, Softmax and product stay adjacent: runtimes look for these three.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from torch import Tensor, fx
from torch.export import ExportedProgram

from layerline.graph.analysis.ir_queries import values_by_name

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_MASK = 3
"""Position of `attn_mask` among its arguments."""


def hide_rows(model: ir.Model, program: ExportedProgram) -> None:
    """Sets every row of attention to 0 whose mask hides all keys, in place; the result keeps its name."""
    values = values_by_name(model.graph)
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


def _open_rows(mask: ir.Value, meta: Tensor, before: ir.Node) -> ir.Value:
    """Which rows of a mask leave a key to attend to, with an axis of one for the keys; computed ahead of a node."""
    tape = Tape()

    def add(op: str, inputs: list[ir.Value], name: str, **attributes: ir.TensorProtocol | int) -> ir.Value:
        value = tape.op(op, inputs, attributes, metadata_props=dict(before.metadata_props))
        value.name = f"{mask.name}/{name}"
        return value

    last = add("Constant", [], "last_axis", value=ir.tensor(np.array([-1])))
    if meta.dtype == torch.bool:
        numbers = add("Cast", [mask], "visible", to=ir.DataType.FLOAT)
        hidden = add("Constant", [], "nothing", value=ir.tensor(np.array(0.0, np.float32)))
    else:
        numbers = add("Cast", [mask], "added", to=ir.DataType.FLOAT)
        hidden = add("Constant", [], "hidden", value=ir.tensor(np.array(-np.inf, np.float32)))
    greatest = add("ReduceMax", [numbers, last], "greatest", keepdims=1)
    open_rows = add("Greater", [greatest, hidden], "open_rows")
    assert before.graph is not None
    before.graph.insert_before(before, tape.nodes)
    return open_rows


def _keep(attended: ir.Value, rows: ir.Value, producer: ir.Node, dtype: torch.dtype) -> None:
    """The attended values where a row is open, 0 elsewhere, under the name of the former."""
    name = attended.name or ""
    tape = Tape()
    props = dict(producer.metadata_props)
    zero_tensor = ir.tensor(np.zeros((), str(dtype).removeprefix("torch.")))
    zero = tape.op("Constant", [], {"value": zero_tensor}, metadata_props=dict(props))
    zero.name = f"{name}/zero"
    kept = tape.op("Where", [rows, attended, zero], metadata_props=props)
    kept.shape, kept.type = attended.shape, attended.type
    graph = producer.graph
    assert graph is not None
    graph.insert_before(producer, tape.nodes[:1])
    graph.insert_after(producer, tape.nodes[1:])
    attended.replace_all_uses_with(kept, replace_graph_outputs=True)
    tape.nodes[1].replace_input_with(1, attended)  # the new node itself still reads the old value
    attended.name = f"{name}/all_rows"
    kept.name = name
