"""Judges each value of the ONNX: its error over all probes against torch's own float32 error."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layerline.backends.base import Array, Feed
from layerline.compare import noise_floor, threshold_flips
from layerline.compare.arrays import array
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointers, resolved
from layerline.export import program_queries
from layerline.export.torch_export import Traced
from layerline.graph.analysis.ir_queries import names
from layerline.graph.io import module_identity
from layerline.parity.float64_reference import Rounded, Twin
from layerline.parity.long_sums import long_sums
from layerline.pipeline.report import LayerDiff, Scalar


@dataclass(frozen=True, kw_only=True)
class Within:
    """The rule of numpy.allclose: |a - b| <= atol + rtol |a| for each element, where a is torch's float32 value."""

    rtol: float
    atol: float

    def used(self, a: Array, b: Array) -> float:
        """The greatest ratio of an element's error to its allowance; above 1 the rule is broken."""
        finite = np.isfinite(a) & np.isfinite(b)
        x = a[finite].astype(np.float64)
        y = b[finite].astype(np.float64)
        error = np.abs(x - y)
        allowed = self.atol + self.rtol * np.abs(x)
        # With atol 0, the allowance of a zero is 0, and any error there is an infinite share of it.
        with np.errstate(divide="ignore"):
            shares = np.divide(error, allowed, out=np.zeros_like(error), where=error > 0)
        return float(shares.max(initial=0.0))


