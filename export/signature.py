"""What a model takes and gives: names, types, symbolic dimensions, bounds. Travels with every ONNX artifact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
from pydantic import TypeAdapter

from layerline.graph.analysis.ir_queries import fed
from layerline.graph.io.ir_convert import as_ir
from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.errors import StageError

FILE = "signature.json"


def bounds(dims: Mapping[str, Dim], fixed: Mapping[str, int] | None = None) -> dict[str, str]:
    """The sizes that a model can be deployed at, as a metric of a report; empty if none varies. `fixed` can't vary."""
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
    model: ir.Model, dims: Mapping[str, Dim] | None = None, ranges: Mapping[str, tuple[int, int]] | None = None
) -> Signature:
    """The signature of an ONNX model: inputs without a default, and outputs, in order.

    `dims` are bounds of symbolic sizes, `ranges` (low, high) of integer inputs, by name. Raises StageError: an
    input that is not a tensor.
    """
    model = as_ir(model)
    inputs = tuple(_value(value, ranges or {}) for value in fed(model))
    outputs = tuple(_value(value, {}) for value in model.graph.outputs)
    return Signature(inputs=inputs, outputs=outputs, dims=dict(dims or {}))


def _value(value: ir.Value, ranges: Mapping[str, tuple[int, int]]) -> Value:
    name = value.name or ""
    if not isinstance(value.type, ir.TensorType) or value.type.dtype == ir.DataType.UNDEFINED:
        raise StageError("only tensors can be inputs and outputs", where=name)
    low, high = ranges.get(name, (None, None))
    shape = tuple(size if isinstance(size, int) else size.value or "?" for size in value.shape or ())
    return Value(name=name, dtype=value.type.dtype.numpy().name, shape=shape, low=low, high=high)
