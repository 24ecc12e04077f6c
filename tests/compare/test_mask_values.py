"""Masks are expected where the graph writes them; whatever is expected wrongly, the figures stay the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from layerline.compare import compare_models as module
from layerline.compare.compare_models import compare
from layerline.compare.pair_metrics import extremes
from tests.graph.fusing import normal, parse

MASKED = """low = Constant <value = float {-3.4028235e38}> ()
  zero = Constant <value = float {0.0}> ()
  m = Where (keep, zero, low)
  s = Add (x, m)
  p = Softmax <axis = -1> (s)
  y = Add (p, x)"""
SIGNATURE = "(float[n, 6] x, bool[n, 6] keep) => (float[n, 6] y)"


def test_from_where_a_mask_is_made_to_where_it_is_read() -> None:
    assert extremes(parse(SIGNATURE, MASKED).graph) == {"low", "m", "s"}


@pytest.mark.parametrize(("value", "great"), [(math.inf, True), (math.nan, True), (-1e20, True), (1e4, False)])
def test_what_is_great(value: float, great: bool) -> None:
    model = parse("(float[n, 6] x) => (float[n, 6] y)", "z = Mul (x, c) y = Relu (z)", c=np.array([value], "f"))
    assert extremes(model.graph) == ({"c", "z"} if great else set())


@pytest.mark.parametrize("expected", [True, False])
def test_the_figures_do_not_depend_on_what_was_expected(expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = {"x": normal(4, 6), "keep": normal(4, 6, seed=1) > 0}
    model = parse(SIGNATURE, MASKED)
    moved = parse(SIGNATURE, MASKED.replace("Softmax <axis = -1> (s)", "Softmax <axis = -1> (x)"))
    plain = compare(model, moved, [feed])
    monkeypatch.setattr(module, "extremes", lambda _: {"y", "p", "s", "m"} if expected else set())
    for row, other in zip(plain, compare(model, moved, [feed]), strict=True):
        assert (row.name, row.rel_l2, row.max_abs) == pytest.approx((other.name, other.rel_l2, other.max_abs))


def test_a_model_that_masks_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(module, "joint", lambda *a, real=module.joint, **k: opened.append(1) or real(*a, **k))
    feed = {"x": normal(4, 6), "keep": normal(4, 6, seed=1) > 0}
    rows = compare(parse(SIGNATURE, MASKED), parse(SIGNATURE, MASKED), [feed, feed])
    assert len(opened) == 1 and all(r.rel_l2 == 0.0 for r in rows)