class Tally:
    """Accumulates error and noise of every value over the probes.

    Args:
        rule: what a value is judged by; None for the measured floor.

    Attributes:
        random: values that depend on a random operator, by name, with the operator; they are not judged.
    """

    def __init__(self, traced: Traced, rule: Within | None) -> None:
        self.traced = traced
        self.rule = rule
        self.rounded = Rounded(traced)
        self.twin = Twin(traced.program, self.rounded.settle if self.rounded.steps else None)
        drawn = program_queries.drawn(traced.program)
        self.random = {value: drawn[node] for value, node in traced.nodes.items() if node in drawn}
        self._pointers = pointers(traced.model.graph)
        self._steps = threshold_flips.steps(traced.model.graph)
        self._values_of_node: defaultdict[str, list[str]] = defaultdict(list)
        for value, node in traced.nodes.items():
            self._values_of_node[node].append(value)
        self._owners = frozenset(traced.owners.values())
        # Keyed by node, as torch sees it; the others are keyed by ONNX value.
        self._noise: defaultdict[str, Distance] = defaultdict(Distance)
        self._error: defaultdict[str, Distance] = defaultdict(Distance)
        self._index_noise: defaultdict[str, Distance] = defaultdict(Distance)
        self._used: defaultdict[str, float] = defaultdict(float)
        self._flips: defaultdict[str, int] = defaultdict(int)

    def measure(self, feeds: Sequence[Feed], onnx_values: Sequence[dict[str, Array]]) -> None:
        """Adds feeds.

        Args:
            feeds: arrays by input name.
            onnx_values: the ONNX's values for each feed, by name; compared values are removed to free their memory.
        """
        # Data of indices and operands of steps; the others go as soon as they are compared.
        needed_later = {pointer.data for pointer in self._pointers.values()}
        for step in self._steps.by_value:
            needed_later |= self._steps.operands(step)
        self.rounded.begin(onnx_values)
        for node, twins in self.twin.values(feeds):
            self.rounded.keep(node, twins)
            if node not in self._owners:
                continue
            for twin in twins:
                # Float64 against torch's own float32: what the hardware costs, without the export.
                noise = Distance()
                for single, double in _parts(twin.single, twin.double):
                    noise = noise + diff_arrays(double, single)
                self._noise[node] = self._noise[node] + noise
                values = onnx_values[twin.feed]
                for value in self._values_of_node.get(node, ()):
                    if value not in values:
                        continue
                    self._compare(value, array(twin.single), array(twin.double), values)
                    if value not in needed_later:
                        del values[value]
        self.rounded.end(feeds)
        # Elements of fake-quantised values that took another step than in torch.
        self._flips |= self.rounded.flips

    def floors(self) -> dict[str, float]:
        """Noise floor (relative L2) of every value. A value inside a node has the node's floor."""
        # By node: what it computes, and all that is computed from it, may be off by as much.
        long = long_sums(self.traced.program)
        floors: dict[str, float] = {}
        for value, node in self.traced.owners.items():
            if node in self._noise:
                floors[value] = max(self._noise[node].rel_l2, long[node])
        for value, point in self._pointers.items():
            if value in self._index_noise:
                # An index can be off by as much as the data it points into, moved on both sides.
                floors[value] = max(self._index_noise[value].rel_l2, 2.0 * floors.get(point.data, 0.0))
        return floors

    def rows(self, types: Mapping[str, tuple[str, tuple[int | str, ...]]]) -> tuple[LayerDiff, ...]:
        """One row per measured value, in the ONNX's topological order; `types` are names and shapes by value."""
        paths = module_identity.modules(self.traced.model)
        lines = module_identity.sources(self.traced.model)
        floors = self.floors()
        rows = []
        for node in self.traced.model.graph:
            for value in names(node.outputs):
                if value not in self._error:
                    continue
                dtype, shape = types[value]
                row = LayerDiff(
                    name=value,
                    op=node.op_type,
                    module=paths.get(value, ""),
                    dtype=dtype,
                    shape=shape,
                    **self._verdict(value, dtype, floors[value], lines.get(value)),
                )
                rows.append(row)
        return tuple(rows)

    def kept_for_outputs(self, outputs: Iterable[str], onnx_values: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of the ONNX on one feed, and the values they are judged by: operands of a step, data of an index."""
        names = list(outputs)
        # What decides about a step or an index has to be there when the output is judged.
        for value in tuple(names):
            names += self._steps.operands(value)
            if value in self._pointers:
                names.append(self._pointers[value].data)
        return {name: onnx_values[name] for name in names if name in onnx_values}

    def apart(
        self, value: str, reference: Array, onnx_values: Mapping[str, Array], feed: int
    ) -> tuple[Distance, float]:
        """Distance of an ONNX value from the module's own, and the share of the rule that it uses up.

        It is measured after `measure`, which determines the noise that may move a step.

        Args:
            onnx_values: what `kept_for_outputs` kept of this feed.
            feed: index of the feed among those that `measure` got.
        """
        reference = self.rounded.moved(value, reference, feed)
        truth, onnx = resolved(self._pointers.get(value), onnx_values, (reference, onnx_values[value]))
        truth, _ = self._excuse_flips(value, truth, onnx, onnx_values)
        distance = diff_arrays(truth, onnx)
        if self.rule and not distance.mismatch:
            return distance, self.rule.used(truth, onnx)
        return distance, distance.max_abs

    def _excuse_flips(
        self, value: str, truth: Array, onnx: Array, onnx_values: Mapping[str, Array]
    ) -> tuple[Array, int]:
        """The truth with the ONNX's elements where a step may lie on either side, and how many of them differed."""
        # A wrong shape is reported as such.
        if truth.shape != onnx.shape:
            return truth, 0
        loose = self._steps.loose(value, onnx_values, self._error_bound(onnx_values))
        if loose is None or loose.shape != truth.shape:
            return truth, 0
        # Where either side of a threshold is right, the ONNX is taken at its word.
        flipped = loose & (truth != onnx)
        if not flipped.any():
            return truth, 0
        return np.where(flipped, onnx, truth), int(flipped.sum())

    def _error_bound(self, onnx_values: Mapping[str, Array]) -> Callable[[str], float]:
        """How far an element of a value may be off: as for the whole value, a multiple of torch's own error."""

        def bound(value: str) -> float:
            node = self.traced.owners.get(value, "")
            if node not in self._noise:  # an input of the model is exact
                return 0.0
            finite = onnx_values[value][np.isfinite(onnx_values[value])]
            greatest = float(np.abs(finite).max(initial=0.0))
            return noise_floor.MULTIPLE * max(self._noise[node].peak, noise_floor.LEAST * greatest)

        return bound

    def _compare(self, value: str, single: Array, double: Array, onnx_values: Mapping[str, Array]) -> None:
        """Adds the error of one ONNX value on one feed."""
        sides = (single, double, onnx_values[value])
        single, double, onnx = resolved(self._pointers.get(value), onnx_values, sides)
        if value in self._pointers:
            self._index_noise[value] = self._index_noise[value] + diff_arrays(double, single)
        truth = double
        if self.rule:
            truth = single
        truth, flips = self._excuse_flips(value, truth, onnx, onnx_values)
        if flips:
            self._flips[value] += flips
            single = np.where(truth == onnx, truth, single)
        error = diff_arrays(truth, onnx)
        if error.nonfinite_a or error.nonfinite_b:
            # Float64 does not overflow where float32 does, so float32 decides which elements are NaN or Inf.
            counts = diff_arrays(single, onnx)
            finite = np.isfinite(single) & np.isfinite(double) & np.isfinite(onnx)
            nonfinite = Distance(
                nonfinite_a=counts.nonfinite_a, nonfinite_b=counts.nonfinite_b, one_sided=counts.one_sided
            )
            error = diff_arrays(truth[finite], onnx[finite]) + nonfinite
        if self.rule and not error.mismatch:
            self._used[value] = max(self._used[value], self.rule.used(single, onnx))
        self._error[value] = self._error[value] + error

    def _verdict(self, value: str, dtype: str, floor: float, line: str | None) -> dict[str, Any]:
        """Measures, tolerance and further columns of one row."""
        extra: dict[str, Scalar] = {}
        if line:
            extra["source"] = line
        if value in self.random:
            return {"extra": extra | {"nondeterministic": self.random[value]}}
        error = self._error[value]
        extra |= error.flags
        if value in self._flips:
            extra["flips"] = self._flips[value]
        if error.mismatch:
            return error.measures() | {"tolerance": 0.0, "extra": extra}
        if self.rule:
            used = self._used.get(value, 0.0)
            # Scaled so that max_abs meets the bound exactly when every element keeps the rule.
            bound = error.max_abs / used if used > 0 else self.rule.atol
            return error.measures() | {"judged": "max_abs", "tolerance": bound, "extra": extra | {"ratio": used}}
        bound = noise_floor.tolerance(floor)
        # Integers and booleans have no rounding; indices are measured on the numbers they point at.
        if value not in self._pointers and np.dtype(dtype).kind in "iub":
            bound = noise_floor.MULTIPLE * floor
        # How many times its floor the error is: MULTIPLE where it meets the bound.
        ratio = 0.0
        if bound:
            ratio = noise_floor.MULTIPLE * error.rel_l2 / bound
        elif error.rel_l2:
            ratio = math.inf
        extra |= {"floor": floor, "ratio": ratio}
        return error.measures() | {"tolerance": bound, "extra": extra}


def _parts(single: Any, double: Any) -> list[tuple[Array, Array]]:
    """Pairs of arrays of a node's value. Of a node with several values, those of floating point."""
    if isinstance(single, torch.Tensor):
        return [(array(single), array(double))]
    pairs: list[tuple[Array, Array]] = []
    if isinstance(single, list | tuple):
        for narrow, wide in zip(single, double, strict=True):
            if isinstance(narrow, torch.Tensor) and (narrow.is_floating_point() or narrow.is_complex()):
                pairs.append((array(narrow), array(wide)))
    return pairs
