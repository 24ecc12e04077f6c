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
from layerline.compare import noise_floor
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
        nodes = [node for node in traced.program.graph.nodes if node.target in TARGETS]
        self.steps: dict[fx.Node, str] = {node: values[node.name] for node in nodes if node.name in values}
        self.flips: dict[str, int] = {}
        self._outputs = {traced.nodes[o.name]: o.name for o in traced.model.graph.output if o.name in traced.nodes}
        self._onnx_values: Sequence[Mapping[str, Array]] = ()
        # The program's outputs behind the settled steps, and how far these moved them, by feed and output.
        self._settled: dict[tuple[int, str], Tensor] = {}
        self._shift: dict[tuple[int, str], Array] = {}
        self._changed: set[int] = set()

    def begin(self, onnx_values: Sequence[Mapping[str, Array]]) -> None:
        """Takes the ONNX's values for each feed."""
        self._onnx_values = onnx_values

    @torch.no_grad()
    def settle(self, node: fx.Node, feed: int, single: dict[fx.Node, Any], double: dict[fx.Node, Any]) -> None:
        """Gives elements next to a tie the step that the ONNX took."""
        value = self.steps.get(node)
        if value is None or value not in self._onnx_values[feed]:
            return
        source, scale = node.args[:2]
        assert isinstance(source, fx.Node)
        exact = double[source].double()
        onnx = tensor(self._onnx_values[feed][value]).double()
        if onnx.shape != exact.shape or not exact.numel():
            return
        step = scale if isinstance(scale, float) else single[scale].double()  # type: ignore[index]
        if node.target is PER_CHANNEL and isinstance(step, Tensor):
            shape = [1] * exact.ndim
            shape[int(node.args[3])] = -1  # type: ignore[arg-type]
            step = step.reshape(shape)
        # What is rounded may be off by as much as any value: a multiple of torch's own float32 error.
        noise = float((single[source].double() - exact).abs().nan_to_num(0.0).amax())
        greatest = float(exact.abs().nan_to_num(0.0, 0.0, 0.0).amax())
        off = noise_floor.MULTIPLE * max(noise, noise_floor.LEAST * greatest)
        loose = torch.round((exact - off) / step) != torch.round((exact + off) / step)
        for table in (single, double):
            torch_values = table[node].double()
            # Half a per cent of a step is far more than the product of step and scale rounds by.
            differs = loose & (onnx != torch_values) & ((onnx - torch_values).abs() <= 1.005 * step)
            if not differs.any():
                continue
            table[node] = torch.where(differs, onnx, torch_values).to(table[node].dtype)
            if table is single:
                self._changed.add(feed)
                self.flips[value] = self.flips.get(value, 0) + int(differs.sum())

    def keep(self, node: str, twins: Sequence[Twins]) -> None:
        """Notes the program's outputs as they come out behind the settled steps."""
        if self.steps and node in self._outputs:
            for twin in twins:
                self._settled[twin.feed, self._outputs[node]] = twin.single

    @torch.no_grad()
    def end(self, feeds: Sequence[Feed]) -> None:
        """Runs the program once more without settling, for the feeds on which that changed something."""
        changed = sorted(self._changed)
        if not changed:
            return
        for node, twins in Twin(self._program).values([feeds[index] for index in changed]):
            value = self._outputs.get(node, "")
            for twin in twins:
                settled = self._settled.get((changed[twin.feed], value))
                if settled is not None:
                    self._shift[changed[twin.feed], value] = array(settled.double() - twin.single.double())

    def moved(self, value: str, reference: Array, feed: int) -> Array:
        """An output of the module, moved by as much as the steps that the ONNX took move the program's."""
        shift = self._shift.get((feed, value))
        if shift is None or shift.shape != reference.shape:
            return reference
        return (reference + shift).astype(reference.dtype)
