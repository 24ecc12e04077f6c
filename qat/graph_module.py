"""An ONNX graph as a torch module: its weights are parameters, and values carry the graph's own names.

Training runs on the fused graph itself, and not on the module that was exported. The plan quantises weights and values
that only the fused graph has: convolutions with BatchNorm folded into them, merged products. torchao's annotation
works on the module's own graph, where these do not exist. Here the same values are quantised by construction, and the
trained weights go back under their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from layerline.backends.light import Light
from layerline.calib.plan import QuantPlan, QuantValue
from layerline.graph.io.ir_convert import from_ir, to_ir
from layerline.graph.quantization.qdq_placement import WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import StageError
from layerline.qat.fake_quant import FakeQuant
from layerline.qat.operators import OUTPUTS, TABLE

_NORMS = {"BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2),
          "LayerNormalization": (1, 2), "RMSNormalization": (1,)}  # fmt: skip
_PASSES = ("Identity", "Transpose", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten")
Watch = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class _Step:
    """One node: what it reads and computes, by name; after it the values in `spent` are not needed any more."""

    op: str
    operator: Callable[..., Any]
    reference: Callable[..., Any]
    attrs: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    spent: tuple[str, ...]


class GraphModule(nn.Module):
    """Runs an ONNX graph in torch.

    Trained are the float32 weights and biases of products and normalisation layers; every other constant stays. The
    zeros of a weight with two axes or more stay zeros, as pruning left them.

    Args:
        model: the float graph.
        plan: what is fake-quantised; None: nothing.
        learned: whether the scales are trained.

    Attributes:
        quantized: what is read fake-quantised: the value, the reader's first output, and the place among its inputs.

    Raises:
        StageError: a weight to train is not float32, or the graph has functions.
    """

    def __init__(self, model: Light, plan: QuantPlan | None = None, *, learned: bool = False) -> None:
        super().__init__()
        graph = to_ir(model).graph
        self.inputs = [i.name for i in model.fed]
        self.outputs = [o.name or "" for o in graph.outputs]
        self.weights, self.constants, self.masks, self.quantizers = (nn.Module() for _ in range(4))
        self._stored: list[tuple[str, nn.Module, str]] = []
        self._fakes: dict[str, str] = {}
        self.quantized: set[tuple[str, str, int]] = set()
        trained = _trained(graph)
        for name, value in graph.initializers.items():
            assert value.const_value is not None
            self._store(name, value.const_value, name in trained)
        self.steps = self._compile(graph, {item.domain: item.version for item in model.model.opset_import})
        for item in plan.values if plan is not None else ():
            self._fake_quantize(item, _rank(graph, item), learned)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in order, for the inputs in order."""
        values = self.compute(dict(zip(self.inputs, tensors, strict=True)))
        return tuple(values[name] for name in self.outputs)

    def compute(self, feed: Mapping[str, Tensor], watch: Watch | None = None) -> dict[str, Tensor]:
        """The outputs by name.

        Args:
            feed: inputs by name.
            watch: called with each float value that a node computes; what it returns is passed on in its place.

        Raises:
            StageError: an operator without a gradient is on the way from a weight to an output.
        """
        values: dict[str, Tensor] = {**self._constants(), **feed}
        for step in self.steps:
            inputs = [self._read(values, name, (step.outputs[0], i)) for i, name in enumerate(step.inputs)]
            try:
                results = step.operator(step.attrs, *inputs)
            except NotImplementedError:
                results = step.reference(step.attrs, *inputs)
            for name, result in zip(step.outputs, results if isinstance(results, tuple) else (results,), strict=False):
                watched = watch is not None and name and result.is_floating_point()
                values[name] = watch(name, result) if watched else result  # type: ignore[misc]
            for name in step.spent:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def scales(self) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """The present scales of each fake-quantised value."""
        values = self._constants()
        for step in self.steps:  # weights behind a Transpose or the like
            if all(name in values for name in step.inputs if name) and step.op in _PASSES:
                values[step.outputs[0]] = step.operator(step.attrs, *(values[name] for name in step.inputs if name))
        scales = {}
        for name, key in self._fakes.items():
            fake: Any = getattr(self.quantizers, key)
            scales[name] = fake.scale(values.get(name, torch.zeros(1))).detach().cpu().numpy().reshape(-1)
        return scales

    def freeze_scales(self, frozen: bool) -> None:
        """Whether learned scales get no gradient any more."""
        for fake in self.quantizers.children():
            fake.frozen = frozen  # type: ignore[assignment]

    def trained(self, model: Light) -> Light:
        """A copy of the graph with the present weights."""
        copy = to_ir(model)
        values = self._constants()
        for name, owner, _ in self._stored:
            if owner is self.weights:
                array = values[name].detach().cpu().numpy()
                copy.graph.initializers[name].const_value = ir.tensor(array, name=name)
        return from_ir(copy)

    def _constants(self) -> dict[str, Tensor]:
        """Everything that the graph stores, by name; weights with their zeros."""
        values: dict[str, Tensor] = {}
        for name, owner, key in self._stored:
            values[name] = getattr(owner, key)
            mask = getattr(self.masks, key, None) if owner is self.weights else None
            if mask is not None:
                values[name] = values[name] * mask
        return values

    def _read(self, values: dict[str, Tensor], name: str, reader: tuple[str, int]) -> Tensor | None:
        if not name:
            return None
        if (name, *reader) not in self.quantized:
            return values[name]
        fake = f"{name}\0fake"  # no name of the graph
        if fake not in values:
            values[fake] = getattr(self.quantizers, self._fakes[name])(values[name])
        return values[fake]

    def _store(self, name: str, tensor: ir.TensorProtocol, trained: bool) -> None:
        key = f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{len(self._stored)}"
        data = _tensor(tensor)
        if trained and data.dtype != torch.float32:
            kind = str(data.dtype).removeprefix("torch.")
            raise StageError(f"training needs float32 weights, and this one is {kind}", where=name)
        if trained:
            self.weights.register_parameter(key, nn.Parameter(data))
            if data.ndim > 1 and not bool(data.all()):
                self.masks.register_buffer(key, (data != 0).float(), persistent=False)
        else:
            self.constants.register_buffer(key, data, persistent=False)
        self._stored.append((name, self.weights if trained else self.constants, key))

    def _fake_quantize(self, item: QuantValue, rank: int, learned: bool) -> None:
        # Values that share a scale share its parameter, too.
        key = next((self._fakes[name] for name in item.shared if name in self._fakes), "")
        if not key:
            key = f"{re.sub(r'[^0-9A-Za-z_]', '_', item.name)}_{len(self._fakes)}"
            self.quantizers.add_module(key, FakeQuant(item, rank, learned=learned))
        self._fakes[item.name] = key
        self.quantized |= {(item.name, *reader) for reader in item.readers}

    def _compile(self, graph: ir.Graph, opsets: Mapping[str, int]) -> list[_Step]:
        reads = Counter(value.name for node in graph for value in node.inputs if value is not None)
        kept = {*self.outputs, *graph.initializers}
        steps = []
        for node in graph:
            inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
            outputs = tuple(value.name or "" for value in node.outputs)
            attrs = {name: _attribute(attribute) for name, attribute in node.attributes.items()}
            attrs[OUTPUTS] = sum(bool(value.uses() or value.is_graph_output()) for value in node.outputs)
            reference = _Reference(node, opsets)
            operator = TABLE.get(node.op_type, reference) if node.domain == "" else reference
            reads.subtract(name for name in inputs if name)
            spent = tuple(name for name in dict.fromkeys(inputs) if name and not reads[name] and name not in kept)
            spent += tuple(f"{name}\0fake" for name in spent)
            steps.append(_Step(node.op_type, operator, reference, attrs, inputs, outputs, spent))
        return steps


