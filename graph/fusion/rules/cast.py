"""Casts that do nothing, and two casts that are one."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from layerline.graph.analysis.ir_queries import parent
from layerline.graph.fusion.firing import Declined
from layerline.graph.fusion.rewriter import Rewriting
from layerline.graph.fusion.rule import on

_D = ir.DataType
_INTEGERS = (_D.INT8, _D.INT16, _D.INT32, _D.INT64)
_UNSIGNED = (_D.UINT8, _D.UINT16, _D.UINT32, _D.UINT64)
_FLOATS = (_D.FLOAT16, _D.FLOAT, _D.DOUBLE)
# Types that hold every value of another, so that going through them changes nothing.
_HOLDS: dict[ir.DataType, frozenset[ir.DataType]] = {
    **{t: frozenset({_D.BOOL, *_INTEGERS[:i]}) for i, t in enumerate(_INTEGERS)},
    **{t: frozenset({_D.BOOL, *_FLOATS[:i]}) for i, t in enumerate(_FLOATS)},
}
# A signed type holds the unsigned ones that are narrower than it is.
_HOLDS |= {t: _HOLDS[t] | set(_UNSIGNED[:i]) for i, t in enumerate(_INTEGERS)}
# float32 has a significand of 24 bits and holds 16-bit integers; float64 has 53 bits and holds 32-bit ones.
_HOLDS[_D.FLOAT] |= {_D.BFLOAT16, _D.INT8, _D.INT16, _D.UINT8, _D.UINT16}
_HOLDS[_D.DOUBLE] |= {_D.BFLOAT16, *_INTEGERS[:3], *_UNSIGNED[:3]}


def noop(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    value = node.inputs[0]
    to = _target(node)
    if value is None or value.dtype is None or to is None:
        return None
    if value.dtype == to:
        return value
    if node.op_type == "CastLike":
        return tape.op("Cast", [value], _to(node, to))
    return None


def chain(node: ir.Node, tape: Tape, work: Rewriting) -> ir.Value | None:  # noqa: ARG001
    inner = parent(node.inputs[0], "Cast")
    if inner is None:
        return None
    value = inner.inputs[0]
    if value is None or value.dtype is None:
        return None
    middle = _target(inner)
    last = _target(node)
    if last == _D.STRING:
        raise Declined(f"{node.outputs[0].name} writes numbers out, which reads otherwise in another type")
    if middle is None or value.dtype not in _HOLDS.get(middle, ()):
        raise Declined(f"Cast {inner.outputs[0].name} to {middle} may change {value.name} of type {value.dtype}")
    if last is None:
        return None
    return tape.op("Cast", [value], _to(node, last))


def _to(node: ir.Node, to: ir.DataType) -> dict[str, ir.Attr | int]:
    """The node's own attributes (what becomes of numbers beyond an 8-bit float) with the type it casts to."""
    return {**node.attributes, "to": int(to)}


def _target(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0))
    like = node.inputs[1]
    if like is None:
        return None
    return like.dtype


NOOP = on("noop-cast", "Cast to the type a value has; CastLike where the type is known", ["Cast", "CastLike"], noop)
CHAIN = on("cast-cast", "Cast of a Cast that keeps every value", ["Cast"], chain)
