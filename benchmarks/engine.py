"""What the engine stage adds to a bare build with TensorRT-RTX: seconds, and whether two builds give the same bytes.

    python benchmarks/engine.py [--rounds 5]

The model is a ResNet-18 at 224x224 with random weights, Q/DQ around every convolution, and a dynamic batch. The peer is
the few lines that everyone writes: parse, one profile, build, write. Both are whole processes, in turn; figures are
medians. The stage also checks the model, joins layers to values and writes its records. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from layerline.export import probe_files
from layerline.export.signature import Signature, Value
from layerline.pipeline.config.field_types import Dim

PEER = """
import sys
import tensorrt_rtx as trt
log = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(log)
network = builder.create_network(0)
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file(sys.argv[1] + "/model.onnx")
config = builder.create_builder_config()
profile = builder.create_optimization_profile()
profile.set_shape("x", (1, 3, 224, 224), (4, 3, 224, 224), (8, 3, 224, 224))
config.add_optimization_profile(profile)
with open(sys.argv[2] + "/engine.plan", "wb") as file:
    file.write(builder.build_serialized_network(network, config))
"""

OURS = """
import sys
from pathlib import Path
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.engine import Engine
class Log:
    def say(self, text): pass
    def progress(self, done, total, **fields): pass
source, out = map(Path, sys.argv[1:])
stage = Engine(runtime="tensorrt-rtx", profiles=[{"batch": [1, 4, 8]}])
stage.run(Work(inputs={"model": source}, task=Task(out / "task.py"), out=out, scratch=out, log=Log()))
"""


def resnet18(folder: Path) -> None:
    """A Q/DQ artifact as the quantize stage leaves it."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    stored = {"s": np.float32(0.05), "z": np.int8(0)}

    def op(kind: str, inputs: list[str], name: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def quantised(x: str, name: str) -> str:
        return op("DequantizeLinear", [op("QuantizeLinear", [x, "s", "z"], f"{name}.q"), "s", "z"], f"{name}.dq")

    def conv(x: str, name: str, width: int, to: int, size: int, stride: int) -> str:
        stored[f"{name}.w"] = rng.integers(-127, 128, (to, width, size, size)).astype(np.int8)
        stored[f"{name}.ws"] = np.full(to, 0.001, np.float32)
        stored[f"{name}.wz"] = np.zeros(to, np.int8)
        weight = op("DequantizeLinear", [f"{name}.w", f"{name}.ws", f"{name}.wz"], f"{name}.wdq", axis=0)
        pads = [size // 2] * 4
        return op("Conv", [quantised(x, f"{name}.x"), weight], name, pads=pads, strides=[stride] * 2)

    x, width = op("Relu", [conv("x", "stem", 3, 64, 7, 2)], "stem.relu"), 64
    x = op("MaxPool", [x], "stem.pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stage, to in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name, stride = f"layer{stage}.{block}", 2 if stage and not block else 1
            skip = conv(x, f"{name}.down", width, to, 1, stride) if width != to else x
            x = op("Relu", [conv(x, f"{name}.conv1", width, to, 3, stride)], f"{name}.relu1")
            x = op("Add", [conv(x, f"{name}.conv2", to, to, 3, 1), quantised(skip, f"{name}.skip")], f"{name}.add")
            x, width = op("Relu", [x], f"{name}.relu2"), to
    op("GlobalAveragePool", [x], "y")
    shape, tensors = ["batch", 3, 224, 224], [numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items()]
    infos = [
        helper.make_tensor_value_info(*v) for v in (("x", TensorProto.FLOAT, shape), ("y", TensorProto.FLOAT, None))
    ]
    graph = helper.make_graph(nodes, "resnet18", infos[:1], infos[1:], tensors)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    output = Value(name="y", dtype="float32", shape=("batch", 512, 1, 1))
    input_value = Value(name="x", dtype="float32", shape=tuple(shape))
    Signature(inputs=(input_value,), outputs=(output,), dims={"batch": Dim(max=8)}).save(folder)
    probe_files.save(folder, [{"x": np.zeros((2, 3, 224, 224), np.float32)}])


def build(script: str, source: Path) -> tuple[float, str, int]:
    """Seconds of the whole process, digest and size of the plan it leaves."""
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", script, str(source), out], check=True, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        plan = (Path(out) / "engine.plan").read_bytes()
        return seconds, hashlib.sha256(plan).hexdigest(), len(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        resnet18(source)
        runs = [(build(OURS, source), build(PEER, source)) for _ in range(rounds)]
    result: dict[str, object] = {
        "benchmark": "engine",
        "model": "ResNet-18, int8 Q/DQ, dynamic batch",
        "rounds": rounds,
    }
    seconds = {}
    for name, own in zip(("ours", "peer"), zip(*runs, strict=True), strict=True):
        seconds[name] = statistics.median(r[0] for r in own)
        result[name] = {
            "seconds": round(seconds[name], 2),
            "plan_bytes": own[0][2],
            "different_plans": len({r[1] for r in own}),
        }
    result["peer_name"] = "parse, profile, build, write in one script"
    result["ratio"] = round(seconds["ours"] / seconds["peer"], 2)
    result["added_seconds"] = round(seconds["ours"] - seconds["peer"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
