"""Fake-quantised activations: which of two steps a value takes that lies half-way between them.

torch multiplies by the inverse of the scale and ONNX divides by it, and what they round is off by rounding already. An
element that lies within that noise of a tie may take either step. Everything behind it is then computed from the step
that the ONNX took, in torch too, so that it is judged as strictly as in a model without quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from layerline.backends.base import Array, Feed
from layerline.compare import noise_floor as floor
from layerline.compare.arrays import array, tensor
from layerline.export.fake_quant import PER_CHANNEL, TARGETS
from layerline.export.torch_export import Traced
from layerline.parity.float64_reference import Twin, Twins


class Rounded:
    """The fake-quantised values of one program.

    Attributes:
        steps: fx nodes that fake-quantise, with the value of the ONNX that holds the same.
        flips: how many elements took another step than in torch, by value of the ONNX.
    """

    def __init__(self, traced: Traced) -> None:
        values = {node: value for value, node in traced.nodes.items()}
        self._program = traced.program
        nodes = [n for n in traced.program.graph.nodes if n.target in TARGETS]
        self.steps: dict[fx.Node, str] = {n: values[n.name] for n in nodes if n.name in values}
        self.flips: dict[str, int] = {}
        self._outputs = {traced.nodes[o.name]: o.name for o in traced.model.graph.output if o.name in traced.nodes}
        self._found: Sequence[Mapping[str, Array]] = ()
        self._settled: dict[tuple[int, str], Tensor] = {}
        self._shift: dict[tuple[int, str], Array] = {}
        self._changed: set[int] = set()

    def begin(self, found: Sequence[Mapping[str, Array]]) -> None:
        """Takes the ONNX's values for each feed."""
        self._found = found

    @torch.no_grad()
    def settle(self, node: fx.Node, feed: int, single: dict[fx.Node, Any], double: dict[fx.Node, Any]) -> None:
        """Gives elements next to a tie the step that the ONNX took."""
        value = self.steps.get(node)
        if value is None or value not in self._found[feed]:
            return
        source, scale = node.args[:2]
        assert isinstance(source, fx.Node)
        exact = double[source].double()
        step = scale if isinstance(scale, float) else single[scale].double()  # type: ignore[index]
        if node.target is PER_CHANNEL and isinstance(step, Tensor):
            shape = [1] * exact.ndim
            shape[int(node.args[3])] = -1  # type: ignore[arg-type]
            step = step.reshape(shape)
        onnx = tensor(self._found[feed][value]).double()
        if onnx.shape != exact.shape:
            return
        noise = float((single[source].double() - exact).abs().nan_to_num(0.0).amax()) if exact.numel() else 0.0
        greatest = float(exact.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if exact.numel() else 0.0
        off = floor.MULTIPLE * max(noise, floor.LEAST * greatest)
        loose = torch.round((exact - off) / step) != torch.round((exact + off) / step)
        for table in (single, double):
            mine = table[node].double()
            # Half a per cent of a step is far more than the product of step and scale rounds by.
            other = loose & (onnx != mine) & ((onnx - mine).abs() <= 1.005 * step)
            if not other.any():
                continue
            table[node] = torch.where(other, onnx, mine).to(table[node].dtype)
            if table is single:
                self._changed.add(feed)
                self.flips[value] = self.flips.get(value, 0) + int(other.sum())

    def keep(self, node: str, twins: Sequence[Twins]) -> None:
        """Notes the program's outputs as they come out behind the settled steps."""
        if self.steps and node in self._outputs:
            for twin in twins:
                self._settled[twin.feed, self._outputs[node]] = twin.single

    @torch.no_grad()
    def end(self, feeds: Sequence[Feed]) -> None:
        """Runs the program once more without settling, for the feeds on which that changed something."""
        places = sorted(self._changed)
        if not places:
            return
        for node, twins in Twin(self._program).values([feeds[i] for i in places]):
            if node not in self._outputs:
                continue
            value = self._outputs[node]
            for twin in twins:
                feed = places[twin.feed]
                if (feed, value) in self._settled:
                    self._shift[feed, value] = array(self._settled[feed, value].double() - twin.single.double())

    def moved(self, value: str, reference: Array, feed: int) -> Array:
        """An output of the module, moved by as much as the steps that the ONNX took move the program's."""
        shift = self._shift.get((feed, value))
        if shift is None or shift.shape != reference.shape:
            return reference
        return (reference + shift).astype(reference.dtype)
