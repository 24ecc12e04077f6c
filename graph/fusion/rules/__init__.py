"""Every rewrite there is, in the order they are applied. One file each; a new one is added to this tuple.

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
    affine,
    batchnorm,
    branch,
    cast,
    chain,
    channels,
    constants,
    dead,
    duplicates,
    expand,
    fold,
    gelu,
    hard_swish,
    identity,
    matmul_add,
    noop,
    norm,
    pad,
    sequence,
    shape_arithmetic,
    softmax,
    transpose,
)

RULES: tuple[Rule, ...] = (
    constants.RULE,
    dead.RULE,
    identity.IDENTITY,
    identity.DROPOUT,
    duplicates.INITIALIZERS,
    duplicates.NODES,
    cast.NOOP,
    cast.CHAIN,
    fold.RULE,
    shape_arithmetic.KNOWN,
    shape_arithmetic.TARGET,
    branch.RULE,
    sequence.SPLIT,
    sequence.AT,
    sequence.CONCAT,
    noop.RESHAPE,
    noop.TRANSPOSE,
    noop.SLICE,
    noop.PAD,
    noop.SINGLE,
    noop.ARITHMETIC,
    chain.RESHAPE,
    chain.TRANSPOSE,
    chain.SLICE,
    transpose.BETWEEN,
    transpose.CANCEL,
    transpose.GEMM,
    expand.DROP,
    expand.SINK,
    gelu.RULE,
    hard_swish.RULE,
    norm.LAYER,
    norm.RMS,
    norm.AFFINE,
    softmax.RULE,
    softmax.GUARD,
    pad.CONV,
    pad.POOL,
    batchnorm.RULE,
    matmul_add.RULE,
    affine.RULE,
    channels.RULE,
)
