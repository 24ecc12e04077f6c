"""An ONNX graph as a torch module: its weights are parameters, and values carry the graph's own names.

Training runs on the fused graph itself, and not on the module that was exported. The plan quantises weights and values
that only the fused graph has: convolutions with BatchNorm folded into them, merged products. torchao's annotation
works on the module's own graph, where these do not exist. Here the same values are quantised by construction, and the
trained weights go back under their names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from layerline.backends.light import Light
from layerline.calib.plan import QuantPlan, QuantValue
from layerline.graph.analysis.ir_queries import subgraphs
from layerline.graph.io.ir_convert import from_ir, to_ir
from layerline.graph.quantization.naming import first_output
from layerline.graph.quantization.targets import WEIGHTED
from layerline.graph.quantization.weight_sources import weight_of
from layerline.pipeline.errors import StageError, brief, ran_out_of_memory
from layerline.qat.fake_quant import FakeQuant
from layerline.qat.operators import OUTPUTS, TABLE

_NORMS = {"BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2),
          "LayerNormalization": (1, 2), "RMSNormalization": (1,)}  # fmt: skip
_PASSES = ("Identity", "Transpose", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten")
Watch = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class _Operation:
    """One node: what it reads and computes, by name; after it the values in `spent` are not needed any more."""

    name: str
    op: str
    operator: Callable[..., Any] | None
    reference: Callable[..., Any]
    attrs: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    spent: tuple[str, ...]

    def run(self, inputs: Sequence[Tensor | None]) -> Any:
        """One tensor, or a tuple of them."""
        try:
            if self.operator is None:
                return self.reference(*inputs)
            try:
                return self.operator(self.attrs, *inputs)
            except NotImplementedError:
                return self.reference(*inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if ran_out_of_memory(error):
                raise
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs if tensor is not None)
            raise StageError(
                f"{self.op} fails in torch on {shapes}: {brief(error)}",
                where=self.name,
                hint="give batches of sizes that the model takes, or quantise without training: mode: int8",
            ) from error


class GraphModule(nn.Module):
    """Runs an ONNX graph in torch.

    Trained are the float32 weights and biases of products and normalisation layers; every other constant stays. The
    zeros of a weight with two axes or more stay zeros, as pruning left them.

    Args:
        model: the float graph.
        plan: what is fake-quantised; None: nothing.
        learned: whether the scales are trained.

    Attributes:
        quantized: what is read fake-quantised: the value, the reader's first output, and the place among its inputs;
            with the name of the quantiser.

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
        self._fakes: dict[tuple[str, str], str] = {}
        self.quantized: dict[tuple[str, str, int], str] = {}
        tensors = _stored(graph)
        trained = _trained(graph, tensors)
        for name, tensor in tensors.items():
            self._store(name, tensor, name in trained)
        for item in plan.values if plan is not None else ():
            self._fake_quantize(item, _rank(graph, item), learned)
        self.steps = self._compile(graph, {item.domain: item.version for item in model.model.opset_import})

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
            StageError: an operator without a gradient is on the way from a weight to an output, or the inputs have
                shapes that the graph does not take.
        """
        values: dict[str, Tensor] = {**self._constants(), **feed}
        for step in self.steps:
            inputs = [self._read(values, name, (step.name, i)) for i, name in enumerate(step.inputs)]
            results = step.run(inputs)
            for name, result in zip(step.outputs, results if isinstance(results, tuple) else (results,), strict=False):
                watched = watch is not None and name and result.is_floating_point()
                values[name] = watch(name, result) if watched else result  # type: ignore[misc]
            for name in step.spent:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def scales(self) -> dict[tuple[str, str], np.ndarray[Any, np.dtype[np.float32]]]:
        """The present scales of each fake-quantised value, by its name and the type that it is quantised to."""
        values = self._constants()
        for step in self.steps:  # weights behind a Transpose or the like
            if step.op in _PASSES and all(name in values for name in step.inputs):
                values[step.outputs[0]] = step.run([values[name] for name in step.inputs])
        scales = {}
        for (name, dtype), key in self._fakes.items():
            fake: Any = getattr(self.quantizers, key)
            scales[name, dtype] = fake.scale(values.get(name, torch.zeros(1))).detach().cpu().numpy().reshape(-1)
        return scales

    def freeze_scales(self, frozen: bool) -> None:
        """Whether learned scales get no gradient any more."""
        for fake in self.quantizers.children():
            fake.frozen = frozen  # type: ignore[assignment]

    def trained(self, model: Light) -> Light:
        """A copy of the graph with the present weights."""
        copy = to_ir(model)
        values = self._constants()
        nodes = {node.outputs[0].name: node for node in copy.graph if node.op_type == "Constant"}
        for name, owner, _ in self._stored:
            if owner is not self.weights:
                continue
            tensor = ir.tensor(values[name].detach().cpu().numpy(), name=name)
            if name in nodes:
                nodes[name].attributes["value"] = ir.AttrTensor("value", tensor)
            else:
                copy.graph.initializers[name].const_value = tensor
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
        key = self.quantized.get((name, *reader))
        if key is None:
            return values[name]
        fake = f"{name}\0{key}"  # no name of the graph
        if fake not in values:
            values[fake] = getattr(self.quantizers, key)(values[name])
        return values[fake]

    def _store(self, name: str, tensor: ir.TensorProtocol, trained: bool) -> None:
        key = f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{len(self._stored)}"
        data = _tensor(tensor)
        if trained and data.dtype != torch.float32:
            kind = str(data.dtype).removeprefix("torch.")
            raise StageError(f"training needs float32 weights, and this one is {kind}", where=name)
        if trained:
            self.weights.register_parameter(key, nn.Parameter(data))
            if data.ndim > 1 and bool(data.any()) and not bool(data.all()):
                self.masks.register_buffer(key, (data != 0).float(), persistent=False)
        else:
            self.constants.register_buffer(key, data, persistent=False)
        self._stored.append((name, self.weights if trained else self.constants, key))

    def _fake_quantize(self, item: QuantValue, rank: int, learned: bool) -> None:
        if item.dtype not in ("int8", "float8e4m3fn") or item.zero_point != 0:
            raise StageError(
                f"training knows symmetric int8 and fp8, and the plan has {item.dtype}, zero point {item.zero_point}",
                where=item.name,
                hint="choose int8 or fp8 for this layer, or a mode without training",
            )
        # Values that share a scale share its parameter, too.
        key = next((self._fakes[name, item.dtype] for name in item.shared if (name, item.dtype) in self._fakes), "")
        if not key:
            key = f"{re.sub(r'[^0-9A-Za-z_]', '_', item.name)}_{len(self._fakes)}"
            self.quantizers.add_module(key, FakeQuant(item, rank, learned=learned))
        self._fakes[item.name, item.dtype] = key
        self.quantized |= {(item.name, *reader): key for reader in item.readers}

    def _compile(self, graph: ir.Graph, opsets: Mapping[str, int]) -> list[_Operation]:
        reads = Counter(value.name for node in graph for value in node.inputs if value is not None)
        stored = _stored(graph)
        kept = {*self.outputs, *stored}
        fakes = [(name, f"{name}\0{key}") for (name, _), key in self._fakes.items()]
        steps = []
        for node in graph:
            if node.outputs and node.outputs[0].name in stored:
                continue
            if subgraphs(node):
                raise _no_gradient(node.op_type, node.outputs[0].name or "")
            inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
            outputs = tuple(value.name or "" for value in node.outputs)
            attrs = {name: _attribute(attribute) for name, attribute in node.attributes.items()}
            attrs[OUTPUTS] = sum(bool(value.uses() or value.is_graph_output()) for value in node.outputs)
            operator = TABLE.get(node.op_type) if node.domain == "" else None
            reads.subtract(name for name in inputs if name)
            spent = tuple(name for name in dict.fromkeys(inputs) if name and not reads[name] and name not in kept)
            spent += tuple(fake for name, fake in fakes if name in spent)
            steps.append(
                _Operation(
                    first_output(node), node.op_type, operator, _Reference(node, opsets), attrs, inputs, outputs, spent
                )
            )
        return steps


class _Reference:
    """A node without a gradient, as onnx's own reference computes it."""

    def __init__(self, node: ir.Node, opsets: Mapping[str, int]) -> None:
        self.node = ir.serde.serialize_node(node)
        self.opsets = dict(opsets)

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What the node gives.

        Raises:
            StageError: a gradient would have to pass.
        """
        tensors = [tensor for tensor in inputs if tensor is not None]
        feed = {n: t.detach().cpu().numpy() for n, t in zip(self.node.input, inputs, strict=True) if t is not None}
        arrays = ReferenceEvaluator(self.node, self.opsets).run(None, feed)
        device = tensors[0].device if tensors else None
        results = tuple(torch.as_tensor(np.asarray(array), device=device) for array in arrays)
        if any(t.requires_grad for t in tensors) and any(r.is_floating_point() for r in results):
            raise _no_gradient(self.node.op_type, self.node.output[0])
        return results


def _no_gradient(op: str, where: str) -> StageError:
    hint = "mode: int8 quantises the model without training"
    return StageError(f"training with fake quantisation has no gradient for this {op}", where=where, hint=hint)


def _stored(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """The tensors that a graph stores, as initializers and in Constants, by name."""
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in graph.initializers.items():
        assert value.const_value is not None
        tensors[name] = value.const_value
    for node in graph:
        if node.op_type == "Constant" and "value" in node.attributes:
            tensors[node.outputs[0].name or ""] = node.attributes["value"].as_tensor()
    return tensors


def _trained(graph: ir.Graph, tensors: Mapping[str, ir.TensorProtocol]) -> set[str]:
    """Stored float tensors that are weights or biases of products, or of normalisation layers."""
    names: set[str] = set()
    for node in graph:
        places: tuple[int, ...] = ()
        if node.domain == "" and node.op_type in WEIGHTED:
            places = (0, 1, 2)
        elif node.domain == "":
            places = _NORMS.get(node.op_type, ())
            if node.op_type == "Add" and any(_has_weight(v) for v in node.inputs):
                places = (0, 1)
        for place in places:
            name = _stored_source(node.inputs[place]) if place < len(node.inputs) else ""
            if not name or not tensors[name].dtype.is_floating_point():
                continue
            sizes = tensors[name].shape.numpy()
            # A constant added to a product is its bias where it has one number for each channel; a mask has not.
            if node.op_type != "Add" or math.prod(sizes) == max(sizes, default=0):
                names.add(name)
    return names


def _has_weight(value: ir.Value | None) -> bool:
    """Whether a product of activations with a stored weight computes the value."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in WEIGHTED:
        return False
    return any(_stored_source(operand) for operand in node.inputs[:2])


def _stored_source(value: ir.Value | None) -> str:
    """The stored tensor that a value holds, behind operators that only move its numbers; empty where there is none."""
    while value is not None:
        node = value.producer()
        if node is None:
            return (value.name or "") if value.is_initializer() else ""
        if node.op_type == "Constant" and "value" in node.attributes:
            return value.name or ""
        if node.op_type not in _PASSES:
            return ""
        value = node.inputs[0]
    return ""


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
