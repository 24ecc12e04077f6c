"""What an engine was built from and into, in words and rows: engine.json, layers.json and the report's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerline.backends.base import MODULE
from layerline.backends.light import bodies
from layerline.backends.tensorrt.builder import Built
from layerline.backends.tensorrt.network import COMPUTE, Layer, compute_precisions
from layerline.backends.tensorrt.profiles import Profile
from layerline.graph.analysis.proto_queries import metadata
from layerline.pipeline.report import LayerDiff

if TYPE_CHECKING:
    import onnx

_FLOAT = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Origin:
    """The ONNX node behind a value."""

    node: str
    op: str
    module: str


@dataclass(frozen=True)
class Names:
    """Whom the ONNX file says a value and a node belong to.

    Attributes:
        values: origin by value name.
        modules: module path by node name, the name the parser gives to unnamed nodes included.
        shapes: dimensions of a value as declared, unknown ones as "?".
    """

    values: Mapping[str, Origin]
    modules: Mapping[str, str]
    shapes: Mapping[str, tuple[int | str, ...]]


def names(model: onnx.ModelProto) -> Names:
    """Reads the identities that a model carries, those inside If, Loop and Scan included."""
    values: dict[str, Origin] = {}
    modules: dict[str, str] = {}
    for node in _nodes(model.graph):
        module = metadata(node, MODULE)
        given = [o for o in node.output if o]
        name = node.name or (f"node_of_{given[0]}" if given else "")
        modules[name] = module
        values.update(dict.fromkeys(given, Origin(name, node.op_type, module)))
    infos = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    shapes = {i.name: _dims(i) for i in infos if i.type.tensor_type.HasField("shape")}
    return Names(values, modules, shapes)


def engine_json(built: Built, profiles: Sequence[Profile], **facts: Any) -> dict[str, Any]:
    """The build record. It holds nothing that another build of the same model on the same kind of machine would change.

    Args:
        built: what the build gave.
        profiles: what it was built with.
        facts: further entries (runtime, why it was chosen, device, sizes).
    """
    return {
        **facts,
        "version": built.version,
        "compute_capabilities": list(built.targets) or ["default"],
        "profiles": [{n: {"min": s.min, "opt": s.opt, "max": s.max} for n, s in p.items()} for p in profiles],
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


def layers_json(layers: Sequence[Layer], known: Names) -> list[dict[str, Any]]:
    """One row per network layer; `node` and `module` are empty for helpers that the parser added."""
    return [
        {
            "name": layer.name,
            "type": layer.type,
            "precision": layer.precision,
            "outputs": [vars(t) for t in layer.outputs],
            "node": layer.node,
            "module": known.modules.get(layer.node, ""),
        }
        for layer in layers
    ]


def diffs(layers: Sequence[Layer], known: Names) -> tuple[LayerDiff, ...]:
    """One record per ONNX value that the network computes under its own name; nothing is measured yet."""
    return tuple(
        LayerDiff(
            name=tensor.name,
            op=origin.op,
            module=origin.module,
            shape=_shape(tensor.shape, known.shapes.get(tensor.name, ())),
            dtype=tensor.dtype,
            extra={"network_layer": layer.name, "type": layer.type, "precision": layer.precision},
        )
        for layer in layers
        for tensor in layer.outputs
        if (origin := known.values.get(tensor.name)) is not None
    )


def in_words(built: Built, narrowed: Sequence[str] = ()) -> list[str]:
    """What convolutions and matrix products compute in, so that a float engine behind Q/DQ is seen as one, and more."""
    layers, counts = built.layers, compute_precisions(built.layers)
    told = ", ".join(f"{n} in {precision}" for precision, n in counts.items()) or "none"
    rest = [layer.node or layer.name for layer in layers if layer.type in COMPUTE and layer.precision in _FLOAT]
    mixed = f" (in float: {', '.join(rest[:3])}{', …' if len(rest) > 3 else ''})" if len(counts) > 1 and rest else ""
    notes = [f"Convolutions and matrix products, as the network declares them: {told}{mixed}."]
    if narrowed:
        named = f"{', '.join(narrowed[:3])}{', …' if len(narrowed) > 3 else ''}"
        notes.append(f"TensorRT has no float64: {len(narrowed)} values are float32 in the engine ({named}).")
    if built.warnings:
        notes.append(f"The builder warned {sum(built.warnings.values())} times; engine.json has the texts.")
    if not built.repeatable:
        notes.append("The system randomises addresses, so inner names in engine.plan may differ from build to build.")
    return notes


def disguised(layers: Sequence[Layer]) -> bool:
    """Whether activations are quantised and yet nothing computes in it: a float engine that pays for Q/DQ as well."""
    quantises, counts = any(layer.type == "QUANTIZE" for layer in layers), compute_precisions(layers)
    return quantises and bool(counts) and all(precision in _FLOAT for precision in counts)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from _nodes(body)


def _dims(info: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    dims = info.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims)


def _shape(seen: tuple[int, ...], declared: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The network's sizes, its dynamic ones under the names that the model gives them."""
    symbols = declared if len(declared) == len(seen) else ("?",) * len(seen)
    return tuple(s if s >= 0 else d if isinstance(d, str) else "?" for s, d in zip(seen, symbols, strict=True))
