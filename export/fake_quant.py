"""Fake quantisation on its way out: traced with its switches and scales as they stand, weights stored in int8.

torch multiplies by the inverse of the scale where ONNX divides by it, so a value half-way between two steps may fall on
either side. Weights are therefore quantised here, by torch itself, and stored: only activations are left to ONNX.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize
from torch.export import ExportedProgram

from layerline.export.example_call import place_of
from layerline.export.fake_quant_ops import container
from layerline.export.program_queries import stored
from layerline.export.torch_private import give_fake_quantisation_shapes
from layerline.graph.analysis.ir_queries import add_initializer
from layerline.pipeline.errors import StageError

PER_CHANNEL = torch.ops.aten.fake_quantize_per_channel_affine.default
TARGETS = (
    PER_CHANNEL,
    torch.ops.aten.fake_quantize_per_tensor_affine.default,
    torch.ops.aten.fake_quantize_per_tensor_affine.tensor_qparams,
)


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Inside, fake quantisation can be traced: its two switches are tensors, on which tracing can't branch.

    Raises StageError: an observer that is on, as each call would change the scale.
    """
    give_fake_quantisation_shapes()
    with ExitStack() as restore:
        for path, inner in module.named_modules():
            forward: Any = None
            # Replaced by somebody else, who knows better.
            if "forward" in vars(inner):
                continue
            if _is_intx(inner):
                for name in ("scale", "zero_point"):
                    restore.callback(setattr, inner, name, getattr(inner, name))
                forward = partial(_intx_forward, inner)
            elif isinstance(inner, FakeQuantize):
                if int(inner.observer_enabled[0]):
                    what = "the observer of this FakeQuantize is on, so each call changes its scale"
                    hint = "model().apply(torch.ao.quantization.disable_observer) keeps the scales as they are"
                    raise StageError(what, where=place_of(path), hint=hint)
                forward = partial(_forward, inner, quantizes=bool(inner.fake_quant_enabled[0]))
            if forward is not None:
                inner.forward = forward
                restore.callback(delattr, inner, "forward")
        yield


def _is_intx(module: nn.Module) -> bool:
    """Whether it is torchao's fake quantiser of whole channels or groups of them, to integers."""
    torchao: Any = sys.modules.get("torchao.quantization.qat.fake_quantizer")
    if torchao is None or not isinstance(module, torchao.IntxFakeQuantizer):
        return False
    config: Any = module.config
    integers = config.zero_point_domain.name == "INT"
    return integers and isinstance(config.granularity, torchao.PerAxis | torchao.PerGroup)


def _intx_forward(module: Any, x: Tensor) -> Tensor:
    """What IntxFakeQuantizer.forward() does, in the one operator that becomes QuantizeLinear and DequantizeLinear."""
    if not module.enabled:
        return x
    torchao: Any = sys.modules["torchao.quantization.qat.fake_quantizer"]
    type(module).forward(module, x)  # sets scale and zero point; what it gives is not used
    low, high = torchao._DTYPE_TO_QVALUE_BOUNDS[module.config.dtype]
    grouped = x.reshape(module.scale.numel(), -1)  # a row for each scale: groups lie along the last axis
    points = module.zero_point.reshape(-1).to(torch.int32)
    fake = torch.fake_quantize_per_channel_affine(grouped, module.scale.reshape(-1).float(), points, 0, low, high)
    return fake.reshape(x.shape)


def _forward(module: Any, x: Tensor, *, quantizes: bool) -> Tensor:
    """What FakeQuantize.forward() does where the observer is off."""
    if not quantizes:
        return x
    low, high = module.activation_post_process.quant_min, module.activation_post_process.quant_max
    if module.is_per_channel:
        return torch.fake_quantize_per_channel_affine(x, module.scale, module.zero_point, module.ch_axis, low, high)
    return torch.fake_quantize_per_tensor_affine(x, module.scale, module.zero_point, low, high)


def store_weights(model: ir.Model, program: ExportedProgram) -> None:
    """Stores what fake quantisation makes of constants in int8 or uint8, as torch computes it, with its own scales.

    The model is the exporter's, which names values as the program names its nodes; it is changed in place.
    """
    constants = _Constants(program)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for node in program.graph.nodes:
        value = values.get(node.name)
        if node.target not in TARGETS or value is None or not constants.all(node):
            continue
        producer = value.producer()
        assert producer is not None  # it is the output of a node
        data, scale, point, *limits = (constants.of(argument) for argument in node.args)
        low, high = limits[-2:]
        fake = node.target(data, scale, point, *limits)
        # One scale for all elements is a scalar in ONNX; one for each channel is a vector along the axis.
        flat: tuple[int, ...] = ()
        along_axis = [1] * fake.ndim
        attributes: dict[str, int] = {}
        if node.target is PER_CHANNEL:
            flat = (-1,)
            along_axis[limits[0]] = -1
            attributes["axis"] = limits[0]
        scales = torch.as_tensor(scale, dtype=torch.float32).reshape(flat)
        points = torch.as_tensor(point, dtype=torch.int32).reshape(flat)
        steps = torch.round(fake.double() / scales.double().reshape(along_axis)) + points.reshape(along_axis)
        kind = container(low, high).numpy()
        inputs = [_stored(model, f"{node.name}/quantized", steps.numpy().astype(kind)),
                  _stored(model, f"{node.name}/scale", scales.numpy()),
                  _stored(model, f"{node.name}/zero_point", points.numpy().astype(kind))]  # fmt: skip
        # The node's name and place go on to what replaces it.
        props = dict(producer.metadata_props)
        dequantize = ir.node("DequantizeLinear", inputs, attributes, name=producer.name, metadata_props=props)
        dequantize.outputs[0].shape, dequantize.outputs[0].type = value.shape, value.type
        model.graph.insert_before(producer, dequantize)
        value.replace_all_uses_with(dequantize.outputs[0], replace_graph_outputs=True)
        model.graph.remove(producer, safe=True)
        dequantize.outputs[0].name = node.name


def _stored(model: ir.Model, name: str, array: Any) -> ir.Value:
    # ascontiguousarray would give a scalar an axis.
    return add_initializer(model.graph, name, np.asarray(array, order="C"))


class _Constants:
    """The values of a program that no input decides, computed by torch when they are asked for."""

    def __init__(self, program: ExportedProgram) -> None:
        self._values: dict[Any, Any] = {}
        table = stored(program)
        self._open: set[Any] = set()
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in table:
                self._values[node] = table[node.name]
            elif node.op != "call_function" or any(n in self._open for n in node.all_input_nodes):
                self._open.add(node)

    def all(self, node: Any) -> bool:
        """Whether everything that the node reads is constant."""
        return not any(n in self._open for n in node.all_input_nodes)

    def of(self, argument: Any) -> Any:
        """The value of one argument: a number, or a constant node."""
        if not isinstance(argument, torch.fx.Node):
            return argument
        if argument not in self._values:
            args = torch.fx.map_arg(argument.args, self.of)
            kwargs = torch.fx.map_arg(argument.kwargs, self.of)
            with torch.no_grad():
                target: Any = argument.target
                self._values[argument] = target(*args, **kwargs)
        return self._values[argument]
