"""Every value of ResNet-18 at 224x224 against its int8 Q/DQ version: Layerline's compare against qdq_loss_debug.

    python benchmarks/compare.py [--samples 32] [--rounds 3] [--polygraphy PYTHON]

All get the same two files and the same random samples; each run is a process of its own, ours and the others in turn,
and figures are medians. Seconds are those of the comparison, from the files to the table; imports and the making of
the data don't count. CPU seconds say more where other work shares the machine. Peak MB is the whole process. `plain`
runs the two models in default sessions and compares nothing. `isolated` also measures each layer with exact inputs.
With the Python of an environment that has polygraphy and onnxruntime, its Comparator takes part on 8 samples.
Ends in one JSON line.
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
from calibrate import peak_mb

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


def isolated(folder: Path, count: int) -> int:
    import onnx

    from layerline.compare.compare_models import compare

    models = [onnx.load(folder / f"{name}.onnx") for name in ("float", "qdq")]
    return len(compare(*models, samples(count), isolated=True))


def plain(folder: Path, count: int) -> int:
    import onnxruntime as ort

    sessions = [ort.InferenceSession(str(folder / f"{name}.onnx")) for name in ("float", "qdq")]
    for feed in samples(count):
        for session in sessions:
            session.run(None, feed)
    return 0


def polygraphy(folder: Path, count: int) -> int:
    from polygraphy import constants
    from polygraphy.backend.onnx import ModifyOutputs, OnnxFromPath
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.comparator import Comparator, CompareFunc

    runners = []
    for name in ("float", "qdq"):
        tapped = ModifyOutputs(OnnxFromPath(str(folder / f"{name}.onnx")), outputs=constants.MARK_ALL)
        runners.append(OnnxrtRunner(SessionFromOnnx(lambda tapped=tapped: tapped().SerializeToString()), name=name))
    results = Comparator.run(runners, data_loader=list(samples(count)))
    compared = Comparator.compare_accuracy(results, compare_func=CompareFunc.simple(check_error_stat="mean"))
    return len(compared.output_names())


WAYS = {"ours": ours, "isolated": isolated, "plain": plain, "peer": peer, "polygraphy": polygraphy}


def one_run(who: str, folder: Path, count: int) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    values = WAYS[who](folder, count)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak_mb(), "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--polygraphy", metavar="PYTHON", help="of an environment that has polygraphy and onnxruntime")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import onnx  # noqa: F401 - imports are not part of the figures
        import onnxruntime.quantization  # noqa: F401

        print(json.dumps(one_run(options.one[0], Path(options.one[1]), options.samples)))
        return
    turns = [(who, sys.executable, options.samples) for who in ("ours", "isolated", "plain", "peer")]
    if options.polygraphy:
        turns += [("ours on 8", sys.executable, 8), ("polygraphy", options.polygraphy, 8)]
    runs: dict[str, list[dict[str, float]]] = {who: [] for who, _, _ in turns}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for _ in range(options.rounds):
            for who, python, count in turns:
                line = [python, __file__, "--samples", str(count), "--one", who.split()[0], folder]
                out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
                runs[who].append(json.loads(out.splitlines()[-1]))
                print(f"{who}: {runs[who][-1]}")
    medians: dict[str, dict[str, float]] = {}
    for who, kept in runs.items():
        medians[who] = {}
        for figure in kept[0]:
            medians[who][figure] = round(statistics.median(run[figure] for run in kept), 2)
    result = {
        "name": f"compare every value, ResNet-18, {options.samples} samples",
        "ours": medians["ours"]["seconds"],
        "theirs": medians["peer"]["seconds"],
        "ratio": round(medians["ours"]["seconds"] / medians["peer"]["seconds"], 3),
        "unit": "s",
        "peer": "onnxruntime qdq_loss_debug",
        "all": medians,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
