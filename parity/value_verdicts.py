"""What the probes show about each inner value: its error, torch's own noise there, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from layerline.backends.base import Array, Feed
from layerline.compare import long_sums, noise_floor, threshold_flips
from layerline.compare.arrays import array
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointed_at, pointers
from layerline.export import random_values
from layerline.export.torch_export import Traced
from layerline.graph.io import module_identity
from layerline.parity.float64_reference import Twin
from layerline.parity.rounded_activations import Rounded
from layerline.pipeline.report import LayerDiff, Scalar


@dataclass(frozen=True, kw_only=True)
class Within:
    """numpy's rule instead of the measured floor: |a - b| <= atol + rtol |a| for each element; a is torch's float32."""

    rtol: float
    atol: float

    def used(self, a: Array, b: Array) -> float:
        """The greatest share of its allowance that an element uses up; above 1 the rule is broken."""
        finite = np.isfinite(a) & np.isfinite(b)
        x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
        off, allowed = np.abs(x - y), self.atol + self.rtol * np.abs(x)
        with np.errstate(divide="ignore"):
            return float(np.divide(off, allowed, out=np.zeros_like(off), where=off > 0).max(initial=0.0))


@dataclass(frozen=True)
class Apart:
    """A distance, and the share of `Within` that it uses up, where that is the rule; measured when first asked for."""

    measure: Callable[[], tuple[Distance, float]]

    @property
    def distance(self) -> Distance:
        return self._measured[0]

    @property
    def used(self) -> float:
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[Distance, float]:
        return self.measure()


class Tally:
    """Sums over the probes, by value.

    Args:
        rule: what a value is judged by; None for the measured floor.

    Attributes:
        random: values drawn at random, with the operator; they are not judged.
    """

    def __init__(self, traced: Traced, rule: Within | None) -> None:
        self.traced, self.rule = traced, rule
        self.rounded = Rounded(traced)
        self.twin = Twin(traced.program, self.rounded.settle if self.rounded.steps else None)
        drawn = random_values.drawn(traced.program)
        self.random = {v: drawn[n] for v, n in traced.nodes.items() if n in drawn}
        self._pointers, self._steps = pointers(traced.model.graph), threshold_flips.steps(traced.model.graph)
        self._values: dict[str, list[str]] = {}
        for value, node in traced.nodes.items():
            self._values.setdefault(node, []).append(value)
        self._owners = frozenset(traced.owners.values())
        self._error: dict[str, Distance] = {}
        self._noise: dict[str, Distance] = {}
        self._index_noise: dict[str, Distance] = {}
        self._used: dict[str, float] = {}
        self._flips: dict[str, int] = {}

    def measure(self, feeds: Sequence[Feed], found: Sequence[dict[str, Array]]) -> None:
        """Adds feeds.

        Args:
            feeds: arrays by input name.
            found: the ONNX's values for each, by name; what has been compared is taken out.
        """
        read = {p.data for p in self._pointers.values()}.union(*map(self._steps.operands, self._steps.known))
        self.rounded.begin(found)
        for node, twins in self.twin.values(feeds):
            self.rounded.keep(node, twins)
            for t in twins if node in self._owners else ():
                noise = sum((diff_arrays(d, s) for s, d in _parts(t.single, t.double)), Distance())
                self._noise[node] = self._noise.get(node, Distance()) + noise
                for value in (v for v in self._values.get(node, ()) if v in found[t.feed]):
                    self._compare(value, array(t.single), array(t.double), found[t.feed])
                    if value not in read:
                        del found[t.feed][value]
        self.rounded.end(feeds)
        self._flips |= self.rounded.flips

    def floors(self) -> dict[str, float]:
        """Noise floor (relative L2) of every value; of one that lies inside of a node, the node's."""
        long = long_sums.allowances(self.traced.program)
        floors = {v: max(self._noise[n].rel_l2, long[n]) for v, n in self.traced.owners.items() if n in self._noise}
        for value, point in self._pointers.items():
            if value in self._index_noise:
                # An index can be off by as much as the data it points into, moved on both sides.
                floors[value] = max(self._index_noise[value].rel_l2, 2.0 * floors.get(point.data, 0.0))
        return floors

    def rows(self, types: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> tuple[LayerDiff, ...]:
        """One row per measured value, in the ONNX's topological order; `types` are names and shapes by value."""
        paths, lines, floors = (
            module_identity.modules(self.traced.model),
            module_identity.sources(self.traced.model),
            self.floors(),
        )
        return tuple(
            LayerDiff(
                name=value,
                op=node.op_type,
                module=paths.get(value, ""),
                dtype=types[value][0],
                shape=types[value][1],
                **self._verdict(value, types[value][0], floors[value], lines.get(value)),
            )
            for node in self.traced.model.graph.node
            for value in node.output
            if value in self._error
        )

    def apart(self, value: str, reference: Array, found: Mapping[str, Array], feed: int) -> Apart:
        """How far the ONNX's value is from float32 ones that were got otherwise; indices by what they point at.

        Args:
            feed: its place among those that `measure` will get.
        """
        # The noise that may move a step is known after `measure`, which takes values out of `found`.
        held = {v: found[v] for v in (value, *self._steps.operands(value)) if v in found}
        if self.rounded.steps:
            return Apart(lambda: self._apart(value, self.rounded.moved(value, reference, feed), held))
        if value in self._steps.known:
            return Apart(lambda: self._apart(value, reference, held))
        measured = self._apart(value, reference, found)
        return Apart(lambda: measured)

    def _apart(self, value: str, reference: Array, found: Mapping[str, Array]) -> tuple[Distance, float]:
        a, onnx = self._meant(value, (reference, found[value]), found)
        a = self._settled(value, a, onnx, found)[0]
        distance = diff_arrays(a, onnx)
        used = self.rule.used(a, onnx) if self.rule and not distance.mismatch else distance.max_abs
        return distance, used

    def _settled(self, value: str, truth: Array, onnx: Array, found: Mapping[str, Array]) -> tuple[Array, int]:
        """The truth with the ONNX's elements where a step may lie on either side, and how many of them differed."""
        loose = self._steps.loose(value, found, self._off(found)) if truth.shape == onnx.shape else None
        if loose is None or loose.shape != truth.shape or not (flipped := loose & (truth != onnx)).any():
            return truth, 0
        return np.where(flipped, onnx, truth), int(flipped.sum())

    def _off(self, found: Mapping[str, Array]) -> Callable[[str], float]:
        """By how much an element of a value may be off: as for the whole of it, a multiple of torch's own error."""

        def off(value: str) -> float:
            node = self.traced.owners.get(value, "")
            if node not in self._noise:  # an input of the model is what it is
                return 0.0
            greatest = float(np.abs(found[value][np.isfinite(found[value])]).max(initial=0.0))
            return noise_floor.MULTIPLE * max(self._noise[node].peak, noise_floor.LEAST * greatest)

        return off

    def _meant(self, value: str, sides: tuple[Array, ...], found: Mapping[str, Array]) -> tuple[Array, ...]:
        point = self._pointers.get(value)
        if point is None or point.data not in found or len({x.size for x in sides}) > 1:
            return sides
        return tuple(pointed_at(point, found[point.data], x) for x in sides)

    def _compare(self, value: str, single: Array, double: Array, found: Mapping[str, Array]) -> None:
        single, double, onnx = self._meant(value, (single, double, found[value]), found)
        if value in self._pointers:
            self._index_noise[value] = self._index_noise.get(value, Distance()) + diff_arrays(double, single)
        truth = single if self.rule else double
        truth, flipped = self._settled(value, truth, onnx, found)
        if flipped:
            self._flips[value] = self._flips.get(value, 0) + flipped
            single = np.where(truth == onnx, truth, single)
        error = diff_arrays(truth, onnx)
        if error.nonfinite_a or error.nonfinite_b:
            # Float64 does not overflow where float32 does: which elements are NaN or Inf is for float32 to say.
            counts, good = diff_arrays(single, onnx), np.isfinite(single) & np.isfinite(double) & np.isfinite(onnx)
            kept = {k: getattr(counts, k) for k in ("nonfinite_a", "nonfinite_b", "one_sided")}
            error = diff_arrays(truth[good], onnx[good]) + Distance(**kept)
        if self.rule and not error.mismatch:
            self._used[value] = max(self._used.get(value, 0.0), self.rule.used(single, onnx))
        self._error[value] = self._error.get(value, Distance()) + error

    def _verdict(self, value: str, dtype: str, low: float, line: str | None) -> dict[str, Any]:
        """Measures, tolerance and further columns of one row."""
        extra: dict[str, Scalar] = {"source": line} if line else {}
        if value in self.random:
            return {"extra": extra | {"nondeterministic": self.random[value]}}
        error, used = self._error[value], self._used.get(value, 0.0)
        measures, extra = error.measures(), extra | error.flags
        if value in self._flips:
            extra |= {"flips": self._flips[value]}
        if error.mismatch:
            return measures | {"tolerance": 0.0, "extra": extra}
        if self.rule:
            # Scaled so that max_abs meets it exactly where every element keeps the rule.
            bound = error.max_abs / used if used > 0 else self.rule.atol
            return measures | {"judged": "max_abs", "tolerance": bound, "extra": extra | {"ratio": used}}
        # Integers and booleans have no rounding; indices are measured on the numbers they point at.
        exact = value not in self._pointers and np.dtype(dtype).kind in "iub"
        bound = noise_floor.MULTIPLE * low if exact else noise_floor.tolerance(low)
        ratio = noise_floor.MULTIPLE * error.rel_l2 / bound if bound else math.inf if error.rel_l2 else 0.0
        return measures | {"tolerance": bound, "extra": extra | {"floor": low, "ratio": ratio}}


def _parts(single: Any, double: Any) -> list[tuple[Array, Array]]:
    """The tensors of a node's value; of one with several, those of floating point."""
    if isinstance(single, torch.Tensor):
        return [(array(single), array(double))]
    several = zip(single, double, strict=True) if isinstance(single, list | tuple) else ()
    inexact = ((s, d) for s, d in several if isinstance(s, torch.Tensor) and (s.is_floating_point() or s.is_complex()))
    return [(array(s), array(d)) for s, d in inexact]
