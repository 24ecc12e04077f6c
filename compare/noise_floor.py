"""The noise floor of every value: torch's own float32 error, and the tolerance that follows from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "floor.json"
# A value passes when its error against float64 is within this many times torch's own float32 error.
MULTIPLE = 8.0
# No float32 floor is taken to be lower than this relative L2 error (four rounding steps): a value that torch happens to
# compute exactly must not fail on the last bit.
LEAST = 4 * 2.0**-23


def tolerance(floor: float) -> float:
    """Greatest relative L2 error against float64 that passes."""
    return MULTIPLE * max(floor, LEAST)


def save(folder: Path, floors: Mapping[str, float]) -> None:
    """Writes `floor.json`: relative L2 error of torch's float32 against float64, by value name."""
    # Six digits: the last ones differ from machine to machine.
    text = json.dumps({k: float(f"{v:.6g}") for k, v in sorted(floors.items())}, indent=0)
    (folder / FILE).write_text(text + "\n", "utf-8")


def load(folder: Path) -> dict[str, float]:
    """The floors by value name; none where the model did not come from torch."""
    path = folder / FILE
    floors: dict[str, float] = {}
    if path.is_file():
        floors = json.loads(path.read_text("utf-8"))
    return floors
