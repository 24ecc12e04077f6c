"""Scales channels of activations in the float model, so that channels that share one scale have similar ranges.

The layer that computes a channel divides it by a factor, and the weights that read the channel are multiplied by the
same factor, so the model's outputs change by rounding alone. Between two layers this is cross-layer equalisation
(M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019); behind a
normalisation it is SmoothQuant (G. Xiao et al., ICML 2023). The factors are those with the least expected noise from
rounding activations and weights together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.plan import QuantPlan, QuantValue
from layerline.calib.scales import LEVELS
from layerline.graph.analysis.ir_queries import (
    FreshNames,
    add_initializer,
    constant,
    copied,
    first_output,
    name_of,
    optional_input,
    rank,
    value_names,
)
from layerline.graph.fusion import affine_ops, channel_groups
from layerline.graph.fusion.channel_groups import Group
from layerline.graph.fusion.firing import Declined
from layerline.graph.quantization.weight_sources import drop_unread
from layerline.pipeline.report import RESCALED

Numbers = npt.NDArray[np.float64]
# Factors lie between 2^-6 and 2^6. A channel that was smaller than 1/64 of the others in calibration may just not have
# been used by these samples.
MOST = 6
# A channel that is scaled up stays below the end of the range by 1 + HEADROOM / sqrt(samples): of few samples others
# exceed the greatest number by far, and a channel that clips costs more than a fine step gains. Between 8 and 128
# samples this is a factor of 2.4 to 1.4.
HEADROOM = 4.0
# A group is changed only if the expected noise power falls below this fraction of it, which is 1 dB.
LEAST_GAIN = 0.8
# The pairs (a, b) that are tried for a group: a factor is (range of the activation's channel)^a / (range of the weights
# that read it)^b.
_EXPONENTS = ((0.25, 0.0), (0.5, 0.0), (0.75, 0.0), (1.0, 0.0), (0.5, 0.5), (0.75, 0.25), (0.25, 0.75), (0.0, 1.0))


@dataclass(frozen=True)
class Channels:
    """Of one value: the greatest |x| and the mean square of each channel, and of how many samples."""

    amax: Numbers
    power: Numbers
    samples: int


@dataclass(frozen=True)
class Equalized:
    """A model with scaled channels."""

    model: ir.Model  # computes what the original does
    scaled: frozenset[str] = frozenset()  # names of the values whose channels are scaled now
    groups: int = 0  # how many groups of values were changed


def equalize(model: ir.Model, plan: QuantPlan, feeds: Iterable[Feed], *, norms: bool) -> Equalized:
    """Scales the channels of the values that layers make and layers read.

    Args:
        plan: what is quantised; activations share one scale among their channels.
        norms: take the groups that begin at normalisations; else those between layers.
    """
    work = copied(model)
    groups = groups_of(work, norms)
    # int8 alone: float8 has fine steps near 0, so small channels lose nothing there.
    items = {value.name: value for value in plan.values if value.dtype in ("int8", "uint8")}
    tapped: list[tuple[str, int, int]] = []
    for group in groups:
        for value, (axis, _) in group.places.items():
            if value.name in items:
                tapped.append((value.name or "", axis, group.channels))
    if not tapped:
        return Equalized(model)
    channels = _measured(model, tapped, feeds)
    return with_factors(model, work, groups, lambda group: _best(_terms(group, channels, items)))


def with_factors(
    model: ir.Model, work: ir.Model, groups: Iterable[Group], factors_of: Callable[[Group], Numbers | None]
) -> Equalized:
    """The model with its groups scaled by these factors; as it is where there are none."""
    names = FreshNames(work)
    scaled: set[str] = set()
    changed = 0
    for group in groups:
        factors = factors_of(group)
        if factors is None:
            continue
        _scale(work.graph, names, group, factors)
        scaled.update(value.name or "" for value in group.places)
        changed += 1
    if not changed:
        return Equalized(model)
    return Equalized(work, frozenset(scaled), changed)


def groups_of(work: ir.Model, norms: bool | None) -> list[Group]:
    """The groups that can be scaled, none twice: those behind normalisations, those between layers, or all (None)."""
    groups: list[Group] = []
    taken: set[ir.Value] = set()
    names = value_names(work)
    for node in work.graph:
        if node.outputs[0] in taken:
            continue
        # Most nodes begin no group: that is no fault of the model.
        try:
            group = channel_groups.gather(node, scaling=True)
        except Declined:
            continue
        taken.update(group.places)
        # A repair before has scaled it.
        if any(f"{value.name}{RESCALED}" in names for value in group.places):
            continue
        if norms in (None, bool(group.norms)) and group.consumers and not _shares_weights(group):
            groups.append(group)
    return groups


def _shares_weights(group: Group) -> bool:
    """Whether a weight of the group serves another layer too, which would need a copy of its own."""
    weights = [node.inputs[1] for node in (*group.producers, *group.consumers)]
    return any(weight is not None and len(weight.uses()) > 1 for weight in weights)


def _measured(model: ir.Model, tapped: Sequence[tuple[str, int, int]], feeds: Iterable[Feed]) -> dict[str, Channels]:
    """The channels of values; each comes with its axis and their number."""
    session = OnnxRuntime(few_runs=True).open(model, [name for name, _, _ in tapped])
    amax = {name: np.zeros(count) for name, _, count in tapped}
    squares = {name: np.zeros(count) for name, _, count in tapped}
    elements = dict.fromkeys(amax, 0)
    samples = 0
    for feed in feeds:
        values = session.run(feed)
        samples += max((len(array) for array in feed.values() if array.ndim), default=1)
        for name, axis, count in tapped:
            rows = np.moveaxis(values[name], axis, 0).reshape(count, -1).astype(np.float64)
            rows = rows[:, np.isfinite(rows).all(axis=0)]
            amax[name] = np.maximum(amax[name], np.abs(rows).max(axis=1, initial=0.0))
            squares[name] += np.square(rows).sum(axis=1)
            elements[name] += rows.shape[1]
    return {name: Channels(amax[name], squares[name] / max(elements[name], 1), samples) for name in amax}


@dataclass(frozen=True)
class _Term:
    """One reader of one quantised value: how much noise reaches its output, relative to its signal."""

    channels: Channels  # of the value
    greatest: Numbers  # max |w| by output and channel; empty where the reader has no quantised weight.
    squares: Numbers  # sum of w² by channel, over all outputs
    taps: int  # weights for each output and channel
    per_channel: bool  # whether each output's weights have their own scale

    def noise(self, factors: Numbers) -> float:
        """The noise of rounding activations and weights once the channels are divided by these factors."""
        # All channels of an activation share the greatest range; the noise of each is multiplied with its weights.
        activations = np.square((self.channels.amax / factors).max()) * (np.square(factors) * self.squares).sum()
        weights = 0.0
        if self.greatest.size:
            ranges = np.square(self.greatest * factors).max(axis=1)
            if not self.per_channel:
                ranges = np.full_like(ranges, ranges.max(initial=0.0))
            # An output's weights are rounded in steps of its own range. Weights of 0 stay exact and add no noise.
            received = (self.greatest > 0) @ (self.channels.power / np.square(factors))
            weights = self.taps * float((ranges * received).sum())
        signal = float((self.channels.power * self.squares).sum())
        if signal <= 0:
            return 0.0
        # Rounding to steps of size s adds noise of power s² / 12, and a step is the range / LEVELS.
        return float(activations + weights) / (12 * LEVELS**2 * signal)


def _terms(group: Group, channels: Mapping[str, Channels], items: Mapping[str, QuantValue]) -> list[_Term]:
    terms: list[_Term] = []
    for value in group.places:
        measured = channels.get(value.name or "")
        if measured is None or not np.isfinite(measured.power).all():
            continue
        for use in value.uses():
            # Beside the layer that reads it quantised, a sum may read the float value.
            if (first_output(use.node), use.idx) not in items[value.name or ""].readers:
                continue
            if use.node not in group.consumers:
                # A sum or a pool passes each channel on as it is.
                terms.append(_Term(measured, np.zeros((0, group.channels)), np.ones(group.channels), 1, True))
                continue
            weight = items.get(name_of(use.node.inputs[1]) or "")
            if weight is not None:
                terms.append(_Term(measured, *_weights(use.node, group.channels), weight.axis is not None))
    return terms


def _weights(node: ir.Node, channels: int) -> tuple[Numbers, Numbers, int]:
    """Of the weights of a layer: max |w| by output and input channel, sum of w² by input channel, and taps."""
    array = constant(node.inputs[1])
    assert array is not None
    rows = affine_ops.rows(node, array).astype(np.float64)
    # Gemm and MatMul have no groups. Behind a Flatten the pixels of a channel are its taps.
    groups = node.attributes.get_int("group", 1)
    weight = rows.reshape(groups, len(rows) // groups, channels // groups, -1)
    _, outputs, inputs, taps = weight.shape
    largest = np.abs(weight).max(axis=3)
    greatest = np.zeros((groups, outputs, groups, inputs))
    for index in range(groups):
        greatest[index, :, index] = largest[index]
    return greatest.reshape(groups * outputs, channels), np.square(weight).sum(axis=(1, 3)).reshape(-1), taps


def _best(terms: Sequence[_Term]) -> Numbers | None:
    """The factors with the least noise over all readers; None where none is clearly better than 1."""
    if not terms:
        return None
    # Factors of 1 are the model as it is.
    plain = sum(term.noise(np.ones_like(term.squares)) for term in terms)
    activation = np.max([_relative(term.channels.amax) for term in terms], axis=0)
    # 1e-30 keeps outputs whose weights are all 0 from dividing by 0.
    weight_ranges = [term.greatest / (term.greatest.max(axis=1, keepdims=True) + 1e-30) for term in terms]
    weight = np.max([_relative(table.max(axis=0, initial=0.0)) for table in weight_ranges], axis=0)
    best, least = None, LEAST_GAIN * plain
    for a, b in _EXPONENTS:
        exponents = a * np.log2(activation) - b * np.log2(weight)
        # Only ratios matter: most factors stay near 1.
        exponents -= np.median(exponents)
        factors = np.exp2(np.clip(exponents, -MOST, MOST))
        for term in terms:
            factors *= _excess(term.channels, factors)
        noise = sum(term.noise(factors) for term in terms)
        if noise < least:
            best, least = factors, noise
    return best


def _excess(channels: Channels, factors: Numbers) -> Numbers:
    """By how much each channel exceeds its headroom if it is divided by its factor; 1 for those that do not."""
    before = channels.amax / max(channels.amax.max(initial=0.0), 1e-30)
    after = channels.amax / factors
    after /= max(after.max(initial=0.0), 1e-30)
    headroom = 1 + HEADROOM / np.sqrt(max(channels.samples, 1))
    excess: Numbers = np.maximum(after / np.maximum(before, 1 / headroom), 1.0)
    return excess


def _relative(ranges: Numbers) -> Numbers:
    """Ranges over the greatest of them, at least 2^-MOST."""
    greatest = ranges.max(initial=0.0)
    if greatest <= 0:
        return np.ones_like(ranges)
    relative: Numbers = np.maximum(ranges / greatest, 2.0**-MOST)
    return relative


def _scale(graph: ir.Graph, names: FreshNames, group: Group, factors: Numbers) -> None:
    """Divides the channels of all values of a group by their factors, where they are made, and undoes it at readers."""
    for node, linear in group.producers.items():
        _multiply(graph, names, node, 1, linear.along_outputs(1 / factors))
        _multiply(graph, names, node, 2, 1 / factors)
    # Scale and bias of a normalisation, or the constant of a product.
    for node in group.norms:
        for index, value in enumerate(node.inputs[:3]):
            stored = constant(value)
            if stored is not None:
                _multiply(graph, names, node, index, (1 / factors).reshape(stored.shape))
    # What else works channel by channel passes factors on; an added constant has to be scaled.
    for node in group.between:
        if node.op_type not in ("Add", "Sub"):
            continue
        axis, spread = group.places[node.outputs[0]]
        for index, value in enumerate(node.inputs):
            if constant(value) is not None:
                along = np.repeat(1 / factors, spread).reshape(-1, *(1,) * ((rank(node.outputs[0]) or 0) - axis - 1))
                _multiply(graph, names, node, index, along)
    for node in group.consumers:
        _multiply(graph, names, node, 1, _along_inputs(node, factors, group))


def _along_inputs(node: ir.Node, factors: Numbers, group: Group) -> Numbers:
    """Factors in a shape that multiplies the weights that read each channel."""
    data = node.inputs[0]
    weight = constant(node.inputs[1])
    assert data is not None and weight is not None
    factors = np.repeat(factors, group.places[data][1])
    if node.op_type in ("Gemm", "MatMul"):
        return factors if affine_ops.outputs_come_first(node) else factors.reshape(-1, 1)
    rows = len(weight)
    ones = (1,) * (weight.ndim - 2)
    if node.op_type == "ConvTranspose":
        return factors.reshape(-1, 1, *ones)
    groups = node.attributes.get_int("group", 1)
    by_group: Numbers = factors.reshape(groups, -1).repeat(rows // groups, axis=0)
    return by_group.reshape(rows, -1, *ones)


def _multiply(graph: ir.Graph, names: FreshNames, node: ir.Node, index: int, factors: Numbers) -> None:
    """Gives a node a stored input that is multiplied by factors."""
    old = optional_input(node, index)
    if old is None:
        return
    array = constant(old)
    assert array is not None
    product = (array * factors).astype(array.dtype)
    node.replace_input_with(index, add_initializer(graph, names.fresh(f"{old.name}{RESCALED}"), product))
    drop_unread(old)
