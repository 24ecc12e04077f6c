"""Every rewrite there is, in the order they are applied. A new one is added to this tuple.

Left out on purpose, because TensorRT does better without:

- Conv or Gemm with an activation: TensorRT merges the two while they stand side by side, and ONNX has no operator for
  both.
- Attention (opset 23): TensorRT-RTX refuses the single operator in float32 ("not supported by a dedicated kernel") and
  finds MatMul, Softmax, MatMul by itself.
- Softmax or sums in another order, fast GELU and the like: they change numbers.
"""

from __future__ import annotations

from layerline.graph.fusion.rule import Rule
from layerline.graph.fusion.rules import (
    activations,
    channels,
    control,
    duplicates,
    fold,
    linear,
    noop,
    norm,
    pad,
    shape_arithmetic,
    transpose,
)

RULES: tuple[Rule, ...] = (
    noop.CONSTANTS,
    noop.DEAD,
    noop.IDENTITY,
    noop.DROPOUT,
    duplicates.INITIALIZERS,
    duplicates.NODES,
    noop.CAST,
    noop.CAST_CHAIN,
    fold.RULE,
    shape_arithmetic.KNOWN,
    shape_arithmetic.TARGET,
    control.BRANCH,
    control.SPLIT,
    control.AT,
    control.CONCAT,
    noop.RESHAPE,
    noop.TRANSPOSE,
    noop.SLICE,
    noop.PAD,
    noop.SINGLE,
    noop.ARITHMETIC,
    shape_arithmetic.RESHAPE,
    shape_arithmetic.TRANSPOSE,
    shape_arithmetic.SLICE,
    transpose.BETWEEN,
    transpose.CANCEL,
    transpose.GEMM,
    transpose.EXPAND_DROP,
    transpose.EXPAND_SINK,
    activations.GELU,
    activations.HARD_SWISH,
    norm.LAYER,
    norm.RMS,
    norm.AFFINE,
    activations.SOFTMAX,
    activations.GUARD,
    pad.CONV,
    pad.POOL,
    linear.BATCHNORM,
    linear.MATMUL_ADD,
    linear.AFFINE,
    channels.RULE,
)
