"""Engines of the formats, built ahead of time, and devices that lack a format's types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from layerline.pipeline.errors import StageError
from layerline.stages.engine import PLAN
from tests.backends.models import F, model, node
from tests.stages.test_check import looked_at
from tests.stages.test_engine import in_this_process, run  # noqa: F401 - fixtures


def test_fp8_is_refused_for_a_device_that_lacks_it_and_built_for_one_that_has_it(run) -> None:  # noqa: F811
    nodes = [node("DequantizeLinear", ["w", "s", "z"], ["wd"]), node("MatMul", ["x", "wd"], ["y"], "fc")]
    proto = model(nodes, [("x", F, ["n", 4])], [("y", F, ["n", 4])], {"s": np.float32(0.5)}, opset=21)
    for name, shape in (("w", [4, 4]), ("z", [])):
        numbers = bytes(int(np.prod(shape)))
        proto.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, shape, numbers, raw=True))
    with pytest.raises(StageError) as caught:
        run(proto, targets=("8.9", "8.6"))
    assert "tensor w" in caught.value.where
    assert "compute capability 8.6 has no fp8: 8.9 is the first that has it" in caught.value.what
    report, out = run(proto, targets=("8.9",))
    assert report.passed and (out / PLAN).stat().st_size


def test_a_format_that_a_target_lacks_is_told_by_the_check(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], "fc")]
    proto = model(nodes, [("x", F, ["n", 4])], [("y", F, ["n", 4])], {"w": np.eye(4, dtype=np.float32)})
    (tmp_path / "task.py").write_text(
        "import numpy as np\n\ndef eval_data():\n    return {'x': np.ones((8, 4), np.float32)}\n"
    )
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    stages = "import-onnx: {file: m.onnx}\nengine: {targets: ['8.6']}\n"
    (tmp_path / "pipe.yaml").write_text(f"{stages}quantize: {{mode: fp8}}\n")
    told = [(f.item, f.seen) for f in looked_at(tmp_path).findings if f.state == "error"]
    assert told == [("engine.targets", "compute capability 8.6 has no fp8: 8.9 is the first that has it")]
    stages = stages.replace("8.6", "8.9")
    (tmp_path / "pipe.yaml").write_text(f"{stages}quantize: {{layers: {{y: nvfp4}}}}\n")
    told = [(f.item, f.seen) for f in looked_at(tmp_path).findings if f.state == "error"]
    assert told == [("engine.targets", "compute capability 8.9 has no nvfp4: 10.0 is the first that has it")]
    (tmp_path / "pipe.yaml").write_text(f"{stages}quantize: {{mode: fp8}}\n")
    assert [f for f in looked_at(tmp_path).findings if f.state == "error"] == []
