"""Finding the one rewrite that spoils a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx

from layerline.graph.apply import rewrite
from layerline.graph.rewrite import Firing, Rule, Site
from layerline.graph.rules import RULES


def guilty(
    model: onnx.ModelProto,
    good: Callable[[onnx.ModelProto], bool],
    rules: Sequence[Rule] = RULES,
    *,
    denied: frozenset[Site] = frozenset(),
    fold_limit: int = 1 << 20,
) -> Firing | None:
    """The firing after which the model is no longer good; None when it still is after all of them.

    Rewriting is deterministic, so the model after the first k firings is well defined for every k. The search assumes
    that a spoilt model stays spoilt.

    Args:
        good: judges a rewritten model against the unfused one, as `pipe debug fuse` does with the probe feeds.
    """
    firings = rewrite(model, rules, denied=denied, fold_limit=fold_limit).firings
    low, high = 0, len(firings)
    if good(rewrite(model, rules, denied=denied, limit=high, fold_limit=fold_limit).model):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if good(rewrite(model, rules, denied=denied, limit=middle, fold_limit=fold_limit).model):
            low = middle
        else:
            high = middle
    return firings[high - 1]
