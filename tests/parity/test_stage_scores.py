"""The metric after each stage, measured on the same samples."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from layerline.export.signature import Signature, Value
from layerline.graph.io import onnx_files
from layerline.graph.quantization import qdq
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.parity import stage_scores
from layerline.pipeline.errors import StageError
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from tests.backends import models
from tests.forms import as_ir
from tests.graph.test_qdq import model
from tests.parity.test_on_backend import Quiet

TASK = """
import numpy as np

def eval_data():
    rng = np.random.default_rng(0)
    return rng.standard_normal((200, 3, 8, 8)).astype(np.float32), np.zeros(200, np.int64)

def metric(outputs, targets):
    return {"mean": float(outputs.mean(axis=(1, 2, 3)).mean())}
"""


def measured(tmp_path, factors, max_drop=None, modules=None, task=TASK):
    """Stages that leave the same convolution, its weights times a factor."""
    (tmp_path / "task.py").write_text(task)
    folders = {}
    for stage, factor in factors.items():
        folders[stage] = models.artifact(tmp_path / stage, models.conv(weight=models.WEIGHT * np.float32(factor)))
    work = Work(inputs={}, task=Task(tmp_path / "task.py"), out=tmp_path, scratch=tmp_path, log=Quiet())
    return stage_scores.measure(work, folders, modules or {}, max_drop)


def test_each_stage_is_compared_with_the_one_before(tmp_path) -> None:
    scores = measured(tmp_path, {"export": 1.0, "fuse": 1.0, "quantize": 0.5})
    values = [row["value"] for row in scores.rows]
    assert values[0] == values[1] and values[2] == pytest.approx(values[0] / 2, rel=1e-5)
    assert [row["stage"] for row in scores.rows] == ["export", "fuse", "quantize"]
    assert "change" not in scores.rows[0] and scores.rows[1]["change"] == 0
    assert scores.rows[2]["change"] == pytest.approx(-values[0] / 2, rel=1e-5)
    assert list(scores.losses) == ["quantize"] and not scores.notes


def test_a_loss_within_the_budget_or_in_the_other_direction_is_none(tmp_path) -> None:
    assert not measured(tmp_path, {"fuse": 1.0, "quantize": 0.5}, max_drop="60%").losses
    assert not measured(tmp_path, {"fuse": 1.0, "quantize": 2.0}).losses


def test_less_of_what_is_called_a_loss_is_a_gain(tmp_path) -> None:
    task = TASK.replace('"mean"', '"val_loss"')
    assert not measured(tmp_path, {"fuse": 1.0, "quantize": 0.5}, task=task).losses
    assert list(measured(tmp_path, {"fuse": 1.0, "quantize": 2.0}, task=task).losses) == ["quantize"]
    turned = TASK.replace('"mean"', '"minus_error"')
    assert list(measured(tmp_path, {"fuse": 1.0, "quantize": 0.5}, task=turned).losses) == ["quantize"]


def test_what_does_not_run_is_left_out_with_its_reason(tmp_path) -> None:
    def refuse():
        raise StageError("the weights do not fit")

    scores = measured(tmp_path, {"ema": 1.0, "export": 1.0}, modules={"ema": refuse})
    assert [row["stage"] for row in scores.rows] == ["export"]
    assert scores.skipped == ["ema was not evaluated: the weights do not fit"]


def half_precision(dtype, factor=1.0):
    """The convolution as quantize leaves it in half precision."""
    half = models.conv(weight=models.WEIGHT * np.float32(factor))
    half.graph.node[0].input[:] = ["x/half", "w/half"]
    half.graph.node[1].output[0] = "y/half"
    before = [models.node("Cast", [name], [f"{name}/half"], to=dtype) for name in ("x", "w")]
    after = models.node("Cast", ["y/half"], ["y"], to=onnx.TensorProto.FLOAT)
    nodes = [*before, *half.graph.node, after]
    del half.graph.node[:]
    half.graph.node.extend(nodes)
    return half


def test_bfloat16_which_onnxruntime_lacks_is_emulated(tmp_path) -> None:
    measured(tmp_path, {"fuse": 1.0})
    check_emulated(tmp_path, half_precision(onnx.TensorProto.BFLOAT16), rel=1e-2)


def test_an_overflow_of_float16_that_kernels_of_the_cpu_hide(tmp_path) -> None:
    # The weights are below 65504, and sums of 27 products are not.
    factor = 30000 / abs(models.WEIGHT).max()
    measured(tmp_path, {"fuse": factor})
    scores = evaluated(tmp_path, half_precision(onnx.TensorProto.FLOAT16, factor))
    assert list(scores.nonfinite) == ["quantize"]


def test_float4_which_onnxruntime_lacks_is_emulated(tmp_path) -> None:
    measured(tmp_path, {"fuse": 1.0})
    small = models.conv()
    small.opset_import[0].version, small.ir_version = 23, 11
    stored = np.round(2 * models.WEIGHT).clip(-1, 1)
    models.artifact(tmp_path / "fuse", models.conv(weight=stored / np.float32(2)))
    small.graph.initializer[0].CopyFrom(
        onnx.helper.make_tensor("w/stored", onnx.TensorProto.FLOAT4E2M1, stored.shape, stored.ravel())
    )
    small.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "s"))
    small.graph.node.insert(0, models.node("DequantizeLinear", ["w/stored", "s"], ["w"]))
    check_emulated(tmp_path, small, rel=1e-5)


def evaluated(tmp_path, quantized):
    folders = {"fuse": tmp_path / "fuse", "quantize": models.artifact(tmp_path / "quantize", quantized)}
    work = Work(inputs={}, task=Task(tmp_path / "task.py"), out=tmp_path, scratch=tmp_path, log=Quiet())
    return stage_scores.measure(work, folders, {}, None)


def check_emulated(tmp_path, quantized, rel) -> None:
    """The metric of the model is that of fuse."""
    expected, value = (row["value"] for row in evaluated(tmp_path, quantized).rows)
    assert expected > 0.1 and value == pytest.approx(expected, rel=rel)


def test_weights_in_float4_are_evaluated_by_the_numbers_that_they_stand_for(tmp_path) -> None:
    net = model("g (float[n, 16] x) => (float[n, 2] y) { y = MatMul (x, w) }", w=np.ones((16, 2), np.float32))
    stored = qdq.apply(as_ir(net), qdq.make_plan(as_ir(net), place(as_ir(net), Rules(format="nvfp4")), {}, "minmax"))
    folders = {}
    for stage, light in (("fuse", as_ir(net)), ("quantize", stored)):
        folders[stage] = tmp_path / stage
        folders[stage].mkdir()
        onnx_files.save(light, folders[stage])
        Signature(inputs=(Value(name="x", dtype="float32", shape=("n", 16)),), outputs=()).save(folders[stage])
    (tmp_path / "task.py").write_text(TASK.replace("(200, 3, 8, 8)", "(200, 16)").replace("axis=(1, 2, 3)", "axis=1"))
    work = Work(inputs={}, task=Task(tmp_path / "task.py"), out=tmp_path, scratch=tmp_path, log=Quiet())
    scores = stage_scores.measure(work, folders, {}, None)
    assert not scores.notes
    # 1 is a number of the type.
    assert scores.rows[0]["value"] == pytest.approx(scores.rows[1]["value"], rel=1e-4)


@pytest.mark.parametrize(
    ("task", "reason"), [("", "no eval_data()"), (TASK.replace(", np.zeros(200, np.int64)", ""), "gives no targets")]
)
def test_without_a_metric_a_note_says_why(tmp_path, task, reason) -> None:
    scores = measured(tmp_path, {"export": 1.0}, task=task)
    assert not scores.rows and reason in scores.notes[-1]


def test_nan_counts_from_the_stage_that_makes_it(tmp_path) -> None:
    scores = measured(tmp_path, {"export": 1.0, "fuse": np.nan, "quantize": np.nan})
    assert list(scores.nonfinite) == ["fuse"] and scores.nonfinite["fuse"].count == 200
    assert scores.nonfinite["fuse"].value and list(scores.losses) == ["fuse"]


def test_every_lost_metric_is_named(tmp_path) -> None:
    two = TASK.replace('{"mean": float', '{"other": float(abs(outputs).sum()), "mean": float')
    lost = measured(tmp_path, {"fuse": 1.0, "quantize": 0.5}, task=two).losses["quantize"]
    assert lost.startswith("other ") and ", mean " in lost


def test_a_metric_that_fails_leaves_the_stages_before_and_names_the_one_it_fails_on(tmp_path) -> None:
    strict = TASK.replace("    return {", "    assert np.isfinite(outputs).all(), 'no number'\n    return {")
    scores = measured(tmp_path, {"export": 1.0, "fuse": 1.0, "quantize": np.nan}, task=strict)
    assert [row["stage"] for row in scores.rows] == ["export", "fuse"] and list(scores.losses) == ["quantize"]
    assert "no number" in scores.notes[-1] and "from quantize on" in scores.notes[-1]
    broken = TASK.replace("    return {", "    raise KeyError('x')\n    return {")
    scores = measured(tmp_path, {"export": 1.0, "fuse": 0.5}, task=broken)
    assert not scores.rows and not scores.losses and "KeyError" in scores.notes[-1]


def test_eval_data_is_read_once(tmp_path) -> None:
    counting = TASK.replace("    rng =", "    open(__file__ + '.calls', 'a').write('x')\n    rng =")
    measured(tmp_path, {"export": 1.0, "fuse": np.nan}, task=counting)
    assert (tmp_path / "task.py.calls").read_text() == "x"


def test_metrics_that_one_model_alone_has_are_told(tmp_path) -> None:
    odd = TASK.replace('{"mean"', '{("big" if abs(outputs).max() > 5 else "small")')
    scores = measured(tmp_path, {"fuse": 0.001, "quantize": 100.0}, task=odd)
    assert "big for quantize, small for fuse" in scores.notes[-1] and list(scores.losses) == ["quantize"]
