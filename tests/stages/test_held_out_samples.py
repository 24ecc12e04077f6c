"""Repairs and bias correction are judged on calibration samples that they were not fitted on."""

import numpy as np
import pytest

from layerline.calib.plan import FILE, QuantPlan
from layerline.calib.samples import Samples
from layerline.export.signature import Value
from layerline.graph.io import onnx_files
from layerline.graph.quantization.calibration_data import CalibrationData
from layerline.graph.quantization.measured_plan import OutputReference, gain_text, least, least_gain
from layerline.stages.quantize import Quantize
from tests.stages.test_quantize import model, work  # noqa: F401 - a fixture

NOISE_DB = 0.3
DENSE = """g (float[n, 64] x) => (float[n, 64] y) {
  a = Gemm (x, w0, b0) r = Relu (a) c = Gemm (r, w1, b1) s = Relu (c) e = Gemm (s, w2) f = Relu (e) y = Gemm (f, w3)
}"""
DEPTHWISE = """g (float[n, 3, 12, 12] x) => (float[n, 10] y) {
  a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w0, b0) r = Relu (a)
  c = Conv <group = 16, pads = [1, 1, 1, 1]> (r, w1, b1) s = Relu (c) d = Conv (s, w2, b2) e = Relu (d)
  f = Conv <pads = [1, 1, 1, 1]> (e, w3) k = Add (f, e) h = Relu (k)
  p = GlobalAveragePool (h) q = Flatten (p) y = Gemm (q, wf)
}"""


def dense(seed):
    """Four products whose inner channels differ in size, and heavy-tailed inputs of eight degrees of freedom."""
    rng = np.random.default_rng(seed)
    spread = np.exp(1.5 * rng.standard_normal(64))
    weights = {f"w{i}": rng.standard_normal((64, 64)) / 8 for i in range(4)}
    weights["w1"] = weights["w1"] * spread
    weights["w2"] = weights["w2"] / spread[:, None]
    weights["b0"] = 0.2 * rng.standard_normal(64)
    weights["b1"] = 0.2 * spread * rng.standard_normal(64)
    basis = rng.standard_normal((8, 64))

    def draw(random, count):
        return random.standard_t(4, (count, 8)) @ basis + 0.1 * random.standard_normal((count, 64))

    return DENSE, weights, draw, rng


def depthwise(seed):
    """A residual network with a depthwise convolution whose channels differ in size."""
    rng = np.random.default_rng(seed)
    spread = np.exp(1.2 * rng.standard_normal(16))
    weights = {
        "w0": rng.standard_normal((16, 3, 3, 3)) / 5,
        "b0": 0.3 * rng.standard_normal(16),
        "w1": spread[:, None, None, None] * rng.standard_normal((16, 1, 3, 3)) / 3,
        "b1": spread * 0.3 * rng.standard_normal(16),
        "w2": rng.standard_normal((32, 16, 1, 1)) / 4 / spread[None, :, None, None],
        "b2": 0.3 * rng.standard_normal(32),
        "w3": rng.standard_normal((32, 32, 3, 3)) / 17,
        "wf": rng.standard_normal((32, 10)) / 5,
    }
    basis = rng.standard_normal((6, 3, 12, 12))

    def draw(random, count):
        images = np.einsum("nk,kchw->nchw", random.standard_normal((count, 6)), basis)
        return images + 0.2 * random.standard_normal(images.shape)

    return DEPTHWISE, weights, draw, rng


NETWORKS = {"dense": dense, "depthwise": depthwise}


def network(kind, seed, count):
    """A network, `count` samples to calibrate on, and 400 fresh ones."""
    text, weights, draw, rng = NETWORKS[kind](seed)
    net = model(text, **{name: array.astype(np.float32) for name, array in weights.items()})
    samples, fresh = draw(rng, count), draw(np.random.default_rng(1000 + seed), 400)
    return net, samples.astype(np.float32), fresh.astype(np.float32)


