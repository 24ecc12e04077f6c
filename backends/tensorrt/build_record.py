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
from layerline.graph.analysis.proto_queries import metadata
from layerline.graph.io import onnx_files
from layerline.pipeline.report import LayerDiff

if TYPE_CHECKING:
    import onnx

_FLOAT = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class OnnxNode:
    """The ONNX node behind a value."""

    node: str
    op: str
    module: str


@dataclass(frozen=True)
class OnnxNames:
    """The names that the ONNX file gives to values, nodes and modules.

    Attributes:
        values: the node behind each value, by value name.
        modules: module path by node name. Unnamed nodes have the name that TensorRT's parser gives them.
        shapes: dimensions of a value as declared, "?" where they have no name.
    """

    values: Mapping[str, OnnxNode]
    modules: Mapping[str, str]
    shapes: Mapping[str, tuple[int | str, ...]]


def names(model: onnx.ModelProto) -> OnnxNames:
    """Reads the names that a model carries, including those inside If, Loop and Scan."""
    values: dict[str, OnnxNode] = {}
    modules: dict[str, str] = {}
    for node in onnx_files.nodes(model):
        module = metadata(node, MODULE)
        outputs = [output for output in node.output if output]
        name = node.name
        if not name and outputs:
            name = f"node_of_{outputs[0]}"  # TensorRT's parser names unnamed nodes so
        modules[name] = module
        values.update(dict.fromkeys(outputs, OnnxNode(name, node.op_type, module)))
    shapes: dict[str, tuple[int | str, ...]] = {}
    for info in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        if info.type.tensor_type.HasField("shape"):
            shapes[info.name] = _dims(info)
    return OnnxNames(values, modules, shapes)


def engine_json(built: Built, profiles: Sequence[Profile], **facts: Any) -> dict[str, Any]:
    """The content of engine.json. Builds of the same model on the same kind of machine give the same content.

    Args:
        built: the engine and its layers.
        profiles: the profiles that it was built with.
        facts: further entries (runtime, why it was chosen, device, sizes).
    """
    profile_rows: list[dict[str, dict[str, tuple[int, ...]]]] = []
    for profile in profiles:
        row = {name: {"min": limits.min, "opt": limits.opt, "max": limits.max} for name, limits in profile.items()}
        profile_rows.append(row)
    return {
        **facts,
        "version": built.version,
        "compute_capabilities": list(built.targets) or ["default"],
        "profiles": profile_rows,
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


def layers_json(layers: Sequence[Layer], onnx_names: OnnxNames) -> list[dict[str, Any]]:
    """The content of layers.json: one row per network layer. `node` and `module` are empty for the parser's helpers."""
    return [
        {
            "name": layer.name,
            "type": layer.type,
            "precision": layer.precision,
            "outputs": [vars(t) for t in layer.outputs],
            "node": layer.node,
            "module": onnx_names.modules.get(layer.node, ""),
        }
        for layer in layers
    ]


def diffs(layers: Sequence[Layer], onnx_names: OnnxNames) -> tuple[LayerDiff, ...]:
    """One record, without measurements, per ONNX value that the network computes under the value's name."""
    records: list[LayerDiff] = []
    for layer in layers:
        for tensor in layer.outputs:
            node = onnx_names.values.get(tensor.name)
            if node is None:
                continue
            record = LayerDiff(
                name=tensor.name,
                op=node.op,
                module=node.module,
                shape=_shape(tensor.shape, onnx_names.shapes.get(tensor.name, ())),
                dtype=tensor.dtype,
                extra={"network_layer": layer.name, "type": layer.type, "precision": layer.precision},
            )
            records.append(record)
    return tuple(records)


def in_words(built: Built, narrowed: Sequence[str] = ()) -> list[str]:
    """Notes about an engine: which types it computes in, and what is unusual about it.

    Args:
        built: the engine and its layers.
        narrowed: names of the float64 values, which the engine holds in float32.
    """
    counts = compute_precisions(built.layers)
    precisions = ", ".join(f"{n} in {precision}" for precision, n in counts.items()) or "none"
    computing = [layer for layer in built.layers if layer.type in COMPUTE]
    in_float = [layer.node or layer.name for layer in computing if layer.precision in _FLOAT]
    mixed = ""
    if len(counts) > 1 and in_float:
        mixed = f" (in float: {_first_three(in_float)})"
    notes = [f"Convolutions and matrix products, as the network declares them: {precisions}{mixed}."]
    if narrowed:
        count = len(narrowed)
        notes.append(f"TensorRT has no float64: {count} values are float32 in the engine ({_first_three(narrowed)}).")
    if built.warnings:
        notes.append(f"The builder warned {sum(built.warnings.values())} times; engine.json has the texts.")
    if not built.repeatable:
        notes.append("The system randomises addresses, so inner names in engine.plan may differ from build to build.")
    return notes


def disguised(layers: Sequence[Layer]) -> bool:
    """Whether activations are quantised but all products compute in float, so that Q/DQ only costs time."""
    if not any(layer.type == "QUANTIZE" for layer in layers):
        return False
    precisions = compute_precisions(layers)
    return bool(precisions) and all(precision in _FLOAT for precision in precisions)


def _first_three(names: Sequence[str]) -> str:
    text = ", ".join(names[:3])
    return f"{text}, …" if len(names) > 3 else text


def _dims(info: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    sizes: list[int | str] = []
    for dim in info.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            sizes.append(dim.dim_value)
        else:
            sizes.append(dim.dim_param or "?")
    return tuple(sizes)


def _shape(network_shape: tuple[int, ...], declared: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The network's sizes; dynamic ones, -1 there, have the names that the model gives them."""
    if len(declared) != len(network_shape):
        declared = ("?",) * len(network_shape)
    sizes: list[int | str] = []
    for size, symbol in zip(network_shape, declared, strict=True):
        if size >= 0:
            sizes.append(size)
        elif isinstance(symbol, str):
            sizes.append(symbol)
        else:
            sizes.append("?")
    return tuple(sizes)
