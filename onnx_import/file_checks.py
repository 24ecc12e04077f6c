"""Checks of an imported file: element types that can be fed, and onnx's own checker."""

from __future__ import annotations

from pathlib import Path

import onnx

from layerline.backends.light import Light
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError

# Types that numpy lacks. onnxruntime's Python interface passes no such arrays either.
_NOT_OUTPUTS = ("BFLOAT16", "INT4", "UINT4", "FLOAT4", "INT2", "UINT2")
_NOT_INPUTS = (*_NOT_OUTPUTS, "FLOAT8")


def refuse_types(light: Light) -> None:
    """Refuses inputs and outputs of types that can't be fed or read.

    Raises:
        StageError: names the first.
    """
    for value in light.fed:
        _refuse_type("input", value, _NOT_INPUTS)
    for value in light.model.graph.output:
        _refuse_type("output", value, _NOT_OUTPUTS)


def _refuse_type(what: str, value: onnx.ValueInfoProto, refused: tuple[str, ...]) -> None:
    code = value.type.tensor_type.elem_type
    if code not in onnx.TensorProto.DataType.values():
        raise StageError(f"the {what} is of element type {code}, which ONNX has not", where=value.name)
    element_type = onnx.TensorProto.DataType.Name(code)
    if element_type.startswith(refused):
        raise StageError(
            f"the {what} is {element_type.lower()}, which numpy has not, so it can't be fed or read",
            where=value.name,
            hint="put a Cast to float32 behind that input, or before that output",
        )


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
