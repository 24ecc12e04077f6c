"""Words around numbers, the same in every message."""

from __future__ import annotations

import math


def quantity(number: int, one: str, many: str = "") -> str:
    """`1 node`, `2 nodes`; with a verb `1 node is`, `2 nodes are`.

    Args:
        many: what follows any other number than 1; default: `one` with an s.
    """
    if number == 1:
        return f"1 {one}"
    return f"{number} {many or one + 's'}"


def in_db(value: float | None) -> str:
    """An SQNR with its unit: `31.4 dB`. Without error there is no figure, nor where nothing of the signal is left."""
    if value is None:
        return "no figure"
    if value == math.inf:
        return "no error"
    if value == -math.inf or math.isnan(value):
        return "no signal left"
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:.1f} dB"