class _Reference:
    """A node without a gradient, as onnx's own reference computes it."""

    def __init__(self, node: ir.Node, opsets: Mapping[str, int]) -> None:
        self.node = ir.serde.serialize_node(node)
        self.opsets = dict(opsets)

    def __call__(self, attrs: Mapping[str, Any], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What the node gives.

        Raises:
            StageError: a gradient would have to pass.
        """
        if self.node.op_type == "Constant":
            return (attrs["value"],)
        tensors = [tensor for tensor in inputs if tensor is not None]
        feed = {n: t.detach().cpu().numpy() for n, t in zip(self.node.input, inputs, strict=True) if t is not None}
        arrays = ReferenceEvaluator(self.node, self.opsets).run(None, feed)
        device = tensors[0].device if tensors else None
        results = tuple(torch.as_tensor(np.asarray(array), device=device) for array in arrays)
        if any(t.requires_grad for t in tensors) and any(r.is_floating_point() for r in results):
            raise StageError(
                f"training with fake quantisation has no gradient for this {self.node.op_type}",
                where=self.node.output[0],
                hint="mode: int8 quantises the model without training",
            )
        return results


def _trained(graph: ir.Graph) -> set[str]:
    """Stored float tensors that are weights or biases of products, or of normalisation layers."""
    names: set[str] = set()
    for node in graph:
        places: tuple[int, ...] = ()
        if node.domain == "" and node.op_type in WEIGHTED:
            places = (0, 1, 2)
        elif node.domain == "":
            places = _NORMS.get(node.op_type, ())
            # A constant added to a product is its bias.
            if node.op_type == "Add" and any(v is not None and _is_product(v) for v in node.inputs):
                places = (0, 1)
        for place in places:
            source = _stored_source(node.inputs[place]) if place < len(node.inputs) else None
            if source is not None and source.dtype is not None and source.dtype.is_floating_point():
                names.add(source.name or "")
    return names


def _is_product(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in WEIGHTED


def _stored_source(value: ir.Value | None) -> ir.Value | None:
    """The stored tensor that a value holds, behind operators that only move its numbers."""
    while value is not None:
        node = value.producer()
        if node is None:
            return value if value.is_initializer() else None
        if node.op_type not in _PASSES:
            return None
        value = node.inputs[0]
    return None


def _rank(graph: ir.Graph, item: QuantValue) -> int:
    """The number of axes of a value whose scales run along one of them."""
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name == item.name and item.axis is not None:
                array = weight_of(value)
                if array is None:
                    raise StageError("its scales run along an axis, and it is not constant", where=item.name)
                return array.ndim
    return 0


def _tensor(tensor: ir.TensorProtocol) -> Tensor:
    array = np.array(tensor.numpy())  # a copy: training changes it in place
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _attribute(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor(attribute.as_tensor())
    return attribute.value
