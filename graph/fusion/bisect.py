"""Finding the one rewrite that spoils a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layerline.backends.light import Model
from layerline.graph.fusion.apply_rules import Rewritten, rewrite
from layerline.graph.fusion.firing import Firing, Site
from layerline.graph.fusion.rule import Rule
from layerline.graph.fusion.rules import RULES


def guilty(
    model: Model,
    good: Callable[[Rewritten], bool],
    rules: Sequence[Rule] = RULES,
    *,
    denied: frozenset[Site] = frozenset(),
    fold_limit: int = 1 << 20,
) -> Firing | None:
    """The firing after which the model is no longer good; None when it still is after all of them.

    Rewriting is deterministic, so the model after the first k firings is well defined for every k. The search assumes
    that a spoilt model stays spoilt, and takes the model before the first firing for good.

    Args:
        good: judges a rewritten model against the unfused one, as `pipe debug fuse` does with the probe feeds.
    """

    def after(count: int | None) -> Rewritten:
        return rewrite(model, rules, denied=denied, limit=count, fold_limit=fold_limit)

    whole = after(None)
    if good(whole):
        return None
    # Then the model is spoilt by its own, and no rewrite is to blame.
    if not whole.firings:
        return None
    # Good after `low` firings, no longer good after `high`.
    low = 0
    high = len(whole.firings)
    while high - low > 1:
        middle = (low + high) // 2
        if good(after(middle)):
            low = middle
        else:
            high = middle
    return whole.firings[high - 1]
