"""compare(): the same measures in the graph, by hand, and in numpy; nothing that differs looks equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.compare import comparison
from layerline.compare.compare_models import compare
from layerline.compare.tensor_distance import diff_arrays
from layerline.compare.value_pairs import why_two_sessions
from layerline.pipeline.errors import StageError
from tests.forms import as_ir

RNG = np.random.default_rng(0)


def model(text: str, *, opset: int = 20, ir: int = 10, **weights: np.ndarray) -> onnx.ModelProto:
    """An ONNX model from onnx's own text form; `weights` become initializers."""
    out = parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}, "f" : 1]>\n{text}')
    out.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    return out


def f32(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


LINEAR = """g (float[n, 3] x) => (float[n, 4] y) {
  h = MatMul (x, w)
  y = Relu (h)
}"""
W = RNG.standard_normal((3, 4)).astype(np.float32)


def test_elements_that_are_picked_otherwise_are_not_compared() -> None:
    text = """g (float[n] x) => (float[k] y) { s = Mul (x, w) c = Greater (s, t) z = NonZero (c)
  i = Transpose (z) y = GatherND (s, i) }"""
    first = model(text, w=f32(1, 1, 1), t=np.float32(1.5))
    feed = {"x": f32(1, 2, 3)}
    for weights, picked in ((f32(1, 1.1, 1), False), (f32(3, 0.5, 1), True)):
        by_name = {
            row.name: row
            for row in compare(
                as_ir(first), as_ir(model(text, w=weights, t=np.float32(1.5))), [feed], sizes_differ=True
            )
        }
        assert ("size" in by_name["y"].extra) is ("size" in by_name["z"].extra) is picked
        assert (by_name["y"].sqnr_db is None) is picked and by_name["s"].sqnr_db < 40
    assert by_name["y"].extra["size"] == "NonZero of z picks other elements"


def linear(noise: float = 0.0, opset: int = 20) -> onnx.ModelProto:
    return model(LINEAR, opset=opset, w=W + np.float32(noise))


def feeds(count: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": RNG.standard_normal((i + 1, 3)).astype(np.float32)} for i in range(count)]


def test_rows_follow_the_reference_and_carry_its_shapes_and_types() -> None:
    rows = compare(linear(), linear(), feeds())
    assert [(r.name, r.op, r.shape, r.dtype) for r in rows] == [
        ("h", "MatMul", ("n", 4), "float32"),
        ("y", "Relu", ("n", 4), "float32"),
    ]
    assert all(r.max_abs == 0 and r.sqnr_db == math.inf and r.cosine == 1.0 for r in rows)


def test_two_sessions_hand_over_few_values_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six values of 12 elements are 96 bytes each on two sides; an index comes with the data that it points at."""
    text = """g (float[n, 3] x) => (float[n, 4] y) {
      h = MatMul (x, w) a = Relu (h) b = Abs (a) c = Neg (b) i = ArgMax <axis = 1> (b) y = Exp (c) }"""
    reference, candidate = model(text, w=W), model(text, opset=18, w=W * np.float32(1.01))
    data = [{"x": np.random.default_rng(n).standard_normal((3, 3)).astype(np.float32)} for n in range(2)]
    whole = compare(as_ir(reference), as_ir(candidate), data)
    taps: list[list[str]] = []
    opened = OnnxRuntime.open

    def counting(runtime: OnnxRuntime, source: Any, names: Sequence[str] = ()) -> OrtSession:
        taps.append(list(names))
        return opened(runtime, source, names)

    monkeypatch.setattr(OnnxRuntime, "open", counting)
    monkeypatch.setattr(comparison, "HANDED_OVER", 200)
    assert compare(as_ir(reference), as_ir(candidate), data) == whole
    by_hand = [names for names in taps if names]
    # After two for the types. While the sizes are unknown all fit; then two of 96 bytes, or one and a smaller index.
    assert [len(names) for names in by_hand[:4]] == [6, 6, 6, 6] and by_hand[4:] == [
        ["h", "a"], ["h", "a"], ["b", "c"], ["b", "c"], ["i", "y", "b"], ["i", "y"],
    ]  # fmt: skip


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("opset", [20, 18])
def test_one_graph_and_two_sessions_measure_what_numpy_does(opset: int, isolated: bool) -> None:
    data = feeds()
    a, b = linear(), linear(1e-3, opset)
    assert (why_two_sessions(as_ir(a), as_ir(b)) is None) == (opset == 20)
    rows = {r.name: r for r in compare(a, b, data, isolated=isolated)}
    ha = np.concatenate([f["x"] @ W for f in data])
    hb = np.concatenate([f["x"] @ (W + np.float32(1e-3)) for f in data])
    for name, want in (("h", diff_arrays(ha, hb)), ("y", diff_arrays(np.maximum(ha, 0), np.maximum(hb, 0)))):
        for measure in ("max_abs", "mean_abs", "rel_l2", "cosine", "sqnr_db"):
            assert getattr(rows[name], measure) == pytest.approx(getattr(want, measure), rel=1e-3), measure
    if isolated:
        # Alone, the MatMul makes the whole error and the Relu none.
        assert rows["h"].extra["isolated_sqnr_db"] == pytest.approx(rows["h"].sqnr_db, abs=0.1)
        assert rows["y"].extra["isolated_sqnr_db"] == math.inf


def test_small_angles_do_not_cancel() -> None:
    a = np.ones(1000)
    b = a.copy()
    b[0] += 1e-6
    want = (1e-12 * 999 / 1000) / 2 / 1000
    assert 1.0 - diff_arrays(a, b).cosine == pytest.approx(want, rel=0.3)  # a double holds 1 - 1e-16


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20, 1e38])
def test_magnitude_changes_no_ratio(scale: float) -> None:
    identity = model("g (float[n] x) => (float[n] y) { y = Identity (x) }")
    half = model("g (float[n] x) => (float[n] y) { y = Mul (x, k) }", k=np.float32(0.5))
    (row,) = compare(identity, half, [{"x": f32(1, -2, 3) * np.float32(scale)}])
    assert row.rel_l2 == pytest.approx(0.5)
    assert row.sqnr_db == pytest.approx(6.0206, abs=1e-3)
    assert row.cosine == pytest.approx(1.0)


def test_sums_over_millions_keep_their_digits() -> None:
    identity = model("g (float[n] x) => (float[n] y) { y = Identity (x) }")
    plus = model("g (float[n] x) => (float[n] y) { y = Add (x, k) }", k=np.float32(2**-10))
    (row,) = compare(identity, plus, [{"x": np.ones(3_000_000, np.float32)}])
    assert row.rel_l2 == pytest.approx(2**-10, rel=1e-12)
    assert row.mean_abs == pytest.approx(2**-10, rel=1e-12)


IDENTITY = "g ({0}[n] x) => ({0}[n] y) {{ y = Identity (x) }}"


@pytest.mark.parametrize("dtype", ["float16", "double", "int8", "uint8", "int32", "int64", "uint64"])
def test_element_types(dtype: str) -> None:
    kind = np.dtype(dtype)
    double = model(
        f"g ({dtype}[n] x) => ({dtype}[n] y) {{ f = Cast <to=11> (x)\n g = Add (f, f)\n "
        f"y = Cast <to={helper.np_dtype_to_tensor_dtype(kind)}> (g) }}"
    )
    (row,) = compare(model(IDENTITY.format(dtype)), double, [{"x": np.array([1, 2, 3], kind)}])
    assert (row.max_abs, row.rel_l2, row.dtype) == (3.0, 1.0, kind.name)


def test_bool_and_bfloat16() -> None:
    identity, negated = (model(f"g (bool[n] x) => (bool[n] y) {{ y = {o} (x) }}") for o in ("Identity", "Not"))
    (row,) = compare(identity, negated, [{"x": np.array([True, False])}])
    assert row.max_abs == 1.0
    casts = [
        model(f"g (float[n] x) => (float[n] y) {{ h = Cast <to={t}> (x)\n y = Cast <to=1> (h) }}")
        for t in (TensorProto.FLOAT, TensorProto.BFLOAT16)
    ]
    rows = compare(*casts, [{"x": f32(1.0, 1.01)}], isolated=True)
    assert rows[0].max_abs == pytest.approx(1.01 - 1.0078125, rel=1e-3)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_great_integers_that_differ_never_look_equal(dtype: str) -> None:
    big = np.array([2**62 + 1], dtype)
    assert diff_arrays(big, big - 1).max_abs == 1.0
    for size in (1, 100):  # handed over, and reduced in the graph
        text = f"g ({dtype}[{size}] x) => ({dtype}[{size}] y) {{ y = Sub (x, k) }}"
        less, same = (model(text, k=np.array([k], dtype)) for k in (1, 0))
        (row,) = compare(same, less, [{"x": np.repeat(big, size)}])
        assert row.max_abs == 1.0


def masked(x: np.ndarray, keep: np.ndarray, value: float) -> list[onnx.ModelProto]:
    """A model that returns x, and one that returns `value` where `keep` is false."""
    text = "g (float[n] x) => (float[n] y) { y = Where (keep, x, v) }"
    return [model(text, keep=k, v=np.float32(value)) for k in (np.ones_like(keep), keep)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_sided_nonfinite_fails_with_counts(value: float) -> None:
    x = f32(1, 2, 3)
    a, b = masked(x, np.array([True, True, False]), value)
    (row,) = compare(a, b, [{"x": x}, {"x": x}])
    assert not row.passed
    assert (row.nonfinite_a, row.nonfinite_b, row.one_sided) == (0, 2, 2)
    assert row.max_abs == 0.0  # over what both have finite


def test_finite_values_beside_nonfinite_ones_keep_their_measures() -> None:
    """What is not finite is counted in a graph of its own, on the feeds and for the values that need it."""
    text = """g (float[n, 3] x) => (float[n, 4] y, float[n, 4] z) {
      h = MatMul (x, w)
      l = Log (h)
      y = Add (h, h)
      z = Exp (l)
    }"""
    a, b = model(text, w=np.abs(W)), model(text, w=np.abs(W) * np.float32(1.001))
    positive, mixed, negative = (np.array([[1, 2, s], [3, 1, s]], "f") for s in (1, -2, -9))
    for isolated in (False, True):
        rows = compare(a, b, [{"x": x} for x in (positive, mixed, negative)], isolated=isolated)
        alone = compare(a, model(text, opset=19, w=np.abs(W) * np.float32(1.001)),
                        [{"x": x} for x in (positive, mixed, negative)], isolated=isolated)  # fmt: skip
        for one, other in zip(rows, alone, strict=True):
            assert (one.name, one.nonfinite_a, one.one_sided) == (other.name, other.nonfinite_a, other.one_sided)
            assert one.max_abs == pytest.approx(other.max_abs, rel=1e-4) and one.rel_l2 == pytest.approx(
                other.rel_l2, rel=1e-4
            )
            if isolated:
                shown, expected = one.extra["isolated_sqnr_db"], other.extra["isolated_sqnr_db"]
                assert shown == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("value", "one_sided"), [(math.nan, 0), (math.inf, 0)])
def test_nonfinite_on_both_sides_is_flagged_not_equal(value: float, one_sided: int) -> None:
    identity = model(IDENTITY.format("float"))
    (row,) = compare(identity, identity, [{"x": f32(1, value)}], isolated=True)
    assert (row.nonfinite_a, row.nonfinite_b, row.one_sided) == (1, 1, one_sided)
    assert row.passed and row.rel_l2 == 0.0
    assert row.extra["flag"] == "NaN or Inf on both sides"


def test_infinity_of_the_other_sign_and_nan_against_infinity_are_one_sided() -> None:
    assert diff_arrays(f32(np.inf, np.nan, 1), f32(-np.inf, np.inf, 1)).one_sided == 2
    negate = model("g (float[n] x) => (float[n] y) { y = Neg (x) }")
    (row,) = compare(model(IDENTITY.format("float")), negate, [{"x": f32(np.inf, 0)}])
    assert row.one_sided == 1 and not row.passed


def test_empty_tensors_and_scalars() -> None:
    identity = model(IDENTITY.format("float"))
    (row,) = compare(identity, identity, [{"x": np.zeros(0, np.float32)}])
    assert (row.max_abs, row.rel_l2, row.cosine) == (0.0, 0.0, 1.0)
    scalar = model("g (float x) => (float y) { y = Identity (x) }")
    (row,) = compare(scalar, scalar, [{"x": np.array(2, np.float32)}])
    assert row.shape == () and row.max_abs == 0.0


SHAPES = [("[n, 1]", "y = Identity (x)"), ("[1, n]", "y = Transpose (x)"), ("[n]", "y = Reshape (x, flat)")]


@pytest.mark.parametrize(("shape", "body"), SHAPES[1:])
@pytest.mark.parametrize("declared", [True, False])
def test_other_shapes_are_a_mismatch_and_never_broadcast(shape: str, body: str, declared: bool) -> None:
    a, b = (
        model(f"g (float[n, 1] x) => (float{s if declared else ''} y) {{ {t} }}", flat=np.array([-1]))
        for s, t in (SHAPES[0], (shape, body))
    )
    (row,) = compare(a, b, [{"x": np.ones((3, 1), np.float32)}], isolated=True)
    assert not row.passed
    assert "shape (3, 1) against" in str(row.extra["mismatch"])


def test_outputs_are_paired_by_position_and_values_by_name() -> None:
    renamed = model(LINEAR.replace("y", "z"), w=W)
    assert [r.name for r in compare(linear(), renamed, feeds())] == ["h", "y"]
    other = model(LINEAR.replace("h", "k").replace("y", "z"), w=W)
    assert [r.name for r in compare(linear(), other, feeds())] == ["y"]
    assert [r.name for r in compare(linear(), other, feeds(), pairs={"h": "k"})] == ["h", "y"]
    with pytest.raises(StageError, match="no value called 'nope'"):
        compare(linear(), other, feeds(), pairs={"h": "nope"})


def test_an_output_that_is_an_input() -> None:
    text = "g (float[n] x) => (float[n] y, float[n] x) { y = Relu (x) }"
    rows = compare(model(text), model(text), [{"x": f32(-1, 1)}], isolated=True)
    assert [(r.name, r.op) for r in rows] == [("y", "Relu"), ("x", "Input")]


def test_same_named_functions_with_other_bodies_stay_apart() -> None:
    text = """g (float[n] x) => (float[n] y) {{ y = f.act (x) }}
    <domain: "f", opset_import: ["" : 20, "f" : 1]> act (a) => (b) {{ c = inner (a)\n b = Identity (c) }}
    <domain: "f", opset_import: ["" : 20]> inner (a) => (b) {{ b = {} (a) }}""".replace("inner (a)\n", "f.inner (a)\n")
    relu, neg = (model(text.format(op)) for op in ("Relu", "Neg"))
    (row,) = compare(relu, neg, [{"x": f32(-1, 2)}], isolated=True)
    assert row.max_abs == 4.0


BRANCHES = """g (float[n, 3] x, bool c) => (float[n, 4] y) {{
  h = MatMul (x, w)
  y = If (c) <then_branch = t () => (float[n, 4] p) {{ q = MatMul (x, w) p = Add (q, one) }},
              else_branch = e () => (float[n, 4] p) {{ q = {} (h) p = Identity (q) }}>
}}"""


@pytest.mark.parametrize("c", [True, False])
def test_branches_read_the_outer_scope_of_their_own_copy(c: bool) -> None:
    one = np.float32(1)
    a, b = model(BRANCHES.format("Relu"), w=W, one=one), model(BRANCHES.format("Relu"), w=W + 1, one=one)
    data = [{"x": f32([1, 2, 3]), "c": np.array(c)}]
    rows = {r.name: r for r in compare(a, b, data, isolated=True)}
    assert set(rows) == {"h", "y"}
    assert rows["h"].max_abs == pytest.approx(6.0, rel=1e-5)
    # The else branch only passes h on; the then branch multiplies by the other weight itself.
    assert (rows["y"].extra["isolated_sqnr_db"] == math.inf) == (not c)


def test_isolated_casts_where_the_candidate_is_of_another_type() -> None:
    half = model(
        """g (float[n, 3] x) => (float[n, 4] y) {
      xh = Cast <to = 10> (x)
      h = MatMul (xh, wh)
      r = Relu (h)
      y = Cast <to = 1> (r)
    }""",
        wh=W.astype(np.float16),
    )
    rows = {r.name: r for r in compare(linear(), half, feeds(), isolated=True)}
    assert 50 < rows["h"].sqnr_db < 90
    assert rows["y"].extra["isolated_sqnr_db"] > rows["y"].sqnr_db - 1


def test_tolerances_bound_relative_l2_and_the_rest_is_not_gated() -> None:
    rows = compare(linear(), linear(1e-2), feeds(), tolerances={"h": 1e-6})
    assert [r.passed for r in rows] == [False, True]
    assert rows[1].tolerance is None


TOPK = "g (float[1,3] x) => (float[1,3] l, int64[1,{k}] i) {{ l = Gather <axis=1> (x, order)\n {op} }}"


def ranked(order: list[int], op: str, k: int = 3) -> onnx.ModelProto:
    return model(TOPK.format(op=op, k=k), order=np.array(order), k=np.array([k]))


@pytest.mark.parametrize(
    ("op", "k"),
    [
        ("v, i = TopK (l, k)", 3),
        ("v, i = TopK <axis=1> (l, k)", 2),
        ("v, i = TopK <sorted=0> (l, k)", 2),
        ("i = ArgMin <axis=1> (l)", 1),
        ("j = ArgMin <axis=-1, keepdims=0> (l)\n i = Reshape (j, one_one)", 1),
    ],
)
def test_near_ties_are_judged_by_the_values_they_point_at(op: str, k: int) -> None:
    """T04: the positions differ by one, the values by 2e-8."""
    x = {"x": f32([0.99, 0.00500001, 0.00499999])}
    a, b = ranked([0, 1, 2], op, k), ranked([0, 2, 1], op, k)
    for m in (a, b):
        m.graph.initializer.append(numpy_helper.from_array(np.array([1, 1]), "one_one"))
    rows = {r.name: r for r in compare(a, b, [x], tolerances={"l": 1e-6, "i": 1e-6})}
    assert rows["i"].passed
    assert rows["i"].max_abs < 3e-8


@pytest.mark.parametrize("two_sessions", [False, True])
@pytest.mark.parametrize("shift", [1, 2, 7])
def test_wrong_indices_fail_whatever_the_data(shift: int, two_sessions: bool) -> None:
    text = """g (float[n,3] x) => (float[n,3] l, int64[n] i) {{
      l = Identity (x)\n j = ArgMax <axis=1,keepdims=0> (l)\n {} }}"""
    right = model(text.format("i = Identity (j)"))
    wrong = model(text.format("i = Add (j, s)"), opset=19 if two_sessions else 20, s=np.array([shift]))
    rows = compare(right, wrong, [{"x": f32([3, 2, 1], [5, 4, 0])}], tolerances={"l": 1e-6})
    by_name = {r.name: r for r in rows}
    assert by_name["l"].passed
    assert not by_name["i"].passed


@pytest.mark.parametrize("columns", [5, 500])
def test_indices_into_a_stored_tensor(columns: int) -> None:
    text = "g (int64[n] x) => (int64[n] y) {\n i = ArgMax <axis=-1,keepdims=0> (table)\n y = Add (x, i) }"
    table = np.arange(2 * columns, dtype="f").reshape(2, columns)
    rows = compare(model(text, table=table), model(text, table=table), [{"x": np.array([1, 2])}])
    assert [(r.name, r.passed) for r in rows] == [("i", True), ("y", True)]
    wrong = model(text, table=table[:, ::-1].copy())
    rows = compare(model(text, table=table), wrong, [{"x": np.array([1, 2])}])
    assert [r.max_abs for r in rows] == [columns - 1, columns - 1], "the values pointed at, and the positions"


@pytest.mark.parametrize("columns", [5, 500])
@pytest.mark.parametrize("taken", [(), ("table",)], ids=["stored", "an input as well"])
def test_indices_in_no_order_into_a_stored_tensor(columns: int, taken: tuple[str, ...]) -> None:
    """As two sessions, which have to be asked for the tensor."""
    text = "g (int64[1] k) => (int64[2, n] i) {\n v, i = TopK <sorted=0> (table, k) }"
    table = np.random.default_rng(0).random((2, columns), "f")
    one, other = (model(text, table=t) for t in (table, table[:, ::-1].copy()))
    for m in (one, other):
        m.graph.input.extend(onnx.helper.make_tensor_value_info(n, 1, table.shape) for n in taken)
    for b, passed in ((one, True), (other, False)):
        [row, *_] = [r for r in compare(one, b, [{"k": np.array([3])}], tolerances={"i": 0.0}) if r.name == "i"]
        assert row.passed is passed


def test_sequences_and_strings_are_compared_by_hand() -> None:
    text = "g (float[4] x) => (seq(float[n]) y) {{ k = Constant <value_ints = [{}]> ()\n y = SplitToSequence (x, k) }}"
    a, b = (model(text.format(k)) for k in ("1,3", "2,2"))
    feed = {"x": f32(1, 2, 3, 4)}
    assert compare(a, a, [feed])[-1].passed
    assert not compare(a, b, [feed])[-1].passed


def test_no_feed_and_wrong_feeds_are_named() -> None:
    with pytest.raises(StageError, match="no sample"):
        compare(linear(), linear(), [])
    with pytest.raises(StageError, match="unknown"):
        compare(linear(), linear(), [{"z": f32([1, 2, 3])}])


def test_a_dropped_input_is_fed_to_the_side_that_has_it() -> None:
    more = model("g (float[n, 3] x, float[n] z) => (float[n, 4] y) {\n h = MatMul (x, w)\n y = Relu (h) }", w=W)
    data = [{"x": f32([1, 2, 3]), "z": f32(1)}]
    for opset in (20, 18):
        assert all(r.max_abs == 0 for r in compare(more, linear(opset=opset), data))
        assert all(r.max_abs == 0 for r in compare(linear(opset=opset), more, data))


def test_values_drawn_at_random_are_named_and_not_judged() -> None:
    """T11."""
    text = """g (float[n] x) => (float[n] y, float[n] z) {{
      r = {} (x)
      y = Add (x, r)
      z = Neg (x)
    }}"""
    a, b = model(text.format("RandomNormalLike")), model(text.format("RandomUniformLike"))
    rows = {r.name: r for r in compare(a, b, [{"x": f32(1, 2, 3)}], tolerances={"y": 1e-6, "z": 1e-6})}
    assert rows["y"].extra == {"nondeterministic": "RandomNormalLike"}
    assert rows["y"].passed and rows["y"].max_abs is None
    assert rows["z"].max_abs == 0.0 and rows["z"].tolerance == 1e-6


MASKS = [-3.4028234663852886e38, -1e30, -9e15, -1e9, -65504.0, -1e4, -20_000.0]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("opset", [20, 11])
@pytest.mark.parametrize("isolated", [False, True])
def test_masked_scores_are_measured_alike_in_the_graph_and_in_numpy(mask: float, opset: int, isolated: bool) -> None:
    """A mask in the graph, one among the inputs, and a number that is no mask: as numpy measures them."""
    text = "g (float[n, 40] x, float[n, 40] m) => (float[n, 40] y) { s = Mul (x, k)\n y = Add (s, m) }"
    exact, rough = (model(text, opset=opset, k=np.float32(k)) for k in (1.0, 1.01))
    x = RNG.standard_normal((50, 40)).astype(np.float32)
    m = np.where(RNG.random((50, 40)) < 0.3, np.float32(mask), np.float32(0.0))
    rows = {r.name: r for r in compare(exact, rough, [{"x": x, "m": m}, {"x": x, "m": m}], isolated=isolated)}
    want = diff_arrays(x + m, x * np.float32(1.01) + m)
    assert want.masked == (0 if mask == -20_000.0 else (m < 0).sum())
    assert rows["y"].extra.get("masked", 0) == 2 * want.masked
    assert rows["y"].sqnr_db == pytest.approx(want.sqnr_db, abs=1e-3)
    assert rows["y"].max_abs == pytest.approx(want.max_abs)
    assert rows["s"].sqnr_db == pytest.approx(40.0, abs=0.1)
    assert "masked" not in rows["s"].extra
    if isolated and want.masked:
        assert rows["y"].extra["isolated_sqnr_db"] == math.inf
