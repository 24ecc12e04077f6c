"""Element types and shapes of a model's values, from onnxruntime, which unlike onnx knows its contrib operators."""

from __future__ import annotations

import onnx_ir as ir

from layerline.backends.light import weightless
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.pipeline.errors import StageError

Shape = tuple[int | str, ...]
# Element types that a graph can cast and reduce: numpy's name, and ONNX's code.
CODES: dict[str, int] = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
for _name in "float16 bfloat16 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split():  # noqa: SIM905  (a table)
    CODES[_name] = ir.DataType[_name.upper()]


def types_of(session: OrtSession) -> dict[str, tuple[str, Shape]]:
    """numpy's name of the element type (or `seq(…)`) and the shape of every input, output and tap of a session."""
    types: dict[str, tuple[str, Shape]] = {}
    for name, (ort_type, shape) in session.types.items():
        element_type = ort_type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64"}.get(element_type, element_type)
        types[name] = (dtype, tuple("?" if size is None else size for size in shape))
    return types


def infer(model: ir.Model, values: list[str]) -> dict[str, tuple[str, Shape]]:
    """Types and shapes of values, by name. Raises StageError if onnxruntime refuses the model."""
    taps = list(dict.fromkeys(values))
    try:
        # Types need no weights, and loading them takes time and memory.
        return types_of(OnnxRuntime(few_runs=True).open(weightless(model), taps))
    except StageError:  # an operator that wants its weights constant
        return types_of(OnnxRuntime(few_runs=True).open(model, taps))
