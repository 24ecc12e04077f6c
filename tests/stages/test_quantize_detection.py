"""Models whose outputs have as many rows as numbers decide: boxes that NMS finds, elements that are not 0."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from layerline.export.signature import Value
from layerline.graph.analysis.counted_values import counted
from layerline.parity import output_sqnr
from layerline.parity.default_session import check
from layerline.stages.quantize import Quantize
from tests.stages.test_quantize import model, rows, work  # noqa: F401 - work is a fixture

RNG = np.random.default_rng(5)
X = (Value(name="x", dtype="float32", shape=("n", 3, 16, 16)),)
DATA = "X = rng.standard_normal((40, 3, 16, 16)).astype(np.float32)\ndef calib_data():\n    return X\n"
WEIGHTS = {
    "w1": RNG.standard_normal((8, 3, 3, 3)).astype(np.float32) / 3,
    "w2": RNG.standard_normal((6, 8, 3, 3)).astype(np.float32) / 6,
}
TRUNK = """a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1)
  r = Relu (a)
  h = Conv <pads = [1, 1, 1, 1]> (r, w2)
  flat = Reshape (h, shape)
  cells = Transpose <perm = [0, 2, 1]> (flat)
  centre, size, logits = Split <axis = 2> (cells, sizes)
  extent = Exp (size)
  half = Mul (extent, point5)
  low = Sub (centre, half)
  high = Add (centre, half)
  boxes = Concat <axis = 2> (low, high)"""
# Class probabilities by themselves, as in YOLO: what NMS finds picks the rows.
YOLO = f"""g (float[n, 3, 16, 16] x) => (float[k, 4] found_boxes, float[k] found_scores, int64[k, 3] found) {{
  {TRUNK}
  probabilities = Sigmoid (logits)
  scores = Transpose <perm = [0, 2, 1]> (probabilities)
  found = NonMaxSuppression (boxes, scores, most, overlap, least)
  box_index = Gather <axis = 1> (found, box_columns)
  found_boxes = GatherND (boxes, box_index)
  found_scores = GatherND (scores, found)
}}"""
# A softmax with a background class, as in SSD: first whatever exceeds a threshold, then the best of these.
SSD = f"""g (float[n, 3, 16, 16] x) => (float[m, 4] best_boxes, float[m] best) {{
  {TRUNK}
  probabilities = Softmax <axis = 2> (logits)
  scores = Gather <axis = 2> (probabilities, one)
  above = Greater (scores, least)
  places = NonZero (above)
  index = Transpose <perm = [1, 0]> (places)
  kept = GatherND (scores, index)
  kept_boxes = GatherND (boxes, index)
  count = Shape (kept)
  some = Div (count, two)
  best, order = TopK <axis = 0> (kept, some)
  best_boxes = Gather (kept_boxes, order)
}}"""
CONSTANTS = {
    "shape": np.array([0, 6, 64]),
    "sizes": np.array([2, 2, 2]),
    "point5": np.float32(0.5),
    "most": np.array([30]),
    "overlap": np.array([0.5], np.float32),
    "least": np.array([0.5], np.float32),
    "box_columns": np.array([0, 2]),
    "one": np.array(1),
    "two": np.array([2]),
}


def detector(text):
    return model(text, **WEIGHTS, **{name: array for name, array in CONSTANTS.items() if name in text})


def prepared(work, text):  # noqa: F811
    feeds = [{"x": RNG.standard_normal((n, 3, 16, 16)).astype(np.float32)} for n in (2, 1, 5)]
    return work(DATA, detector(text), X, feeds)


@pytest.mark.parametrize("mode", ["int8", "fp16"])
@pytest.mark.parametrize(("text", "outputs", "node"), [(YOLO, 3, "NonMaxSuppression"), (SSD, 2, "NonZero")])
def test_a_detector_is_judged_by_its_boxes_and_scores_before_they_are_counted(work, text, outputs, node, mode):  # noqa: F811
    report = Quantize(mode=mode).run(prepared(work, text))
    assert report.passed, report.gates
    gate = next(gate for gate in report.gates if gate.name == "output SQNR")
    assert gate.seen.split()[0] in ("boxes", "scores") and report.metrics["output_sqnr_db"] > 20
    [note] = [note for note in report.notes if "decides the size of" in note]
    assert note.startswith(node) and "judged by" in note and {"boxes", "scores"} <= set(note.replace(",", "").split())
    by_name = rows(report)
    # Layers before keep all their figures, with the error of their own.
    for name in ("a", "h", "boxes", "scores"):
        assert by_name[name].sqnr_db > 15 and by_name[name].extra["isolated_sqnr_db"] > 15
    assert all(record.passed for record in report.records)
    if mode == "int8":
        differing = [record for record in report.records if "size" in record.extra]
        assert len(differing) >= outputs
        text = str(differing[-1].extra["size"])
        assert text.startswith(f"size differs by {node}") and "against" in text
        # The layers' effects are measured at the values that stand for the outputs.
        assert 15 < by_name["h"].extra["outputs_sqnr_db"] < 100


def test_a_search_judges_a_detector_by_the_same_values(work):  # noqa: F811
    report = Quantize(search=True, min_db=35.0, repairs=[]).run(prepared(work, YOLO))
    assert report.passed, report.gates
    assert report.metrics["output_sqnr_db"] > 35


TOKENS = "g (float[n, 8] x) => (float[k] y) {{ h = MatMul (x, w) {} }}"
IF = """s = ReduceSum <keepdims = 0> (h) i = Cast <to = 9> (s) y = If (i) <
  then_branch = t () => (float[n, 8] a) { a = Identity (h) }, else_branch = e () => (float"""
LOOP = """last, y = Loop (k, , s) <body = b (int64 i, bool c, float v) => (bool d, float o, float e) {
  o = Neg (v) e = Identity (v)"""
CASES = {
    "kept = Compress (h, mask) y = Relu (kept)": ([], ()),
    "u = Unique (h) y = Relu (u)": (["u", "y"], ("h",)),
    "c = Greater (h, zero) keep = Reshape (c, flat) y = Compress (h, keep)": (["y"], ("h",)),
    "s = ReduceSum <keepdims = 0> (h) i = Cast <to = 7> (s) k = Reshape (i, flat) v = Reshape (h, flat) "
    "y, p = TopK (v, k)": (["y", "p"], ("v", "s")),
    # Indices of what is not 0 among constants, and sizes of the inputs, are the same in both models.
    "s = Shape (h) z = NonZero (s) v = Reshape (h, flat) y = Relu (v)": ([], ()),
    # The branch that is taken, and the number of rounds.
    f"{IF}[8] b) {{ b = ReduceMax <keepdims = 0> (h, zero) }}>": (["y"], ("h", "s")),
    f"{IF}[m, 8] b) {{ b = Neg (h) }}>": ([], ()),
    f"s = ReduceSum <keepdims = 0> (h) k = Cast <to = 7> (s) {LOOP} d = Identity (c) }}>": (["y"], ("s",)),
    f"s = ReduceSum <keepdims = 0> (h) k = Constant <value_int = 3> () {LOOP} d = Identity (c) }}>": ([], ()),
    f"s = ReduceSum <keepdims = 0> (h) k = Constant <value_int = 3> () {LOOP} d = Less (v, zero) }}>": (["y"], ("s",)),
    # What is scattered into has its own size.
    "z = NonZero (h) t = Transpose (z) o = GatherND (h, t) y = ScatterND (h, t, o)": (["z", "t", "o"], ()),
}


@pytest.mark.parametrize("body", CASES)
def test_values_whose_size_depends_on_numbers(body):
    text = TOKENS.format(body)
    stored = {"w": np.eye(8, dtype=np.float32), "zero": np.float32(0), "flat": np.array([-1])}
    stored["mask"] = np.array([True, False])
    graph = model(text, **{name: array for name, array in stored.items() if f"{name})" in text or f", {name}" in text})
    values, sources = CASES[body]
    result = counted(ir.from_proto(graph).graph)
    assert ([*result.values], result.sources) == (values, sources)


def test_an_output_of_another_size_that_nothing_counts_has_lost_all():
    exact = model("g (float[n] x) => (float[k] y) { y = Neg (x) }")
    other = model("g (float[n] x) => (float[k] y) { y = Concat <axis = 0> (x, x) }")
    distances = output_sqnr.outputs(ir.from_proto(exact), ir.from_proto(other), [{"x": np.float32([1, 2])}])
    assert distances["y"].sqnr_db == -np.inf
    assert not output_sqnr.gates(distances, output_sqnr.Bounds(10.0, None))[0].passed


@pytest.mark.parametrize(
    ("last", "stored"),
    [
        ("y = ArgMax <axis = 1, keepdims = 0> (h)", {}),
        ("i = ArgMax <axis = 1, keepdims = 0> (h) y = Gather (table, i)", {"table": np.array([100, 7, 30])}),
        ("v, i = TopK <axis = 1> (h, k) j = Cast <to = 6> (i) y = Cast <to = 7> (j)", {"k": np.array([1])}),
    ],
)
def test_class_indices_are_compared_by_equality(last, stored):
    # Sample 1 of 4 changes its class, between two scores of like size: a distance of the scores would hide it.
    scores = np.float32([[9, 8, 0], [9, 8.9, 0], [0, 9, 8], [8, 0, 9]])
    text = "g (float[n, 3] x) => (int64[a] y) { h = Add (x, shift) " + last + " }"
    exact, other = (ir.from_proto(model(text, shift=np.float32(shift), **stored)) for shift in ([0, 0, 0], [0, 0.2, 0]))
    distances = output_sqnr.outputs(exact, other, [{"x": scores[:2]}, {"x": scores[2:]}])
    assert distances["y"].sqnr_db == pytest.approx(10 * np.log10(4))
    assert (distances["y"].cosine, distances["y"].differing) == (0.75, "1 of 4 elements differ")
    [gate] = output_sqnr.gates(distances, output_sqnr.Bounds(10.0, None))
    assert not gate.passed and gate.seen == "y has 6.0 dB: 1 of 4 elements differ"
    assert output_sqnr.outputs(exact, exact, [{"x": scores}])["y"].sqnr_db == np.inf


@pytest.mark.parametrize("last", ["y = Greater (h, t)", "c = Greater (h, t) y = Cast <to = 9> (c)"])
def test_truth_values_are_compared_by_equality(last):
    # Where the reference has no true value, a ratio of powers would say nothing.
    text = "g (float[n] x) => (bool[n] y) { h = Add (x, shift) " + last + " }"
    exact, other = (ir.from_proto(model(text, shift=np.float32(s), t=np.float32(9))) for s in (0, 0.2))
    distances = output_sqnr.outputs(exact, other, [{"x": np.float32([9, 8.9, 8, 0])}])
    assert distances["y"].differing == "2 of 4 elements differ" and distances["y"].cosine == 0.5


def test_indices_in_any_order_are_compared_in_one():
    text = (
        "g (float[n, 3] x) => (float[n, k] v, int64[n, k] y) { v, y = TopK <axis = 1, sorted = 0, largest = 0> (x, k) }"
    )
    exact = ir.from_proto(model(text, k=np.array([2])))
    other = ir.from_proto(model(text.replace("sorted = 0", "sorted = 1"), k=np.array([2])))
    distances = output_sqnr.outputs(exact, other, [{"x": np.float32([[3, 2, 1], [1, 2, 3]])}])
    assert distances["y"].sqnr_db == np.inf and distances["y"].differing == "0 of 4 elements differ"


def test_other_integers_have_a_distance():
    exact = model("g (float[n] x) => (int64[n] y) { y = Cast <to = 7> (x) }")
    other = model("g (float[n] x) => (int64[n] y) { h = Add (x, one) y = Cast <to = 7> (h) }", one=np.float32(1))
    distances = output_sqnr.outputs(ir.from_proto(exact), ir.from_proto(other), [{"x": np.float32([100, 100])}])
    assert distances["y"].sqnr_db == pytest.approx(40) and distances["y"].differing == ""


def test_a_default_session_that_finds_another_number_is_judged_by_what_is_counted(tmp_path, monkeypatch):
    from layerline.parity import default_session

    net = model(
        "g (float[n] x) => (int64[1, k] y) { h = Mul (x, x) z = Greater (h, c) y = NonZero (z) }", c=np.float32(1)
    )
    onnx.save(net, tmp_path / "model.onnx")
    feed = {"x": np.float32([0.5, 1.5, 2.0])}
    expected = [{"y": np.array([[1, 2, 3]])}]
    gates, _ = check(tmp_path / "model.onnx", [feed], allowed={}, expected=expected)
    assert gates == []
    monkeypatch.setattr(default_session, "_sources_agree", lambda *_: False)
    gates, _ = check(tmp_path / "model.onnx", [feed], allowed={}, expected=expected)
    assert "shape (1, 3) against (1, 2)" in gates[0].seen
