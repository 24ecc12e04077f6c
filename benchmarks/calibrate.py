"""Calibrate and quantise ResNet-18 at 224x224 on random data: Layerline against onnxruntime's quantize_static.

Each run is a process of its own, in turn: ours, the peer's, and plain inference over the same samples; figures are
medians. Seconds are those of the call, from the model file to the quantised file; imports don't count. CPU seconds are
those of all threads: on a busy machine they say more. Peak MB is the whole process. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BATCH = 8


def resnet18(path: Path) -> None:
    """ResNet-18 with its BatchNorms folded and random weights."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng, nodes, weights = np.random.default_rng(0), [], []

    def conv(x: str, name: str, width: int, to: int, size: int, stride: int) -> str:
        std = (2 / (width * size * size)) ** 0.5
        for suffix, shape in (("w", (to, width, size, size)), ("b", (to,))):
            array = rng.standard_normal(shape, np.float32) * np.float32(std)
            weights.append(numpy_helper.from_array(array, f"{name}.{suffix}"))
        pads = [size // 2] * 4
        nodes.append(helper.make_node("Conv", [x, f"{name}.w", f"{name}.b"], [name], pads=pads, strides=[stride] * 2))
        return name

    def op(kind: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"{kind}_{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    x = op("Relu", conv("x", "stem", 3, 64, 7, 2))
    x, width = op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), 64
    for stage, to in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name, stride = f"layer{stage}.{block}", 2 if stage and not block else 1
            y = op("Relu", conv(x, f"{name}.conv1", width, to, 3, stride))
            y = conv(y, f"{name}.conv2", to, to, 3, 1)
            x = op("Relu", op("Add", y, conv(x, f"{name}.down", width, to, 1, stride) if stride == 2 else x))
            width = to
    weights.append(numpy_helper.from_array(rng.standard_normal((1000, 512), np.float32) * np.float32(0.04), "head.w"))
    nodes.append(helper.make_node("Gemm", [op("Flatten", op("GlobalAveragePool", x)), "head.w"], ["y"], transB=1))
    ends = [
        helper.make_tensor_value_info(*v)
        for v in (("x", TensorProto.FLOAT, ["n", 3, 224, 224]), ("y", TensorProto.FLOAT, ["n", 1000]))
    ]
    graph = helper.make_graph(nodes, "resnet18", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))


def batches(samples: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(1)
    for start in range(0, samples, BATCH):
        yield rng.standard_normal((min(BATCH, samples - start), 3, 224, 224), np.float32)


def ours(model: Path, out: Path, samples: int, calibrator: str) -> Callable[[], None]:
    from layerline.calib.calibration_survey import Survey
    from layerline.calib.collect import collect
    from layerline.calib.samples import Batch
    from layerline.export.signature import Value
    from layerline.graph.io import onnx_files
    from layerline.graph.quantization import calibration_data, measured_plan, qdq, qdq_placement

    def run() -> None:
        loaded, rules = onnx_files.read_model(model), qdq_placement.Rules()
        placed = qdq_placement.place(loaded, rules)
        names = [w.name for w in placed.wanted if w.role == "activation"]
        feeds = (Batch({"x": x}, None, len(x)) for x in batches(samples))
        survey = Survey((Value(name="x", dtype="float32", shape=("n", 3, 224, 224)),))
        ranges = collect(lambda taps: calibration_data.session(loaded, taps), survey.through(feeds), names)
        few = [b.feed for b in survey.batches()]
        tuned = measured_plan.tuned(
            loaded, rules, placed, ranges.histograms, few, calibrator=calibrator, percentile=99.99
        )
        onnx_files.save(qdq.apply(loaded, tuned.plan), out)

    return run


def peer(model: Path, out: Path, samples: int, calibrator: str) -> Callable[[], None]:
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = batches(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            x = next(self.left, None)
            return None if x is None else {"x": x}

    # It has no choice between calibrators: beside auto stands its entropy.
    names = {"auto": "Entropy", "entropy": "Entropy", "percentile": "Percentile", "minmax": "MinMax"}
    method = names[calibrator]

    def run() -> None:
        quantize_static(
            str(model), str(out / "model.onnx"), Reader(), per_channel=True, activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8, calibrate_method=getattr(CalibrationMethod, method),
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
        )  # fmt: skip

    return run


def plain(model: Path, _out: Path, samples: int, _calibrator: str) -> Callable[[], None]:
    """Inference in a default session."""
    import onnxruntime

    def run() -> None:
        session = onnxruntime.InferenceSession(str(model))
        for x in batches(samples):
            session.run(None, {"x": x})

    return run


SIDES = {"ours": ours, "peer": peer, "plain": plain}


def measure(side: str, model: str, samples: int, calibrator: str) -> dict[str, float]:
    """One run in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--model",
        model,
        "--samples",
        str(samples),
        "--calibrator",
        calibrator,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def peak_mb() -> float:
    """The most memory that this process had. ru_maxrss would begin at that of the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--calibrator", default="entropy", choices=["auto", "entropy", "percentile", "minmax"])
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--without", action="append", default=[], choices=["peer", "plain"], help="leave this out")
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options.add_argument("--model", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.side:
            run = SIDES[chosen.side](Path(chosen.model), Path(folder), chosen.samples, chosen.calibrator)
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}
            figures["peak_mb"] = peak_mb()
            print(json.dumps(figures))
            return
        model = Path(folder) / "resnet18.onnx"
        resnet18(model)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES if name not in chosen.without}
        for _ in range(chosen.repeat):
            for name, measurements in runs.items():
                measurements.append(measure(name, str(model), chosen.samples, chosen.calibrator))
    line: dict[str, object] = {
        "benchmark": "calibrate", "samples": chosen.samples, "calibrator": chosen.calibrator,
        "peer_is": "onnxruntime quantize_static",
    }  # fmt: skip
    for measured in ("seconds", "cpu_seconds", "peak_mb"):
        medians = {side: statistics.median(figures[measured] for figures in runs[side]) for side in runs}
        own = medians["ours"]
        figures = {side: round(median, 2) for side, median in medians.items()}
        line[measured] = figures | {f"over_{side}": round(own / medians[side], 3) for side in runs if side != "ours"}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
