"""Describes a built engine: the contents of engine.json and layers.json, and the report's records and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerline.backends.base import MODULE
from layerline.backends.tensorrt.builder import Built
from layerline.backends.tensorrt.network import COMPUTE, Layer, compute_precisions
from layerline.backends.tensorrt.profiles import Profile
from layerline.backends.tensorrt.trt_errors import first_few
from layerline.graph.analysis.ir_queries import first_output, graph_values, model_nodes
from layerline.graph.analysis.ir_queries import names as names_of
from layerline.pipeline.report import LayerDiff

if TYPE_CHECKING:
    import onnx_ir as ir

FLOAT = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class OnnxNames:
    """What the ONNX file says: the node behind each value, module paths by node name, and declared shapes of values.

    Unnamed nodes have the name that TensorRT's parser gives them. In shapes, "?" stands for a size without a name.
    """

    values: Mapping[str, ir.Node]
    modules: Mapping[str, str]
    shapes: Mapping[str, Sequence[int | str]]


def names(model: ir.Model) -> OnnxNames:
    """Reads the names that a model carries, including those inside If, Loop and Scan."""
    values: dict[str, ir.Node] = {}
    modules: dict[str, str] = {}
    for node in model_nodes(model):
        values.update(dict.fromkeys(names_of(node.outputs), node))
        # TensorRT's parser names unnamed nodes after their first output.
        modules[node.name or f"node_of_{first_output(node)}"] = node.metadata_props.get(MODULE, "")
    shapes: dict[str, list[int | str]] = {}
    for value in graph_values(model.graph):
        if value.shape is not None and value.name:
            shapes[value.name] = [size if isinstance(size, int) else size.value or "?" for size in value.shape]
    return OnnxNames(values, modules, shapes)


def engine_json(built: Built, profiles: Sequence[Profile], **facts: Any) -> dict[str, Any]:
    """The content of engine.json, with further `facts`. The same model gives the same content on machines of a kind."""
    return {
        **facts,
        "version": built.version,
        "compute_capabilities": list(built.targets) or ["default"],
        "profiles": [_limits(profile) for profile in profiles],
        "inputs": [vars(t) for t in built.inputs],
        "outputs": [vars(t) for t in built.outputs],
        "layers": {
            "total": len(built.layers),
            "by_type": dict(Counter(layer.type for layer in built.layers)),
            "by_precision": dict(Counter(layer.precision for layer in built.layers if layer.precision)),
            "compute_by_precision": compute_precisions(built.layers),
        },
        "memory": {"plan_bytes": len(built.plan), **built.memory},
        "warnings": [{"text": text, "count": count} for text, count in built.warnings.items()],
    }


def _limits(profile: Profile) -> dict[str, Any]:
    return {name: vars(limits) for name, limits in profile.items()}


def layers_json(layers: Sequence[Layer], onnx_names: OnnxNames) -> list[dict[str, Any]]:
    """The content of layers.json: one row per network layer. `node` and `module` are empty for the parser's helpers."""
    rows: list[dict[str, Any]] = []
    for layer in layers:
        row: dict[str, Any] = {"name": layer.name, "type": layer.type, "precision": layer.precision, "node": layer.node}
        row["outputs"] = [vars(output) for output in layer.outputs]
        row["module"] = onnx_names.modules.get(layer.node, "")
        rows.append(row)
    return rows


def diffs(layers: Sequence[Layer], onnx_names: OnnxNames) -> tuple[LayerDiff, ...]:
    """One record, without measurements, per ONNX value that the network computes under the value's name."""
    records: list[LayerDiff] = []
    for layer in layers:
        for tensor in layer.outputs:
            # Helpers of the parser compute values that the ONNX does not name.
            node = onnx_names.values.get(tensor.name)
            if node is None:
                continue
            record = LayerDiff(
                name=tensor.name,
                op=node.op_type,
                module=node.metadata_props.get(MODULE, ""),
                shape=_shape(tensor.shape, onnx_names.shapes.get(tensor.name, ())),
                dtype=tensor.dtype,
                extra={"network_layer": layer.name, "type": layer.type, "precision": layer.precision},
            )
            records.append(record)
    return tuple(records)


def in_words(built: Built, narrowed: Sequence[str] = ()) -> list[str]:
    """Notes about an engine: which types it computes in, and what is unusual; `narrowed` are float64 in the model."""
    counts = compute_precisions(built.layers)
    precisions = ", ".join(f"{n} in {precision}" for precision, n in counts.items()) or "none"
    computing = [layer for layer in built.layers if layer.type in COMPUTE]
    in_float = [layer.node or layer.name for layer in computing if layer.precision in FLOAT]
    mixed = ""
    if len(counts) > 1 and in_float:
        mixed = f" (in float: {first_few(in_float)})"
    notes = [f"Convolutions and matrix products, as the network declares them: {precisions}{mixed}."]
    if narrowed:
        count = len(narrowed)
        notes.append(f"TensorRT has no float64: {count} values are float32 in the engine ({first_few(narrowed)}).")
    if built.warnings:
        notes.append(f"The builder warned {sum(built.warnings.values())} times; engine.json has the texts.")
    if not built.repeatable:
        notes.append("The system randomises addresses, so inner names in engine.plan may differ from build to build.")
    return notes


def _shape(network_shape: Sequence[int], declared: Sequence[int | str]) -> tuple[int | str, ...]:
    """The network's sizes; dynamic ones, -1 there, have the names that the model gives them."""
    sizes: list[int | str] = list(network_shape)
    for axis, size in enumerate(network_shape):
        if size < 0:
            sizes[axis] = "?"
            if len(declared) == len(sizes) and isinstance(declared[axis], str):
                sizes[axis] = declared[axis]
    return tuple(sizes)
