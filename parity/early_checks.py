"""Checks of the untrained model before training: sizes, ranges and forward() itself, in one quick trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.signature import Signature, Value
from layerline.export.torch_export import quiet, trace
from layerline.graph.analysis.ir_queries import model_nodes
from layerline.graph.io import module_identity
from layerline.parity.module_runs import drawn_over, outputs_or_error, size_refused
from layerline.parity.probe_inputs import BEYOND
from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.errors import ConfigError

# Bytes that the inputs may take where a declared size is tried.
LARGEST = 64 << 20
# Part of the name of an operator of torch: the operators with an int8 rule that it may become.
_OPS = {
    "conv_transpose": ("ConvTranspose",),
    "aten.conv1d": ("Conv",),
    "aten.conv2d": ("Conv",),
    "aten.conv3d": ("Conv",),
    "aten.convolution": ("Conv", "ConvTranspose"),
    "aten.linear": ("Gemm", "MatMul"),
    "addmm": ("Gemm", "MatMul"),
    "mm": ("MatMul",),
    "matmul": ("MatMul",),
    "einsum": ("MatMul",),
    "attention": ("MatMul",),
    "aten.add": ("Add",),
    "aten.cat": ("Concat",),
    "avg_pool": ("AveragePool", "GlobalAveragePool"),
    "aten.mean": ("GlobalAveragePool",),
}
# Greatest expected duration of forward() at a tried size, as the time of attention grows with the square of a size.
PATIENCE_S = 5.0


def refuse_ranges(call: Call, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Runs forward() on integers over the declared ranges. Raises ConfigError if it fails on them."""
    declared, feed = drawn_over(call.feed, ranges, np.random.default_rng(0))
    if all(feed[name] is array for name, array in call.feed.items()):
        return
    outputs = outputs_or_error(call, feed)
    if isinstance(outputs, str):
        raise ConfigError(
            f"forward() itself fails on {declared}: {outputs}",
            where="ranges",
            hint="declare the integers that the model takes",
        )


def refuse_sizes(call: Call, axes: Axes) -> None:
    """Runs forward() at the declared bounds of each dynamic axis, where the inputs stay small.

    Raises:
        ConfigError: it fails at one of them.
    """
    started = time.perf_counter()
    call.run(call.feed)
    duration = time.perf_counter() - started
    for name, bounds in axes.bounds.items():
        example = axes.size(call.feed, name)
        for size in (bounds.min, bounds.max):
            # Attention takes the square of a size.
            if size is None or size == example or duration * (size / example) ** 2 > PATIENCE_S:
                continue
            feed = axes.resized(call.feed, {name: size})
            if sum(array.nbytes for array in feed.values()) > LARGEST:
                continue
            outputs = outputs_or_error(call, feed)
            if isinstance(outputs, str):
                raise size_refused(axes, name, size, outputs)


def traced(call: Call, axes: Axes, opset: int, root: Path) -> tuple[Signature, set[str], set[str]]:
    """The signature that an export would have, the names in it (values, modules and weights), and its operators.

    Raises:
        StageError: the model can't be exported; as the export stage tells it.
    """
    args, kwargs = call.arguments(call.feed)
    shapes = None
    if axes.names:
        shapes = call.shapes(axes.specs())
    names = {name for name, _ in call.module.named_modules() if name}
    # Patterns of later stages may mean values, modules or weights.
    names |= {name for name, _ in call.module.named_parameters()}
    ops: set[str] = set()
    traced_max: dict[str, int | None] = {}
    try:
        # Without decompositions and conversion: seconds instead of minutes.
        with quiet(), call.tensors_alone():
            program = torch.export.export(call.module, args, kwargs, dynamic_shapes=shapes, strict=False)
        for node in program.graph.nodes:
            names.add(node.name)
            # What the operator of torch may become.
            for part, candidates in _OPS.items():
                if part in str(node.target):
                    ops.update(candidates)
    except Exception:  # noqa: BLE001 - the exporter tries other ways of tracing, and explains where all of them fail
        exported = trace(call, axes, opset, root)
        names |= module_identity.all_names(exported.model)
        ops = {node.op_type for node in model_nodes(exported.model)}
        traced_max = {name: greatest for name, (_, greatest) in exported.ranges.items()}
    return _signature(call, axes, traced_max), names | {*call.feed, *call.outputs}, ops


def all_names(call: Call, axes: Axes, opset: int, root: Path) -> Callable[[], set[str]]:
    """Asks for every name that the ONNX would have: of values, nodes and modules. Slower, so only where needed."""
    return lambda: module_identity.all_names(trace(call, axes, opset, root).model)


def _signature(call: Call, axes: Axes, traced_max: Mapping[str, int | None]) -> Signature:
    inputs = []
    for name, array in call.feed.items():
        shape = tuple(axes.names.get((name, axis), size) for axis, size in enumerate(array.shape))
        inputs.append(Value(name=name, dtype=array.dtype.name, shape=shape))
    outputs = [Value(name=name, dtype=a.dtype.name, shape=tuple(a.shape)) for name, a in call.results.items()]
    dims: dict[str, Dim] = {}
    for name, bounds in axes.bounds.items():
        # What the trace itself allows, else as far as an export would try.
        greatest = bounds.max or traced_max.get(name) or BEYOND * axes.size(call.feed, name)
        dims[name] = Dim(min=bounds.min or 1, max=greatest, multiple=bounds.step)
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs), dims=dims)
