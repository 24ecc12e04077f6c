"""Repairs of a quantised model that need no training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from layerline.backends.base import Feed
from layerline.backends.light import Light
from layerline.graph.quantization import equalization, rounding
from layerline.graph.quantization.convert import Calibrated
from layerline.graph.quantization.measured_plan import Judge

Repair: TypeAlias = Literal["equalize", "smooth", "adaround"]
REPAIRS: tuple[Repair, ...] = ("equalize", "smooth", "adaround")
"""In the order in which they are tried: scaled channels have other ranges, and ranges come before rounding."""
SAME_DB = 100.0
"""The float model's outputs must keep this much where its channels are scaled: float32 has some 140 dB."""


@dataclass(frozen=True)
class Workshop:
    """Makes repairs.

    Attributes:
        calibrate: calibrates a float model anew.
        samples: gives calibration samples, at each call from the first on.
    """

    calibrate: Callable[[Light], Calibrated]
    samples: Callable[[], Iterable[Feed]]

    def repaired(self, name: Repair, calibrated: Calibrated) -> tuple[Calibrated, str]:
        """With one repair more, and what that changed, in words; empty where there is nothing to change."""
        repairs = (*calibrated.repairs, name)
        if name == "adaround":
            rounded = rounding.rounded(calibrated.model, calibrated.plan, self.samples)
            plan = rounding.with_scales(calibrated.plan, rounded.entries)
            changed = f"{len(rounded.arrays)} weights" if rounded.arrays else ""
            return dataclasses.replace(calibrated, plan=plan, rounded=rounded, repairs=repairs), changed
        equalized = equalization.equalize(calibrated.model, calibrated.plan, calibrated.feeds, norms=name == "smooth")
        if not equalized.groups:
            return calibrated, ""
        same_db = Judge(calibrated.model, calibrated.feeds).least_db(equalized.model)
        if same_db is not None and same_db < SAME_DB:
            return calibrated, ""
        again = self.calibrate(equalized.model)
        scaled = calibrated.scaled | equalized.scaled
        return dataclasses.replace(again, scaled=scaled, repairs=repairs), f"{equalized.groups} groups"


def in_order(names: Sequence[str]) -> list[Repair]:
    """These repairs, in the order in which they are tried."""
    return [name for name in REPAIRS if name in names]