def decibels_of_fresh_samples(work, net, samples, fresh, **fields):  # noqa: F811
    source = "X = np.load(__file__.replace('task.py', 'x.npy'))\ndef calib_data():\n    return X\n"
    inputs = (Value(name="x", dtype="float32", shape=("n", *samples.shape[1:])),)
    made = work(source, net=net, inputs=inputs, feeds=[{"x": samples[:2]}])
    np.save(made.task.path.with_name("x.npy"), samples)
    report = Quantize(min_db=-100, **fields).run(made)
    reference = OutputReference(onnx_files.read_model(made.inputs["model"] / onnx_files.FILE), [{"x": fresh}])
    return reference.least_db(onnx_files.read_model(made.out / onnx_files.FILE)), report


def check(work, kind, seed, count):  # noqa: F811
    net, samples, fresh = network(kind, seed, count)
    plain, _ = decibels_of_fresh_samples(work, net, samples, fresh)
    for fields in ({"repairs": ["equalize"]}, {"repairs": ["adaround"]}, {"bias_correction": True}):
        repaired, report = decibels_of_fresh_samples(work, net, samples, fresh, **fields)
        assert repaired > plain - NOISE_DB, (fields, report.tables.get("repairs"))


@pytest.mark.parametrize(("kind", "seed"), [("dense", 1), ("depthwise", 2)])
def test_of_16_samples_no_repair_loses_on_fresh_ones(work, kind, seed):  # noqa: F811
    check(work, kind, seed, count=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "depthwise"])
@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.parametrize("seed", [0, 3])
def test_no_repair_loses_on_fresh_samples(work, kind, seed, count):  # noqa: F811
    check(work, kind, seed, count)


def test_fewer_than_eight_samples_are_all_calibrated_on_and_no_repair_is_tried(work):  # noqa: F811
    net, samples, fresh = network("dense", 1, 7)
    fields = {"repairs": ["equalize"], "bias_correction": True}
    _, report = decibels_of_fresh_samples(work, net, samples, fresh, **fields)
    assert [(row["outcome"], "fewer than 8" in row["measured"]) for row in report.tables["repairs"]] == [
        ("not tried", True)
    ]
    assert any("bias correction was not tried" in note for note in report.notes)
    assert any(note.startswith("calibrated on 7 samples") for note in report.notes)


def numbers(feeds):
    return [int(number) for feed in feeds for number in feed["x"][:, 0]]


def first_pass(work, monkeypatch, batches):  # noqa: F811
    """Calibration data of these batches, and the numbers of the samples that ranges are collected on."""
    data = CalibrationData(work(), (X,), hooks=("calib_data",), samples=512, batch_size=16, holds_out=True)
    replace_samples(data, monkeypatch, batches)
    return data, numbers(batch.feed for batch in data._hold_out.through(data._few()))


def replace_samples(data, monkeypatch, batches):
    monkeypatch.setattr(data, "_read", lambda *_, **__: Samples(batches, (X,), hook="calib_data"))


X = Value(name="x", dtype="float32", shape=("n", 64))
ROWS = np.repeat(np.arange(16, dtype=np.float32)[:, None], 64, axis=1)
HELD_OUT = [1, 2, 4, 7, 10, 15]
FITTING = [0, 3, 5, 6, 8, 9, 11, 12, 13, 14]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_samples_held_out_are_never_fitted(work, monkeypatch, count):  # noqa: F811
    data, read = first_pass(work, monkeypatch, [{"x": rows} for rows in np.split(ROWS, count)])
    fitting, held_out = data.parts()
    assert numbers(held_out) == HELD_OUT
    assert read == list(range(16))
    assert numbers(fitting) == numbers(data.fitting()) == FITTING
    # Another order changes nothing.
    replace_samples(data, monkeypatch, [{"x": rows} for rows in np.split(ROWS[::-1], count)])
    assert numbers(data.fitting()) == FITTING[::-1]


