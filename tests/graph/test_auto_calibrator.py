"""Calibrator `auto` on a classifier with a saturated Softmax and rare large inputs."""

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import parser

import layerline
from layerline.calib.range_candidates import CALIBRATORS

CLASSIFIER = """<ir_version: 10, opset_import: ["" : 20]>
m (float[n, 8] x) => (float[n, 2] y, float[n, 2] s)
<float[8, 16] w0, float[16, 16] w1, float[16, 2] w2>
{ a = MatMul(x, w0) b = Relu(a) c = MatMul(b, w1) d = Relu(c) s = MatMul(d, w2) y = Softmax(s) }"""


def _classifier(rng: np.random.Generator) -> onnx.ModelProto:
    model = parser.parse_model(CLASSIFIER)
    del model.graph.initializer[:]
    for name, shape, size in (("w0", (8, 16), 1.0), ("w1", (16, 16), 0.25), ("w2", (16, 2), 0.75)):
        weight = (rng.standard_normal(shape) * size).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def _scores(model: onnx.ModelProto, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    scores: npt.NDArray[np.float32] = ort.InferenceSession(model.SerializeToString()).run(["s"], {"x": x})[0]
    return scores


def test_auto_does_not_take_the_calibrator_that_clips_the_scores_most() -> None:
    rng = np.random.default_rng(4)
    model = _classifier(rng)
    x = rng.standard_t(2, (400, 8)).astype(np.float32)
    fresh = x[32:]
    exact = _scores(model, fresh)
    sqnr: dict[str, float] = {}
    model_without_scores = onnx.ModelProto()
    model_without_scores.CopyFrom(model)
    del model_without_scores.graph.output[1]
    for calibrator in ("auto", *CALIBRATORS):
        quantized = layerline.quantize(model_without_scores, [{"x": x[:32]}], calibrator=calibrator).model
        quantized.graph.output.append(model.graph.output[1])
        error = np.square(exact - _scores(quantized, fresh)).sum()
        sqnr[calibrator] = 10 * np.log10(np.square(exact).sum() / error)
    singles = [sqnr[name] for name in CALIBRATORS]
    assert max(singles) - min(singles) > 3
    assert sqnr["auto"] > max(singles) - 0.5
