"""Element types and shapes of a model's values, from onnxruntime: it knows its own operators, which onnx does not."""

from __future__ import annotations

import onnx

from layerline.backends import light
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.pipeline.errors import StageError

Shape = tuple[int | str, ...]
# Element types that a graph can cast and reduce: numpy's name, and TensorProto's code.
CODES = {
    name: getattr(onnx.TensorProto, code.upper())
    for name, code in (("float32", "float"), ("float64", "double"), *((n, n) for n in ("float16", "bfloat16", "bool")))
} | {n: getattr(onnx.TensorProto, n.upper()) for n in (f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64))}


def types_of(session: OrtSession) -> dict[str, tuple[str, Shape]]:
    """numpy's name of the element type (or `seq(…)`) and the shape of every input, output and tap of a session."""
    found = {}
    for name, (kind, shape) in session.types.items():
        plain = kind.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64"}.get(plain, plain)
        found[name] = (dtype, tuple("?" if d is None else d for d in shape))
    return found


def infer(model: light.Model, values: list[str]) -> dict[str, tuple[str, Shape]]:
    """Types and shapes of values, by name.

    Raises:
        StageError: onnxruntime refuses the model.
    """
    taps = list(dict.fromkeys(values))
    try:
        return types_of(OnnxRuntime(few_runs=True).open(light.weightless(model), taps))
    except StageError:  # an operator that wants its weights constant
        return types_of(OnnxRuntime(few_runs=True).open(model, taps))
