"""Fake quantisation: the numbers of QuantizeLinear and DequantizeLinear, and LSQ's gradients worked out by hand."""

import math

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import parser

from layerline.calib import assign
from layerline.calib.plan import QuantValue, Wanted
from layerline.qat.fake_quant import FakeQuant

PAIR = """<ir_version: 10, opset_import: ["" : 20]>
g (float[n] x, float s) => (float[n] y) {
  z = Constant <value = int8 {0}> ()
  q = QuantizeLinear (x, s, z)
  y = DequantizeLinear (q, s, z)
}"""


def value(scales, *, role="activation", axis=None):
    return QuantValue(
        name="x", role=role, axis=axis, readers=(("y", 0),), why="", scales=scales, amax=1.0, seen=(0.0, 1.0),
        calibrator="minmax",
    )  # fmt: skip


@pytest.mark.parametrize("scale", [0.1, 0.3, 1 / 127, 0.0123])
def test_an_activation_gets_the_bits_of_onnxruntime_half_way_between_steps_too(scale):
    scale = float(np.float32(scale))
    ties = (np.arange(-140, 140, dtype=np.float32) + np.float32(0.5)) * np.float32(scale)
    x = np.concatenate([ties, np.random.default_rng(0).normal(0, 60 * scale, 5000).astype(np.float32)])
    session = ort.InferenceSession(parser.parse_model(PAIR).SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x, "s": np.array(scale, np.float32)})
    fake = FakeQuant(value((scale,)), 0, learned=True)
    assert np.array_equal(fake(torch.from_numpy(x)).detach().numpy(), expected)


def test_gradients_pass_inside_the_range_and_reach_the_scale_as_lsq_says():
    fake = FakeQuant(value((0.5,)), 0, learned=True)
    x = torch.tensor([0.6, -0.2, 100.0, -100.0], requires_grad=True)  # 1.2, -0.4, 200 and -200 steps
    fake(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0, 0.0]
    # Inside round(v) - v, outside the last step; LSQ's factor is 1 / sqrt(elements * 127). d scale / d log scale = 0.5.
    by_scale = ((1 - 1.2) + (0 + 0.4) + 127 - 128) / math.sqrt(4 * 127)
    assert fake.log_scale.grad.item() == pytest.approx(0.5 * by_scale, rel=1e-5)


def test_channels_have_scales_and_gradients_of_their_own():
    fake = FakeQuant(value((0.5, 2.0), role="weight", axis=1), 2, learned=True)
    x = torch.tensor([[0.6, 2.2], [80.0, -3.2]])  # 1.2, 1.1, 160 and -1.6 steps
    assert fake(x).tolist() == [[0.5, 2.0], [63.5, -4.0]]
    fake(x).sum().backward()
    factor = 1 / math.sqrt(2 * 127)
    expected = [0.5 * factor * (-0.2 + 127), 2 * factor * (-0.1 - 0.4)]
    assert fake.log_scale.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_frozen_scales_get_no_gradient():
    fake = FakeQuant(value((0.5,)), 0, learned=True)
    fake.frozen = True
    x = torch.tensor([0.6], requires_grad=True)
    fake(x).sum().backward()
    assert fake.log_scale.grad is None and x.grad.tolist() == [1.0]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_scales_that_are_not_learned_follow_the_weight_as_a_plan_from_calibration_has_them(axis):
    weight = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    weight[:, 2], weight[1] = 0.0, 0.0  # channels of zeros
    wanted = Wanted(name="w", role="weight", axis=axis, readers=(("y", 1),), why="")
    expected = assign.weight(wanted, weight)
    fake = FakeQuant(value((7.0,), role="weight", axis=axis), 2 if axis is not None else 0, learned=False)
    scales = fake.scale(torch.from_numpy(weight))
    assert scales.reshape(-1).tolist() == list(np.array(expected.scales, np.float32))


def test_the_scale_stays_positive_however_far_it_is_trained():
    fake = FakeQuant(value((0.5,)), 0, learned=True)
    with torch.no_grad():
        fake.log_scale.fill_(-200.0)
    assert float(fake.scale(torch.zeros(1)).detach()) == 2.0**-24
