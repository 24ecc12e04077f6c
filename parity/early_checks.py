"""What an export of the untrained model would refuse: sizes, ranges, and forward() itself, seen in one quick trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch

from layerline.backends.base import Feed
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.probe_files import drawn
from layerline.export.signature import Dim, Signature, Value
from layerline.export.torch_export import quiet, trace
from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import modules
from layerline.parity.probe_inputs import BEYOND
from layerline.pipeline.errors import ConfigError, brief

LARGEST = 64 << 20
"""Bytes that the inputs may take where a declared size is tried."""
# Part of the name of torch's operator: what it may become, of the operators that have an int8 rule.
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
PATIENCE_S = 5.0
"""Seconds that forward() is thought to take there, at most; the time of attention grows with the square of a size."""


def refuse_ranges(call: Call, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Runs forward() on integers over the declared ranges.

    Raises:
        ConfigError: it fails on them.
    """
    rng = np.random.default_rng(0)
    changed = {n: drawn(call.feed[n], low, high, rng) for n, (low, high) in ranges.items() if call.feed[n].size}
    said = _said(call, {**call.feed, **changed}) if changed else None
    if said is not None:
        told = ", ".join(f"{n} over [{low}, {high}]" for n, (low, high) in ranges.items())
        raise ConfigError(f"forward() itself fails on {told}: {said}", where="ranges",
                          hint="declare what the model really takes")  # fmt: skip


def refuse_sizes(call: Call, axes: Axes) -> None:
    """Runs forward() at the declared bounds of each dynamic axis, where the inputs stay small.

    Raises:
        ConfigError: it fails at one of them.
    """
    started = time.perf_counter()
    call.run(call.feed)
    took = time.perf_counter() - started
    for name, bounds in axes.bounds.items():
        for size in (bounds.min, bounds.max):
            here = axes.size(call.feed, name)
            if size is None or size == here or took * (size / here) ** 2 > PATIENCE_S:
                continue
            feed = axes.resized(call.feed, {name: size})
            said = _said(call, feed) if sum(a.nbytes for a in feed.values()) <= LARGEST else None
            if said is not None:
                given, axis = axes.places(name)[0]
                raise ConfigError(
                    f"{name} is declared from {bounds.min} to {bounds.max}; forward() itself fails at {size}: {said}",
                    where=f"dynamic.{given}.{axis}",
                    hint=f"steps of {bounds.multiple}" * (bounds.multiple > 1) or "declare the sizes that it takes",
                )


def traced(call: Call, axes: Axes, opset: int, root: Path) -> tuple[Signature, set[str], set[str]]:
    """The signature that an export would have, the names in it (values, modules and weights), and its operators.

    Raises:
        StageError: the model can't be exported; as the export stage tells it.
    """
    args, kwargs = call.arguments(call.feed)
    if args and isinstance(args[-1], dict) and not kwargs:
        args = (*args, {})  # torch takes a dict in the last place for the keywords
    shapes = call.shapes(axes.specs()) if axes.names else None
    names = {n for n, _ in call.module.named_modules() if n} | {n for n, _ in call.module.named_parameters()}
    ends: dict[str, int | None] = {}
    try:
        with quiet(), call.tensors_alone():
            program = torch.export.export(call.module, args, kwargs, dynamic_shapes=shapes, strict=False)
        names |= {n.name for n in program.graph.nodes}
        ops = {op for n in program.graph.nodes for part, found in _OPS.items() if part in str(n.target) for op in found}
    except Exception:  # noqa: BLE001 - the exporter has other ways, and its own words where all of them fail
        exported = trace(call, axes, opset, root)
        names |= onnx_names(exported.model)
        ops = {n.op_type for n in onnx_files.nodes(exported.model)}
        ends = {n: top for n, (_, top) in exported.ranges.items()}
    return _signature(call, axes, ends), names | {*call.feed, *call.outputs}, ops


def all_names(call: Call, axes: Axes, opset: int, root: Path) -> Callable[[], set[str]]:
    """Asks for every name that the ONNX would have: of values, nodes and modules. Slower, so only where needed."""
    return lambda: onnx_names(trace(call, axes, opset, root).model)


def _signature(call: Call, axes: Axes, ends: Mapping[str, int | None]) -> Signature:
    inputs = tuple(
        Value(
            name=n,
            dtype=a.dtype.name,
            shape=tuple(axes.names.get((n, axis), size) for axis, size in enumerate(a.shape)),
        )
        for n, a in call.feed.items()
    )
    outputs = tuple(Value(name=n, dtype=a.dtype.name, shape=tuple(a.shape)) for n, a in call.results.items())
    dims = {
        n: Dim(min=b.min or 1, max=b.max or ends.get(n) or BEYOND * axes.size(call.feed, n), multiple=b.multiple)
        for n, b in axes.bounds.items()
    }
    return Signature(inputs=inputs, outputs=outputs, dims=dims)


def onnx_names(model: onnx.ModelProto) -> set[str]:
    """Names of values, nodes and modules."""
    found = {path for paths in modules(model).values() for path in paths.split(", ")}
    for node in onnx_files.nodes(model):
        found |= {node.name, *node.input, *node.output}
    return found - {""}


def _said(call: Call, feed: Feed) -> str | None:
    """What forward() raises on a feed; None where it runs."""
    try:
        call.run(feed)
    except Exception as error:  # noqa: BLE001 - which sizes and values the user's module refuses is the question
        return brief(error)
    return None
