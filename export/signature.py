"""What a model takes and gives: names, types, symbolic dimensions, bounds. Travels with every ONNX artifact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from pydantic import TypeAdapter

from layerline.backends.light import Light
from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.errors import StageError

FILE = "signature.json"


def bounds(dims: Mapping[str, Dim], fixed: Mapping[str, int] | None = None) -> dict[str, str]:
    """The sizes that a model can be deployed at, as a metric of a report; empty if none varies.

    Args:
        dims: bounds of each symbolic dimension.
        fixed: sizes of dimensions that are symbolic in the file, but can't vary.
    """
    parts = [f"{name} fixed at {size}" for name, size in (fixed or {}).items()]
    for name, dim in dims.items():
        step = f" in steps of {dim.multiple}" if dim.multiple > 1 else ""
        parts.append(f"{name} {dim.min} to {dim.max}{step}")
    if not parts:
        return {}
    return {"axes": ", ".join(parts)}


@dataclass(frozen=True, kw_only=True)
class Value:
    """One input or output.

    Attributes:
        name: its name in the ONNX graph.
        dtype: numpy's name of the element type.
        shape: static sizes as integers, symbolic ones by name.
        low: smallest value of an integer input, where declared.
        high: greatest value of an integer input, where declared.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Inputs and outputs in order, and the bounds of each symbolic dimension by name."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    dims: dict[str, Dim] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes `signature.json`, the same bytes for the same content."""
        # Sorted and without time or host: an artifact has the same bytes for the same content.
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> Signature:
        return TypeAdapter(cls).validate_json((folder / FILE).read_bytes())


def signature(
    light: Light, dims: Mapping[str, Dim] | None = None, ranges: Mapping[str, tuple[int, int]] | None = None
) -> Signature:
    """The signature of an ONNX model: inputs without a default, and outputs, in order.

    Args:
        dims: bounds of symbolic sizes, by name.
        ranges: (low, high) of integer inputs, by name.

    Raises:
        StageError: an input that is not a tensor.
    """
    inputs = tuple(_value(info, ranges or {}) for info in light.fed)
    outputs = tuple(_value(info, {}) for info in light.model.graph.output)
    return Signature(inputs=inputs, outputs=outputs, dims=dict(dims or {}))


def _value(info: onnx.ValueInfoProto, ranges: Mapping[str, tuple[int, int]]) -> Value:
    tensor_type = info.type.tensor_type
    if not tensor_type.elem_type:
        raise StageError("only tensors can be inputs and outputs", where=info.name)
    low, high = ranges.get(info.name, (None, None))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type).name
    dims = tensor_type.shape.dim
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)
    return Value(name=info.name, dtype=dtype, shape=shape, low=low, high=high)
