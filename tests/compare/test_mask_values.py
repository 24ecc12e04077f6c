"""Values that hold a mask: however they are handed over to numpy, the figures stay the same."""

from __future__ import annotations

import pytest

from layerline.compare import comparison as module
from layerline.compare.compare_models import compare
from tests.graph.fusing import normal, parse

MASKED = """low = Constant <value = float {-3.4028235e38}> ()
  zero = Constant <value = float {0.0}> ()
  m = Where (keep, zero, low)
  s = Add (x, m)
  p = Softmax <axis = -1> (s)
  y = Add (p, x)"""
SIGNATURE = "(float[n, 6] x, bool[n, 6] keep) => (float[n, 6] y)"


@pytest.mark.parametrize("isolated", [False, True])
def test_masked_values_are_handed_over_in_as_many_runs_as_memory_takes(
    monkeypatch: pytest.MonkeyPatch, isolated: bool
) -> None:
    opened = []
    monkeypatch.setattr(module, "joint", lambda *a, real=module.joint, **k: opened.append(k) or real(*a, **k))
    feed = {"x": normal(40, 6), "keep": normal(40, 6, seed=1) > 0}
    models = [parse(SIGNATURE, text) for text in (MASKED, MASKED.replace("Add (p, x)", "Add (p, p)"))]
    plain = compare(*models, [feed, feed], isolated=isolated)
    assert [sorted(k["measured"]) for k in opened] == [[0, 1, 2, 3], [0, 1, 2, 3]], "masks are found in the first run"
    assert plain[0].extra["masked"] == plain[1].extra["masked"] == 2 * int((~feed["keep"]).sum())
    opened.clear()
    monkeypatch.setattr(module, "HANDED_OVER", 1)
    assert compare(*models, [feed, feed], isolated=isolated) == plain
    assert [sorted(k["measured"]) for k in opened] == [[0, 1, 2, 3], [2, 3], [0], [1]]
