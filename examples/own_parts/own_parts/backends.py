"""The backend `onnx-reference`: onnx's own evaluator in numpy, slow and independent of onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator


class Reference:
    """Opens ONNX models on onnx's reference implementation."""

    name = "onnx-reference"

    def unavailable_reason(self) -> str | None:
        """One sentence that says what this machine lacks; None where the backend can run."""
        return None

    def open(self, model: Path | bytes, taps: Sequence[str] = ()) -> ReferenceSession:
        """Loads a file or its bytes. `taps` are inner values to return too; those that can't be had are left out."""
        proto = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)
        computed = {output for node in proto.graph.node for output in node.output}
        outputs = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=tap) for tap in taps if tap in computed - outputs)
        return ReferenceSession(proto)


class ReferenceSession:
    """A loaded model. `inputs` and `outputs` are names, taps among the outputs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        stored = {tensor.name for tensor in model.graph.initializer}
        self.inputs = [value.name for value in model.graph.input if value.name not in stored]
        self.outputs = [value.name for value in model.graph.output]
        self._evaluator = ReferenceEvaluator(model)

    def run(self, feed: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Runs once: arrays by input name in, arrays by output name out."""
        return dict(zip(self.outputs, self._evaluator.run(self.outputs, dict(feed)), strict=True))
