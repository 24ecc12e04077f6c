"""The end of an import: the saved file as onnx's checker sees it, and the report's metrics, notes and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from layerline.backends.light import Light
from layerline.export.signature import signature
from layerline.graph.analysis.rounding_noise import drawn, unjudged
from layerline.graph.io import onnx_files
from layerline.graph.io.opset import opset_of
from layerline.onnx_import import symbolic_dims
from layerline.onnx_import.feeds import Fed
from layerline.onnx_import.normalize_import import Adopted
from layerline.onnx_import.size_search import Feeder
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff, Scalar


def save_checked(light: Light, folder: Path) -> list[str]:
    """Saves the model and checks the file. Returns what only onnx objects to, as notes.

    Raises:
        StageError: it is not valid ONNX.
    """
    path = onnx_files.save(light, folder)
    for output in light.model.graph.output:
        if not output.type.tensor_type.HasField("shape"):
            return [f"the rank of output {output.name} varies, so onnx's checker refuses the file; onnxruntime runs it"]
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        raise StageError(f"not valid ONNX: {_one_line(error):.500}", where="model.onnx") from error
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # noqa: BLE001 - onnx's shape inference raises errors of many kinds
        return [f"onnx's shape inference objects, onnxruntime does not: {_one_line(error):.300}"]
    return []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def metrics(adopted: Adopted, rows: Sequence[LayerDiff], feeds: int) -> dict[str, Scalar]:
    model = adopted.light.model
    random = drawn(model)
    return {
        **unjudged(model.graph, random),
        "nodes": len(model.graph.node),
        "values_compared": sum(row.name not in random for row in rows),
        "feeds": feeds,
        "opset_before": opset_of(adopted.original.model),
        "opset": opset_of(model),
    }


def tables(light: Light, feeder: Feeder, fed: Fed) -> dict[str, list[dict[str, Scalar]]]:
    """What each input was fed with, and the sizes that the model is known to take."""
    inputs: list[dict[str, Scalar]] = []
    for value in signature(light).inputs:
        shape = ", ".join(map(str, value.shape))
        inputs.append({"input": value.name, "type": value.dtype, "shape": shape, "fed with": fed.values[value.name]})
    dimensions: list[dict[str, Scalar]] = []
    for name, places in symbolic_dims.places(light).items():
        dim = feeder.dims[name]
        dimensions.append(
            {
                "dimension": name,
                "where": symbolic_dims.as_text(places),
                "min": dim.min,
                "max": dim.max,
                "multiple": dim.multiple,
                "told by": "dims" if name in feeder.declared else "trial",
            }
        )
    if not dimensions:
        return {"inputs": inputs}
    return {"inputs": inputs, "dimensions": dimensions}


def tried_sizes(feeder: Feeder) -> list[str]:
    """A note on the sizes that nobody declared."""
    sizes = [f"{name} {dim.min} to {dim.max}" for name, dim in feeder.dims.items() if name not in feeder.declared]
    if not sizes:
        return []
    return [f"sizes found by trial on onnxruntime: {', '.join(sizes)}; `dims` sets those you need"]


def nonfinite(rows: Sequence[LayerDiff]) -> list[str]:
    """A note on values that hold NaN or Inf in the original too: being equal does not make them right."""
    both = [row.name for row in rows if row.nonfinite_a]
    if not both:
        return []
    return [f"{len(both)} values hold NaN or Inf in the file as given, first {both[0]}"]
