"""The end of an import: the model beside its file, value by value; the saved file as onnx checks it; the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.compare.compare_models import compare, floors
from layerline.compare.value_pairs import why_two_sessions
from layerline.compare.value_types import CODES
from layerline.export.signature import signature
from layerline.graph.analysis.rounding_noise import drawn, random_note, unjudged
from layerline.graph.fusion import verify_rewrites
from layerline.graph.io import onnx_files
from layerline.graph.io.opset import opset_of
from layerline.onnx_import import symbolic_dims
from layerline.onnx_import.feeds import Fed
from layerline.onnx_import.normalize_import import Adopted
from layerline.onnx_import.size_search import Feeder
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import LayerDiff, Scalar


def unchanged(
    adopted: Adopted, feeds: Sequence[Feed], tolerance: float | None
) -> tuple[tuple[LayerDiff, ...], list[str]]:
    """Compares every value of the adopted model with the file's; gives the rows, and notes.

    Values that follow a random operator aren't judged, the others by `tolerance` (relative L2), or by the noise floor,
    measured as the fuse stage does, where some value differs.
    """
    original = adopted.original
    random = drawn(original)
    notes = random_note(random)
    two_sessions = why_two_sessions(original, adopted.model)
    if two_sessions:
        notes.append(two_sessions)
    rows = compare(original, adopted.model, feeds)
    if all(row.max_abs == 0 and row.passed for row in rows):
        notes.append("every value is equal to the last bit")
        return tuple(replace(row, tolerance=0.0) for row in rows), notes
    # What a rounding step of weights and inputs does to the original itself: a measure for what differs.
    noise = floors(original, feeds)
    tolerances: dict[str, float] = {}
    for row in rows:
        allowed = tolerance
        if allowed is None:
            allowed = verify_rewrites.tolerance(row.name, {row.name: CODES.get(row.dtype, 0)}, noise)
        if row.name not in random:
            tolerances[row.name] = allowed
    return compare(original, adopted.model, feeds, tolerances=tolerances), notes


def save_checked(model: ir.Model, folder: Path) -> list[str]:
    """Saves the model and checks the file; a note says why it can't be checked. Raises StageError: no valid ONNX."""
    path = onnx_files.save(model, folder)
    for output in model.graph.outputs:
        if output.shape is None:
            return [f"the rank of output {output.name} varies, so onnx's checker refuses the file; onnxruntime runs it"]
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        text = " ".join(str(error).split())
        raise StageError(f"not valid ONNX: {text:.500}", where="model.onnx") from error
    return []


def metrics(adopted: Adopted, rows: Sequence[LayerDiff], feeds: int) -> dict[str, Scalar]:
    model = adopted.model
    random = drawn(model)
    return {
        **unjudged(model.graph, random),
        "nodes": len(model.graph),
        "values_compared": sum(row.name not in random for row in rows),
        "feeds": feeds,
        "opset_before": opset_of(adopted.original),
        "opset": opset_of(model),
    }


def tables(model: ir.Model, feeder: Feeder, fed: Fed) -> dict[str, list[dict[str, Scalar]]]:
    """What each input was fed with, and the sizes that the model is known to take."""
    inputs: list[dict[str, Scalar]] = []
    for value in signature(model).inputs:
        shape = ", ".join(map(str, value.shape))
        inputs.append({"input": value.name, "type": value.dtype, "shape": shape, "fed with": fed.values[value.name]})
    dimensions: list[dict[str, Scalar]] = []
    for name, places in symbolic_dims.places(model).items():
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


def nonfinite(rows: Sequence[LayerDiff]) -> list[str]:
    """A note on values that hold NaN or Inf in the original too: being equal does not make them right."""
    both = [row.name for row in rows if row.nonfinite_a]
    if not both:
        return []
    return [f"{len(both)} values hold NaN or Inf in the file as given, first {both[0]}"]
