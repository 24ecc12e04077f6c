"""MatMul and Add to one Gemm, where A is rank 2 and the bias broadcasts one way, to (M, N)."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import dim, parent, rank
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on, sole

# Gemm's types; the runtime has no kernel for Gemm on integers.
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16})


def rewrite(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    for side in (0, 1):
        product = node.inputs[side]
        bias = node.inputs[1 - side]
        matmul = parent(product, "MatMul")
        if matmul is None or product is None or bias is None:
            continue
        # `sole` would let it pass: the Add is the only reader, twice.
        if bias is product:
            raise Declined(f"{node.outputs[0].name} adds MatMul {product.name} to itself; both are needed")
        a, b = matmul.inputs
        if rank(a) != 2 or rank(b) != 2:
            raise Declined(
                f"MatMul {matmul.outputs[0].name} multiplies ranks {rank(a)} and {rank(b)}; Gemm takes 2 and 2"
            )
        assert a is not None and b is not None  # they have a rank
        if a.dtype not in FLOATS:
            raise Declined(f"MatMul {matmul.outputs[0].name} multiplies {a.dtype}, which Gemm doesn't take")
        _refuse_wide_bias(bias, a, b, matmul)
        sole(product, node)
        return tape.op("Gemm", [a, b, bias])
    return None


def _refuse_wide_bias(bias: ir.Value, a: ir.Value, b: ir.Value, matmul: ir.Node) -> None:
    shape = bias.shape
    if shape is None or len(shape) > 2:
        raise Declined(f"bias {bias.name} of shape {shape} has not at most 2 dimensions, as Gemm's C must")
    full = (dim(a, 0), dim(b, 1))
    for axis in range(1, len(shape) + 1):
        size = dim(bias, -axis)
        if size is None or size not in (1, full[-axis]):
            raise Declined(
                f"bias {bias.name} of shape {shape} doesn't broadcast one way to MatMul {matmul.outputs[0].name} {full}"
            )


RULE = on("matmul-add", "MatMul and Add to Gemm (rank 2, bias broadcast one way)", ["Add"], rewrite)
