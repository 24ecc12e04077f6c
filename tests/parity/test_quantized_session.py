"""What a default session makes of an int8 model is judged by its distance from the float model."""

import numpy as np
import pytest
from onnx import numpy_helper

from layerline.calib.plan import QuantPlan
from layerline.graph.io import onnx_files
from layerline.graph.quantization import qdq
from layerline.graph.quantization.convert import Converted
from layerline.parity import default_session, quantized_session
from layerline.pipeline.report import Gate, Report
from tests.forms import proto
from tests.graph.test_qdq import f32
from tests.graph.test_range_choice import setup


@pytest.mark.parametrize(("wrong", "passed"), [(0.0, True), (0.2, False)])
def test_a_session_as_near_to_float_as_the_graph_as_written_is_no_failure(tmp_path, monkeypatch, wrong, passed):
    text = "g (float[8, 6] x) => (float[8, 5] y) { y = Gemm (x, w) }"
    light, placed, histograms, feed = setup(text, f32(8, 6), w=f32(6, 5))
    plan: QuantPlan = qdq.make_plan(light, placed, histograms, "minmax")
    quantized = qdq.apply(light, plan)
    saved = proto(quantized)
    for tensor in saved.graph.initializer:
        if tensor.name == "w/scale":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1 + wrong), "w/scale"))
    onnx_files.save(saved, tmp_path)
    gate = Gate(default_session.GATE, False, "feed 0: output y is off", "the same")
    monkeypatch.setattr(default_session, "check", lambda *_, **__: ([gate], []))
    converted = Converted(reference=light, model=quantized, measured=quantized, plan=plan)
    report = quantized_session.with_default_session(
        Report(stage="quantize"), converted, tmp_path / onnx_files.FILE, [feed], lambda: [feed]
    )
    assert report.passed is passed
    if passed:
        [note] = report.notes
        assert "feed 0: output y is off; over 2 feeds y has" in note
