"""`pipe diff STAGE --on BACKEND`, without the command: values, the task's metric, and what can't run here."""

from __future__ import annotations

import numpy as np
import pytest

from layerline import backends
from layerline.graph.quantization import qdq
from layerline.graph.quantization.qdq_placement import Rules, place
from layerline.parity import on_backend
from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from tests.backends import models
from tests.forms import as_ir, proto
from tests.graph.test_qdq import model

TASK = """
import numpy as np

def eval_data():
    x = np.arange(5 * 3 * 64, dtype=np.float32).reshape(5, 3, 8, 8) % 7
    return x, np.zeros(5, np.int64)

def metric(outputs, targets):
    return {"sum": float(outputs.sum()), "samples": len(outputs)}
"""


class Quiet:
    def say(self, text):
        pass

    def progress(self, done, total, **fields):
        pass


def on(tmp_path, name, task=TASK, proto=None):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "task.py").write_text(task)
    folder = models.artifact(tmp_path / "in", proto or models.conv())
    work = Work(inputs={"model": folder}, task=Task(tmp_path / "task.py"), out=tmp_path, scratch=tmp_path, log=Quiet())
    return on_backend.compare("quantize", name, work)


def test_values_and_the_metric_on_both(tmp_path) -> None:
    report = on(tmp_path, "onnxruntime")
    assert [row.name for row in report.records] == ["c", "y"] and report.passed
    assert report.candidate == "onnx on onnxruntime, default session"
    assert report.metrics["samples"] == report.metrics["samples_reference"] == 5
    assert report.metrics["sum"] == pytest.approx(report.metrics["sum_reference"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("", "the task has no eval_data()"),
        (TASK.replace("return x, np.zeros(5, np.int64)", "return x"), "eval_data() gives no targets"),
        (TASK.split("def metric")[0], "the task has no metric(), and"),
    ],
)
def test_without_a_metric_a_note_says_why(tmp_path, task, reason) -> None:
    report = on(tmp_path, "onnxruntime", task)
    assert not report.metrics and f"no metric was measured: {reason}" in " ".join(report.notes)


def test_a_backend_that_is_missing_or_broken_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("layerline.backends.tensorrt.cuda.unavailable_reason", lambda: "there is no driver")
    with pytest.raises(Unavailable, match="backend tensorrt-rtx: "):
        on(tmp_path, "tensorrt-rtx")
    with pytest.raises(ConfigError, match=r"no backend is called 'onnxrt'"):
        on(tmp_path, "onnxrt")
    monkeypatch.setitem(backends.BACKENDS, "broken", "layerline_no_such_module:Backend")
    with pytest.raises(
        Unavailable, match=r"backend broken: layerline_no_such_module:Backend can't be loaded: No module"
    ):
        on(tmp_path, "broken")


def test_weights_in_float4_are_compared_with_the_numbers_that_they_stand_for(tmp_path) -> None:
    pytest.importorskip("openvino")
    net = model("g (float[n, 64] x) => (float[n, 2] y) { y = MatMul (x, w) }", w=np.ones((64, 2), np.float32))
    stored = qdq.apply(as_ir(net), qdq.make_plan(as_ir(net), place(as_ir(net), Rules(format="nvfp4")), {}, "minmax"))
    report = on(tmp_path, "openvino", "", proto(stored))
    [row] = report.records
    # 1 is a number of the type.
    assert row.name == "y" and row.sqnr_db > 100
    with pytest.raises(StageError, match="reports run its emulation"):
        on(tmp_path / "other", "onnxruntime", "", proto(stored))


def test_tensorrt_gets_a_profile_over_the_sizes_of_the_signature(tmp_path, monkeypatch) -> None:
    """On a device that is not here: opening the model shows the profile that it would be built with."""
    opened = []
    monkeypatch.setattr("layerline.backends.tensorrt.builder.TensorRT.unavailable_reason", lambda self: None)

    def refuse(self, model, taps=()):
        opened.append(self.profiles[0]["x"])
        raise Unavailable("no device")

    monkeypatch.setattr("layerline.backends.tensorrt.builder.TensorRT.open", refuse)
    with pytest.raises(Unavailable, match="no device"):
        on(tmp_path, "tensorrt-rtx")
    assert (opened[0].min, opened[0].max) == ((1, 3, 8, 8), (8, 3, 8, 8))
