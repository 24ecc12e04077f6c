"""What a graph takes is counted from what is written in it: values, those that are alive together, endless loops."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from layerline.onnx_import import allocation_sizes
from layerline.pipeline.errors import StageError
from tests.forms import as_ir

GB = 10**9


def _model(body: str, gives: str = "float[k]", **stored: np.ndarray) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => ({gives} y) {{ {body} }}'
    out = parser.parse_model(text)
    out.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in stored.items())
    return out


def _sizes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


STATIC = {
    "ConstantOfShape": _model("c = ConstantOfShape (s) y = Add (c, x)", s=_sizes(2**31)),
    "Expand": _model("c = Expand (one, s) y = Add (c, x)", one=np.ones(1, "f"), s=_sizes(2**31)),
    "Range": _model("c = Range (a, b, d) f = Cast <to = 1> (c) y = Add (f, x)",
                    a=np.array(0, np.int64), b=np.array(2**40, np.int64), d=np.array(1, np.int64)),
    "Tile": _model("c = Tile (one, s) y = Add (c, x)", one=np.ones(64, "f"), s=_sizes(2**24)),
    "Pad": _model("c = Pad (one, s) y = Add (c, x)", one=np.ones(1, "f"), s=_sizes(2**29, 2**29)),
    "OneHot": _model("c = OneHot (i, d, v) y = Add (c, x)", "float[m, k]",
                     i=_sizes(0, 1), d=np.array(2**30, np.int64), v=np.array([0, 1], "f")),
    "RandomNormal": _model("c = RandomNormal <shape = [2147483648]> () y = Add (c, x)"),
    "Resize": _model("c = Resize (one, , , s) y = Add (c, x)", "float[a, b, c, d]",
                     one=np.ones((1, 1, 2, 2), "f"), s=_sizes(1, 1, 65536, 65536)),
}  # fmt: skip


@pytest.mark.parametrize("op", STATIC)
def test_a_value_that_is_too_large_is_named(op: str) -> None:
    with pytest.raises(StageError, match=r"it holds .* GB at once for any input") as error:
        allocation_sizes.refuse_large(as_ir(STATIC[op]), 8 * GB, "raise it")
    assert f"{op} c of " in error.value.what and error.value.hint == "raise it"


def test_values_that_are_alive_together_are_added_up() -> None:
    """Twelve of 1 GB, all made before the first is read; in turns, three of them are alive at once."""
    made = [f"c{i} = ConstantOfShape (s)" for i in range(12)]
    total = [f"t{i} = Add ({'x' if i == 0 else f't{i - 1}'}, c{i})" for i in range(12)]
    stored = {"s": _sizes(250_000_000)}
    with pytest.raises(StageError, match=r"it holds 13\.00 GB at once.*and 10 more"):
        allocation_sizes.refuse_large(
            as_ir(_model(f"{' '.join(made + total)} y = Identity (t11)", **stored)), 8 * GB, ""
        )
    turns = " ".join(f"{a} {b}" for a, b in zip(made, total, strict=True))
    allocation_sizes.refuse_large(as_ir(_model(f"{turns} y = Identity (t11)", **stored)), 3 * GB, "")
    with pytest.raises(StageError, match=r"it holds 3\.00 GB at once"):
        allocation_sizes.refuse_large(as_ir(_model(f"{turns} y = Identity (t11)", **stored)), 3 * GB - 1, "")


_LOOP = """y = Loop ({rounds}, {start}, x) <
  body = b (int64 i, bool c, float[n] a) => (bool again, float[n] o) {{ o = Add (a, a) again = {again} }}
>"""


@pytest.mark.parametrize(
    ("rounds", "start", "again", "told"),
    [
        (2**62, "yes", "Identity (c)", "it runs 4611686018427387904 rounds"),
        (2**62, "", "Identity (yes)", "it runs 4611686018427387904 rounds"),
        (None, "yes", "Identity (c)", "it runs without an end"),
        (None, "", "Identity (yes)", "it runs without an end"),
        (2**62, "yes", "Less (i, limit)", ""),
        (2**62, "no", "Identity (c)", ""),
        (1000, "yes", "Identity (c)", ""),
    ],
)
def test_a_loop_that_nothing_ends_is_named(rounds: int | None, start: str, again: str, told: str) -> None:
    stored = {"yes": np.array(True), "no": np.array(False), "limit": np.array(5, np.int64)}
    if rounds is not None:
        stored["rounds"] = np.array(rounds, np.int64)
    body = _LOOP.format(rounds="" if rounds is None else "rounds", start=start, again=again)
    model = as_ir(_model(body, "float[n]", **stored))
    model.graph[0].name = "spin"
    if not told:
        allocation_sizes.refuse_endless(model)
        return
    with pytest.raises(StageError, match=told) as error:
        allocation_sizes.refuse_endless(model)
    assert error.value.where == "node spin"
