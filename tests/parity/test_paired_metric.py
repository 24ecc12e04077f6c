"""The interval of a loss: each method on numbers worked out by hand."""

import math

import numpy as np
import pytest

from layerline.parity.paired_metric import intervals

RNG = np.random.default_rng(0)


def measured(metric, before, after, targets):
    totals = ({"m": metric(before, targets)}, {"m": metric(after, targets)})
    found, why = intervals(lambda o, t: {"m": metric(o, t)}, before, after, targets, totals)
    return found.get("m"), why


def mean_right(outputs, targets):
    return float((outputs == targets).mean())


def test_shares_take_mcnemars_test():
    targets = np.zeros(100)
    before, after = targets.copy(), targets.copy()
    after[:5] = 1  # five become wrong
    before[50] = 1  # one becomes right
    got, why = measured(mean_right, before, after, targets)
    assert why == "" and got.method == "McNemar" and got.single
    assert got.p_value == pytest.approx(2 * (1 + 6) / 64)
    # (5 + 1) / 102 and (1 + 1) / 102: 0.0392 +- 1.96 sqrt((0.0784 - 0.0392^2) / 102)
    assert (got.low, got.high) == pytest.approx((-0.01460, 0.09303), abs=1e-4)


def test_equal_answers_still_have_a_width():
    got, _ = measured(mean_right, np.zeros(98), np.zeros(98), np.zeros(98))
    assert got.p_value == 1.0 and (got.low, got.high) == pytest.approx((-0.0277, 0.0277), abs=1e-4)


@pytest.mark.parametrize("samples", [400, 5000])
def test_means_take_the_paired_bootstrap(samples):
    targets = np.zeros(samples)
    before = RNG.standard_normal(samples) * 100
    after = before - 2 - RNG.standard_normal(samples)
    got, _ = measured(lambda o, t: float((o - t).mean()), before, after, targets)
    width = 2 * 1.96 / math.sqrt(samples)  # of the difference alone: what both sides share is no noise
    assert got.method == "bootstrap" and got.low < (before - after).mean() < got.high
    assert got.high - got.low == pytest.approx(width, rel=0.15)


def test_other_metrics_take_the_jackknife():
    targets = np.zeros(2000)
    before = RNG.standard_normal(2000)
    after = before + 0.1 * RNG.standard_normal(2000)
    got, _ = measured(lambda o, t: float(np.exp((o - t).mean())), before, after, targets)
    # exp is nearly 1 + x here: the standard error is that of the mean of the differences.
    assert got.method == "jackknife"
    assert got.high - got.low == pytest.approx(2 * 2.093 * 0.1 / math.sqrt(2000), rel=0.35)


@pytest.mark.parametrize(
    ("metric", "outputs", "why"),
    [
        (mean_right, np.zeros((30, 2))[:29], "one row a sample"),
        (lambda o, t: float(RNG.random()), np.zeros(30), "other numbers each time"),
        (lambda o, t: float(np.median(o)), np.arange(7.0) ** 2, "too few"),
    ],
)
def test_where_there_is_none_a_sentence_says_why(metric, outputs, why):
    targets = np.zeros(len(outputs) if len(outputs) < 29 else 30)
    totals = ({"m": 0.5}, {"m": 0.5}) if why != "too few" else ({"m": 9.0}, {"m": 9.0})
    found, reason = intervals(lambda o, t: {"m": metric(o, t)}, outputs, outputs, targets, totals)
    assert not found and why in reason
