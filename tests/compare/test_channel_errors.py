"""Errors by channel against numpy: the axis, the sums over several feeds, the share, and the weights."""

import numpy as np
import pytest

from layerline.compare.channel_errors import channel_errors
from layerline.compare.compare_models import compare
from tests.stages.test_quantize import model

RNG = np.random.default_rng(7)
FEEDS = [{"x": RNG.standard_normal((size, 3, 6, 6)).astype(np.float32)} for size in (2, 5)]
W = RNG.standard_normal((4, 3, 1, 1)).astype(np.float32)
V = RNG.standard_normal((4, 4, 1, 1)).astype(np.float32)
TEXT = """g (float[n, 3, 6, 6] x) => (float[n, 5] y)
{{ a = Conv (x, w) r = Relu (a) b = {} (r, v) s = ReduceMean <axes = [2, 3], keepdims = 0> (b) y = MatMul (s, u) }}"""


def db(a, b, axes):
    with np.errstate(divide="ignore"):
        return 10 * np.log10((a**2).sum(axes) / ((a - b) ** 2).sum(axes))


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("transposed", [False, True])
def test_channels_are_those_that_numpy_measures(opset, transposed):
    op = "ConvTranspose <group = 2>" if transposed else "Conv"
    v = V[:, :2] if transposed else V
    off = v.copy()
    off[1] *= 1.5  # an input channel of a group of ConvTranspose, an output channel of Conv
    u = RNG.standard_normal((4, 5)).astype(np.float32)
    wrong = W.copy()
    wrong[2] *= 1.1
    text = TEXT.format(op).replace("ReduceMean <axes = [2, 3], keepdims = 0> (b)", "MatMul (b, o)")
    text = text.replace("float[n, 5] y", "float[n, 4, 6, 5] y")
    one = RNG.standard_normal((6, 4)).astype(np.float32)
    nets = []
    for weight, second in ((W, v), (wrong, off)):
        net = model(text, w=weight, v=second, u=u, o=one)
        net.opset_import[0].version = opset
        nets.append(net)
    records = compare(*nets, FEEDS, isolated=True)
    rows = channel_errors(*nets, FEEDS, [record for record in records if record.name in ("r", "b", "y")])
    by_layer = {name: [row for row in rows if row["value"] == name] for name in ("r", "b", "y")}
    assert [row["value"] for row in rows] == ["r"] * 4 + ["b"] * 4 + ["y"] * 5
    assert {row["axis"] for row in by_layer["b"]} == {1} and {row["axis"] for row in by_layer["y"]} == {3}
    x = np.concatenate([feed["x"] for feed in FEEDS]).astype(np.float64)
    relu = np.maximum(np.einsum("nchw,oc->nohw", x, W[..., 0, 0]), 0)
    other = np.maximum(np.einsum("nchw,oc->nohw", x, wrong[..., 0, 0]), 0)
    first = by_layer["r"][0]
    # Relu makes no error of its own; what reaches it is in channel 2.
    assert first["own_sqnr_db"] == np.inf and first["share"] is None and first["weight_ratio"] is None
    worst = min(by_layer["r"], key=lambda row: row["sqnr_db"])
    assert worst["channel"] == 2 and worst["sqnr_db"] == pytest.approx(db(relu, other, (0, 2, 3))[2], abs=1e-3)
    assert worst["greatest"] == pytest.approx(relu[:, 2].max(), rel=1e-5) and worst["least"] == 0

    def second(weight):
        if not transposed:
            return np.einsum("nchw,oc->nohw", relu, weight[..., 0, 0])
        halves = [
            np.einsum("nchw,co->nohw", relu[:, 2 * g : 2 * g + 2], weight[2 * g : 2 * g + 2, :, 0, 0]) for g in (0, 1)
        ]
        return np.concatenate(halves, 1)

    exact, own = second(v), second(off)
    error = ((exact - own) ** 2).sum((0, 2, 3))
    changed = [0, 1] if transposed else [1]
    assert sorted(row["channel"] for row in by_layer["b"][: len(changed)]) == changed
    for row in by_layer["b"]:
        channel = row["channel"]
        if channel in changed:
            assert row["own_sqnr_db"] == pytest.approx(db(exact, own, (0, 2, 3))[channel], abs=1e-3)
            assert row["max_abs"] == pytest.approx(np.abs(exact - own)[:, channel].max(), rel=1e-4)
        assert row["share"] == pytest.approx(error[channel] / error.sum(), rel=1e-4)
    greatest = np.abs(V[..., 0, 0]).max(1)
    if transposed:
        greatest = np.abs(v[..., 0, 0]).reshape(2, 2, 2).max(1).ravel()
    ratios = {row["channel"]: row["weight_ratio"] for row in by_layer["b"]}
    assert [ratios[channel] for channel in range(4)] == pytest.approx(greatest / np.median(greatest), rel=1e-5)


def test_few_channels_and_what_has_none():
    text = """g (float[n, 8] x) => (float[n, 8] y, int64[n] k)
    { y = MatMul (x, w) k = ArgMax <axis = 1, keepdims = 0> (y) }"""
    diagonal = np.eye(8, dtype=np.float32)
    a, b = model(text, w=diagonal), model(text, w=diagonal * np.arange(8, dtype=np.float32))
    feeds = [{"x": RNG.standard_normal((4, 8)).astype(np.float32)}]
    records = compare(a, b, feeds, isolated=True)
    rows = channel_errors(a, b, feeds, records, most=2)
    # A factor of 7 instead of 1 is an error of six times the channel.
    assert [(row["value"], row["channel"], row["channels"]) for row in rows] == [("y", 7, 8), ("y", 6, 8)]
    assert rows[0]["own_sqnr_db"] == pytest.approx(-20 * np.log10(6), abs=1e-3) == rows[0]["sqnr_db"]
    b.opset_import[0].version += 1
    assert channel_errors(a, b, feeds, records) == []
