"""An ONNX graph as a torch module: its weights are parameters, and values carry the graph's own names.

Training runs on the fused graph itself, and not on the module that was exported. The plan quantises weights and values
that only the fused graph has: convolutions with BatchNorm folded into them, merged products. torchao's annotation
works on the module's own graph, where these do not exist. Here the same values are quantised by construction, and the
trained weights go back under their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from layerline.calib.plan import QuantPlan, QuantValue
from layerline.graph.analysis.ir_queries import copied, fed, first_output, names, subgraphs
from layerline.pipeline.errors import StageError, brief, ran_out_of_memory
from layerline.qat.fake_quant import FakeQuant
from layerline.qat.operators import TABLE
from layerline.qat.stored_tensors import PASSES, attribute_value, in_torch, rank_of, stored, trained_names
from layerline.qat.windows import OUTPUTS

Watch = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class _Operation:
    """One node: what it reads and computes, by name. The values in `spent` are not needed after it."""

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
            if self.operator is not None:
                with suppress(NotImplementedError):
                    return self.operator(self.attrs, *inputs)
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

    Trained are the float32 weights and biases of products, normalisation and recurrent layers; every other constant
    stays. The zeros of a weight with two axes or more stay zeros, as pruning left them.

    Args:
        plan: what is fake-quantised; None: nothing.
        learned: whether the scales are trained.

    Raises:
        StageError: a weight to train is not float32, or a node has a body (If, Loop, Scan).
    """

    def __init__(self, model: ir.Model, plan: QuantPlan | None = None, *, learned: bool = False) -> None:
        super().__init__()
        graph = model.graph
        self.inputs = names(fed(model))
        self.outputs = [o.name or "" for o in graph.outputs]
        self.weights, self.constants, self.masks, self.quantizers = (nn.Module() for _ in range(4))
        self._stored: list[tuple[str, nn.Module, str]] = []
        self._count = -1
        self._fakes: dict[tuple[str, str], str] = {}
        # Quantisers of what is read fake-quantised: a value, its reader's first output, the place among its inputs.
        self.quantized: dict[tuple[str, str, int], str] = {}
        tensors = stored(graph)
        trained = trained_names(graph, tensors)
        for name, tensor in tensors.items():
            owner = self.constants
            if name in trained:
                owner = self.weights
            self._stored.append((name, owner, self._store(name, tensor, owner)))
        if plan is not None:
            for item in plan.values:
                self._fake_quantize(item, rank_of(graph, item), learned)
        self.steps = self._compile(graph, model.opset_imports)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in order, for the inputs in order."""
        values = self.compute(dict(zip(self.inputs, tensors, strict=True)))
        return tuple(values[name] for name in self.outputs)

    def compute(self, feed: Mapping[str, Tensor], watch: Watch | None = None) -> dict[str, Tensor]:
        """The outputs by name; what `watch` returns of a float value that a node computes is passed on in its place.

        Raises:
            StageError: an operator without a gradient is on the way from a weight to an output, or the inputs have
                shapes that the graph does not take.
        """
        values: dict[str, Tensor] = {**self._constants(), **feed}
        for step in self.steps:
            results = step.run([self._read(values, name, (step.name, i)) for i, name in enumerate(step.inputs)])
            if not isinstance(results, tuple):
                results = (results,)
            for name, result in zip(step.outputs, results, strict=False):
                if watch is not None and name and result.is_floating_point():
                    result = watch(name, result)
                values[name] = result
            for name in step.spent:
                values.pop(name, None)  # memory of activations that nothing reads any more
        return {name: values[name] for name in self.outputs}

    def scales(self) -> dict[tuple[str, str], np.ndarray[Any, np.dtype[np.float32]]]:
        """The present scales of each fake-quantised value, by its name and the type that it is quantised to."""
        values = self._constants()
        for step in self.steps:  # weights behind a Transpose or the like
            if step.op in PASSES and all(name in values for name in step.inputs):
                values[step.outputs[0]] = step.run([values[name] for name in step.inputs])
        scales = {}
        for (name, dtype), key in self._fakes.items():
            fake: Any = getattr(self.quantizers, key)
            scales[name, dtype] = fake.scale(values.get(name, torch.zeros(1))).detach().cpu().numpy().reshape(-1)
        return scales

    def trained(self, model: ir.Model) -> ir.Model:
        """A copy of the graph with the present weights."""
        copy = copied(model)
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
        return copy

    def _constants(self) -> dict[str, Tensor]:
        """Everything that the graph stores, by name; weights with their zeros."""
        values: dict[str, Tensor] = {}
        for name, owner, key in self._stored:
            values[name] = getattr(owner, key)
            mask = getattr(self.masks, key, None)  # its key is the weight's
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

    def _store(self, name: str, tensor: ir.TensorProtocol, owner: nn.Module) -> str:
        """Keeps a tensor as a parameter, or as a buffer that stays; returns the attribute of `owner`."""
        self._count += 1
        key = f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{self._count}"
        data = in_torch(tensor)
        if owner is self.constants:
            owner.register_buffer(key, data, persistent=False)
            return key
        if data.dtype != torch.float32:
            kind = str(data.dtype).removeprefix("torch.")
            raise StageError(f"training needs float32 weights, and this one is {kind}", where=name)
        owner.register_parameter(key, nn.Parameter(data))
        if data.ndim > 1 and bool(data.any()) and not bool(data.all()):  # biases and all-zero weights are not pruned
            self.masks.register_buffer(key, (data != 0).float(), persistent=False)
        return key

    def _fake_quantize(self, item: QuantValue, rank: int, learned: bool) -> None:
        if item.dtype not in ("int8", "float8e4m3fn") or item.zero_point != 0:
            raise StageError(
                f"training knows symmetric int8 and fp8, and the plan has {item.dtype}, zero point {item.zero_point}",
                where=item.name,
                hint="choose int8 or fp8 for this layer, or a mode without training",
            )
        # Values that share a scale share its parameter, too.
        shared = [self._fakes[name, item.dtype] for name in item.shared if (name, item.dtype) in self._fakes]
        if shared:
            key = shared[0]
        else:
            key = f"{re.sub(r'[^0-9A-Za-z_]', '_', item.name)}_{len(self._fakes)}"
            self.quantizers.add_module(key, FakeQuant(item, rank, learned=learned))
        self._fakes[item.name, item.dtype] = key
        self.quantized |= {(item.name, *reader): key for reader in item.readers}

    def _compile(self, graph: ir.Graph, opsets: Mapping[str, int]) -> list[_Operation]:
        stored_names = stored(graph)
        nodes = [node for node in graph if not (node.outputs and node.outputs[0].name in stored_names)]
        reads = Counter(name for node in nodes for name in names(node.inputs))
        kept = {*stored_names, *self.outputs}
        fakes = [(name, f"{name}\0{key}") for (name, _), key in self._fakes.items()]
        steps: list[_Operation] = []
        for node in nodes:
            if subgraphs(node):  # If, Loop and Scan
                raise _no_gradient(node.op_type, first_output(node))
            attrs = {name: attribute_value(attribute) for name, attribute in node.attributes.items()}
            attrs[OUTPUTS] = sum(bool(value.uses() or value.is_graph_output()) for value in node.outputs)
            inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
            reads.subtract(name for name in inputs if name)
            spent = [name for name in dict.fromkeys(inputs) if name and not reads[name] and name not in kept]
            spent += [fake for name, fake in fakes if name in spent]
            steps.append(
                _Operation(
                    name=first_output(node),
                    op=node.op_type,
                    operator=TABLE.get(node.op_type) if node.domain == "" else None,
                    reference=_Reference(node, opsets),
                    attrs=attrs,
                    inputs=inputs,
                    outputs=tuple(value.name or "" for value in node.outputs),
                    spent=tuple(spent),
                )
            )
        return steps


class _Reference:
    """A node without a gradient, as onnx's own reference computes it."""

    def __init__(self, node: ir.Node, opsets: Mapping[str, int]) -> None:
        self.node = ir.serde.serialize_node(node)
        self.opsets = dict(opsets)  # operators changed their meaning between opsets

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What the node gives. Raises StageError where a gradient would have to pass."""
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
