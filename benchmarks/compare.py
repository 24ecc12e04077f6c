"""Every value of ResNet-18 at 224x224 against its int8 Q/DQ version: Layerline's compare against qdq_loss_debug.

    python benchmarks/compare.py [--samples 32] [--rounds 3]

Both get the same two files and the same random samples; each run is a process of its own, ours and the peer's in turn,
and figures are medians. Seconds are those of the comparison, from the files to the table; imports and the making of
the data don't count. Peak MB is the whole process. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Feed = dict[str, np.ndarray]


def make_models(folder: Path) -> None:
    """The float model, from a transformers configuration with random weights, and its Q/DQ version."""
    import torch
    from onnxruntime.quantization import quantize_static
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000
    )
    net = ResNetForImageClassification(config).eval()
    shapes, example = {"pixel_values": {0: "batch"}}, (torch.randn(2, 3, 224, 224),)
    program = torch.onnx.export(net, example, dynamic_shapes=shapes, dynamo=True, verbose=False)
    program.save(str(folder / "float.onnx"))
    keep = {"QDQKeepRemovableActivations": True}
    quantize_static(str(folder / "float.onnx"), str(folder / "qdq.onnx"), _Reader(4), extra_options=keep)


def samples(count: int) -> Iterator[Feed]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {"pixel_values": rng.standard_normal((1, 3, 224, 224), np.float32)}


class _Reader:
    """Samples in the form the peer wants them."""

    def __init__(self, count: int) -> None:
        self._left = samples(count)

    def get_next(self) -> Feed | None:
        return next(self._left, None)

    def __iter__(self) -> Iterator[Feed]:
        return self._left


def ours(folder: Path, count: int) -> int:
    import onnx

    from layerline.compare.compare_models import compare

    return len(compare(onnx.load(folder / "float.onnx"), onnx.load(folder / "qdq.onnx"), samples(count)))


def peer(folder: Path, count: int) -> int:
    from onnxruntime.quantization import qdq_loss_debug as debug

    activations: list[Any] = []
    for name in ("float", "qdq"):
        tapped = folder / f"{name}_tapped.onnx"
        debug.modify_model_output_intermediate_tensors(str(folder / f"{name}.onnx"), str(tapped))
        activations.append(debug.collect_activations(str(tapped), _Reader(count)))
    matched = debug.create_activation_matching(activations[1], activations[0])
    return len(debug.compute_activation_error(matched))


def one_run(who: str, folder: Path, count: int) -> dict[str, float]:
    start = time.perf_counter()
    values = {"ours": ours, "peer": peer}[who](folder, count)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import onnx  # noqa: F401 - imports are not part of the figures
        import onnxruntime.quantization  # noqa: F401

        print(json.dumps(one_run(options.one[0], Path(options.one[1]), options.samples)))
        return
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for _ in range(options.rounds):
            for who, kept in runs.items():
                line = [sys.executable, __file__, "--samples", str(options.samples), "--one", who, folder]
                out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
                kept.append(json.loads(out.splitlines()[-1]))
                print(f"{who}: {kept[-1]}")
    median: dict[str, dict[str, float]] = {}
    for who, kept in runs.items():
        median[who] = {}
        for figure in kept[0]:
            median[who][figure] = statistics.median(run[figure] for run in kept)
    result = {
        "name": f"compare every value, ResNet-18, {options.samples} samples",
        "ours": round(median["ours"]["seconds"], 2),
        "theirs": round(median["peer"]["seconds"], 2),
        "ratio": round(median["ours"]["seconds"] / median["peer"]["seconds"], 3),
        "unit": "s",
        "peer": "onnxruntime qdq_loss_debug",
        "ours_peak_mb": round(median["ours"]["peak_mb"]),
        "theirs_peak_mb": round(median["peer"]["peak_mb"]),
        "values": int(median["ours"]["values"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