@pytest.mark.parametrize("period", [2, 3, 4])
def test_of_classes_that_alternate_each_is_on_both_sides(work, monkeypatch, period):  # noqa: F811
    rows = np.repeat(np.arange(64, dtype=np.float32)[:, None], 64, axis=1)
    data, _ = first_pass(work, monkeypatch, [{"x": rows}])
    for feeds in data.parts():
        counts = np.bincount(np.array(numbers(feeds)) % period, minlength=period)
        assert counts.min() >= counts.sum() / period / 2


def test_ranges_are_of_all_samples_where_some_are_held_out(work, tmp_path):  # noqa: F811
    net, samples, fresh = network("dense", 1, 16)
    samples[HELD_OUT[0], 5] = 1000.0  # in a sample that nothing is fitted on
    fields = {"calibrator": "minmax", "bias_correction": True}
    _, report = decibels_of_fresh_samples(work, net, samples, fresh, **fields)
    written = QuantPlan.from_json((tmp_path / "out" / FILE).read_text())
    assert written.value("x").scales == (pytest.approx(1000 / 127),)
    assert any("calibrated on 16 samples" in note and "on 6 of them" in note for note in report.notes)


def test_a_sample_that_comes_again_and_again_is_not_held_out(work, monkeypatch):  # noqa: F811
    data, read = first_pass(work, monkeypatch, [{"x": np.ones((16, 64), np.float32)}])
    assert read == [1] * 16 and data.parts()[1] == []


def test_a_choice_has_to_gain_on_held_out_samples_and_on_average():
    assert least_gain([20.0, 30.0], [25.0, 29.0]) == -1.0
    assert least_gain([20.0, 30.0], [19.5, 32.0]) == 0.75
    assert least_gain([20.0, 30.0], [17.0, 31.0]) == -1.0
    assert least_gain([None, 30.0], [None, 31.0]) == 1.0
    assert least_gain([float("inf")], [float("inf")]) == 0.0
    assert least([None, 3.0, 2.0]) == 2.0
    assert least([None]) is None


def test_held_out_samples_with_outputs_of_zeros_judge_nothing(work):  # noqa: F811
    text = "g (float[n, 4] x) => (float[n, 3] y) { a = Gemm (x, w0, b0) r = Relu (a) c = MatMul (r, w1) y = Relu (c) }"
    rng = np.random.default_rng(0)
    weights = {"w0": np.eye(4), "b0": np.full(4, -0.5), "w1": abs(rng.standard_normal((4, 3)))}
    net = model(text, **{name: array.astype(np.float32) for name, array in weights.items()})
    samples, fresh = (1 + abs(rng.standard_normal((count, 4), np.float32)) for count in (8, 100))
    samples[[1, 2, 4, 7]] *= -1
    plain, _ = decibels_of_fresh_samples(work, net, samples, fresh)
    fields = {"repairs": ["adaround"], "bias_correction": True}
    repaired, report = decibels_of_fresh_samples(work, net, samples, fresh, **fields)
    assert repaired == plain
    (row,) = report.tables["repairs"]
    assert row["outcome"] == "undone" and "weights rounded anew" in row["measured"]
    assert sum("hold only zeros on the held-out samples" in note for note in report.notes) == 2


def test_the_words_of_a_gain():
    assert least_gain([20.0, None], [25.0, None]) == -float("inf")
    assert gain_text("the outputs", 20.0, 25.06).startswith("25.1 dB at the outputs with it, 20.0 dB without")
    # What rounds to one figure has further digits, and equal figures are told as such.
    assert gain_text("the outputs", 16.502, 16.51).startswith("16.510 dB at the outputs with it, 16.502 dB without")
    same = "16.5 dB at the outputs with and without it, on held-out samples: no change"
    assert gain_text("the outputs", 16.5, 16.5) == same
