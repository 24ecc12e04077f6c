"""PyTorch: a saved exported program as a session, its values under the names they keep in the ONNX."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerline.backends.base import Array, Feed, check_names, not_installed
from layerline.pipeline.errors import StageError


class Torch:
    """Runs `torch.export` programs (.pt2) on the CPU, node by node, without compiling."""

    name = "torch"

    def unavailable_reason(self) -> str | None:
        return not_installed("torch", "torch")

    def open(self, model: Path | bytes, taps: Sequence[str] = ()) -> TorchSession:
        """Loads a program from a file or its bytes; taps are names of its fx nodes (`relu_3`)."""
        import torch

        if isinstance(model, Path) and model.suffix == ".onnx":
            raise StageError("backend torch runs exported programs (.pt2), not ONNX", where=model.name)
        source = io.BytesIO(model) if isinstance(model, bytes) else str(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.load(source)
        except Exception as error:
            where = str(getattr(model, "name", "model"))
            raise StageError(f"torch can't load this as an exported program: {error}", where=where) from error
        return TorchSession(program, taps)


class TorchSession:
    """torch's ExportedProgram; `taps` are fx nodes to return beside the outputs, names of no such node are left out."""

    def __init__(self, program: Any, taps: Sequence[str] = ()) -> None:
        signature = program.graph_signature
        nodes = {node.name for node in program.graph.nodes if node.op == "call_function"}
        self._program = program
        self._stored = signature.inputs_to_parameters | signature.inputs_to_buffers
        self._constants = signature.inputs_to_lifted_tensor_constants
        self.inputs = list(signature.user_inputs)
        self.outputs = [*signature.user_outputs, *(t for t in taps if t in nodes and t not in signature.user_outputs)]

    def run(self, feed: Feed) -> dict[str, Array]:
        import torch

        check_names(feed, self.inputs)
        # Keeps every value, for the taps.
        interpreter = torch.fx.Interpreter(self._program.graph_module, garbage_collect_values=False)
        try:
            with torch.no_grad():
                interpreter.run(*self._arguments(feed))
            values = {node.name: value for node, value in interpreter.env.items()}
            # numpy has no bfloat16.
            return {name: values[name].numpy() for name in self.outputs if isinstance(values[name], torch.Tensor)}
        except Exception as error:
            raise StageError(f"torch could not run the program: {error}", where="run") from error

    def _arguments(self, feed: Feed) -> list[Any]:
        import torch

        constants = self._program.constants
        arguments: list[Any] = []
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in feed:
                arguments.append(torch.from_numpy(np.array(feed[node.name])))
            elif node.name in self._constants:
                arguments.append(constants[self._constants[node.name]])
            else:
                # Buffers that no state dict carries are kept among the constants.
                stored = self._stored[node.name]
                arguments.append(self._program.state_dict.get(stored, constants.get(stored)))
        return arguments
