"""OpenVINO: runs Q/DQ models in real int8 on a CPU, where ONNX Runtime computes them in float."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerline.backends.base import Array, Feed, check_names, not_installed, switch_off_telemetry
from layerline.pipeline.errors import StageError


class OpenVino:
    """Runs on the CPU; float layers are computed in float32, not in the CPU's bfloat16."""

    name = "openvino"

    def unavailable_reason(self) -> str | None:
        return not_installed("openvino", "openvino")

    def open(self, model: Path | bytes, taps: Sequence[str] = ()) -> OpenVinoSession:
        """Loads an ONNX file or its bytes. Taps that the runtime's reader has folded away are left out."""
        core = _core()
        try:
            source = io.BytesIO(model) if isinstance(model, bytes) else str(model)
            # The reader folds constants: a tap inside of a folded part is not there any more.
            graph = core.read_model(source)
            outputs = [o.get_any_name() for o in graph.outputs]
            values = set[str]()
            for node in graph.get_ops():
                for port in node.outputs():
                    values |= port.get_names()
            kept = [tap for tap in taps if tap in values and tap not in outputs]
            if kept:
                graph.add_outputs(kept)
            return OpenVinoSession(
                # Without the hint, CPUs that have bfloat16 compute float layers in it.
                core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}),
                [*outputs, *kept],
            )
        except Exception as error:
            raise StageError(
                f"openvino refuses the model: {error}", where=str(getattr(model, "name", "model"))
            ) from error


@functools.cache
def _core() -> Any:
    """One core for the whole process.

    OpenVINO's CPU plugin replaces the stack of signal handlers and puts the previous one back when the plugin goes.
    Of two cores, the later one puts back the stack of the earlier one, which is no longer mapped: the next signal,
    such as Ctrl-C, then ends the process with a segmentation fault (seen with OpenVINO 2026.4).
    """
    switch_off_telemetry()
    import openvino as ov

    return ov.Core()


class OpenVinoSession:
    """A compiled model."""

    def __init__(self, compiled: Any, outputs: Sequence[str]) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self.inputs = [i.get_any_name() for i in compiled.inputs]
        self.outputs = list(outputs)

    def run(self, feed: Feed) -> dict[str, Array]:
        check_names(feed, self.inputs)
        try:
            results = self._request.infer(dict(feed))
        except Exception as error:
            raise StageError(f"openvino could not run the model: {error}", where="run") from error
        # The runtime reuses its buffers in the next run.
        return {name: results[self._compiled.output(name)].copy() for name in self.outputs}
