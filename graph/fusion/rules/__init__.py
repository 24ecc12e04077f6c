"""Every rewrite there is, in the order they are applied. A new one is added to this tuple.

Left out on purpose, because TensorRT does better without: an activation in its Conv or Gemm (ONNX has no operator for
both, and TensorRT merges the two while they stand side by side); Attention of opset 23, which TensorRT-RTX refuses in
float32; and what changes numbers, such as a fast GELU or sums in another order.
"""

from __future__ import annotations

from layerline.graph.fusion.rule import FusionRule
from layerline.graph.fusion.rules import (
    activations,
    channels,
    control,
    fold,
    linear,
    noop,
    norm,
    pad,
    parallel,
    shape_arithmetic,
    transpose,
)

RULES: tuple[FusionRule, ...] = (
    noop.store,
    noop.remove_unread,
    noop.identity,
    noop.dropout,
    noop.duplicate_initializers,
    noop.duplicate_nodes,
    noop.cast,
    fold.run,
    shape_arithmetic.fold_shapes,
    shape_arithmetic.target,
    control.branch,
    control.split,
    noop.reshape,
    noop.transpose,
    noop.slice_all,
    noop.pad,
    noop.single,
    noop.arithmetic,
    shape_arithmetic.reshape,
    shape_arithmetic.transpose,
    transpose.between,
    transpose.drop_expand,
    transpose.sink_expand,
    activations.gelu,
    activations.hard_swish,
    norm.layer,
    norm.affine,
    activations.guard,
    pad.conv,
    pad.pool,
    linear.batchnorm,
    parallel.convolutions,
    linear.affine,
    channels.run,
)
