"""Repairs of a quantised model that need no training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.graph.quantization import awq, equalization, rounding
from layerline.graph.quantization.convert import Calibrated
from layerline.graph.quantization.measured_plan import OutputReference
from layerline.graph.quantization.targets import FORMATS
from layerline.pipeline.config.quantize_fields import Repair

# In the order in which they are tried. Scaling changes the ranges of channels, and rounding needs the final ranges.
REPAIRS: tuple[Repair, ...] = get_args(Repair)
# Least SQNR of the float model's outputs after scaling. Rounding in float32 alone leaves about 140 dB; less than 100 dB
# means that a factor overflowed or that the scaled model computes something else.
SAME_DB = 100.0


@dataclass(frozen=True)
class Repairer:
    """Applies single repairs to a calibrated model."""

    calibrate: Callable[[ir.Model], Calibrated]  # calibrates a float model again, after its channels were scaled
    # an iterator over the calibration samples that are not held out; each call starts at the first one.
    samples: Callable[[], Iterable[Feed]]

    def apply(self, name: Repair, calibrated: Calibrated) -> tuple[Calibrated, str]:
        """The model with one more repair, and a few words on what changed; "" if there was nothing to change."""
        repairs = (*calibrated.repairs, name)
        if name in ("adaround", "gptq"):
            chosen = rounding.round_weights(
                calibrated.model, calibrated.plan, self.samples, calibrated.held_out, blocks=name == "gptq"
            )
            changed = f"weights rounded anew: {len(chosen.arrays)}" if chosen.arrays else ""
            rounded = calibrated.rounded.with_others(chosen)
            plan = rounding.with_scales(calibrated.plan, rounded.entries)
            return dataclasses.replace(calibrated, plan=plan, rounded=rounded, repairs=repairs), changed
        if name == "awq":
            equalized = awq.scale_inputs(calibrated.model, calibrated.plan, self.samples)
        else:
            equalized = equalization.equalize(calibrated.model, calibrated.plan, self.samples(), norms=name == "smooth")
        if not equalized.groups:
            return calibrated, ""
        worst_db = OutputReference(calibrated.model, calibrated.feeds).least_db(equalized.model)
        if worst_db is not None and worst_db < SAME_DB:
            return calibrated, ""
        recalibrated = self.calibrate(equalized.model)
        scaled = calibrated.scaled | equalized.scaled
        return dataclasses.replace(
            recalibrated, scaled=scaled, repairs=repairs
        ), f"groups of values scaled: {equalized.groups}"


def of_format(name: str) -> list[Repair]:
    """The repairs that do something for layers in a format."""
    if FORMATS[name].block:
        return ["awq", "gptq"]
    if name == "int8":
        return ["equalize", "smooth", "adaround"]
    return []


def in_order(names: Sequence[str]) -> list[Repair]:
    """These repairs, in the order in which they are tried."""
    return [name for name in REPAIRS if name in names]
