"""What TensorRT-RTX builds of each model before and after `fuse`, ahead of time, without a device.

    python benchmarks/fuse_rtx.py [--models FOLDER] [NAME…]

Prints a table in Markdown (layers of the network, size of the engine, or why there is none) and ends in a JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fuse_models
import numpy as np
import onnx_ir as ir
import tensorrt_rtx as trt

from layerline.graph.fusion.fuse import fuse
from layerline.graph.io import onnx_files


class _Last(trt.ILogger):
    """Keeps the last error, which says why a build gave nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.error = ""

    def log(self, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.error = message


def build(model: bytes, feeds: Sequence[Mapping[str, Any]]) -> tuple[int, int, str]:
    """Layers of the network, bytes of the engine, and why there is none."""
    logger = _Last()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model):
        return 0, 0, f"parser: {parser.get_error(0).desc()}"
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for index in range(network.num_inputs):
        _bound(profile, network.get_input(index), feeds)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    return network.num_layers, 0 if engine is None else engine.nbytes, "" if engine is not None else logger.error


def _bound(profile: Any, tensor: Any, feeds: Sequence[Mapping[str, Any]]) -> None:
    if tensor.is_shape_tensor:
        values = [int(x) for x in np.atleast_1d(feeds[0][tensor.name])]
        profile.set_shape_input(tensor.name, values, values, values)
    elif -1 in tensor.shape:
        sizes = np.array([f[tensor.name].shape for f in feeds])
        low, high = (tuple(int(s) for s in bound) for bound in (sizes.min(0), sizes.max(0)))
        profile.set_shape(tensor.name, low, high, high)


def _cell(layers: int, size: int, why: str) -> str:
    return f"{layers} layers, {size / 2**20:.1f} MiB" if size else f"not built: {why[:110]}"


def main(names: Sequence[str], folder: Path) -> None:
    print("| model | unfused | fused |\n| --- | --- | --- |", flush=True)
    built: dict[str, tuple[bool, bool]] = {}
    for model in fuse_models.models(folder):
        if names and model.name not in names:
            continue
        proto, feeds = onnx_files.load(model.path), [model.feed(0), model.feed(1)]
        fused = ir.to_proto(fuse(proto, feeds).model)
        results = [build(m.SerializeToString(), feeds) for m in (proto, fused)]
        built[model.name] = results[0][1] > 0, results[1][1] > 0
        print(f"| {model.name} | {_cell(*results[0])} | {_cell(*results[1])} |", flush=True)
    summary = {
        "models": len(built),
        "built_unfused": sum(a for a, _ in built.values()),
        "built_fused": sum(b for _, b in built.values()),
        "only_fused": [m for m, (a, b) in built.items() if b and not a],
        "lost": [m for m, (a, b) in built.items() if a and not b],
        "neither": [m for m, (a, b) in built.items() if not a and not b],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "layerline-fuse-models")
    options = parser.parse_args()
    main(options.names, options.models)
