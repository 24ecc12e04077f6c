"""The search for the cheapest formats, on models in which the layers that lose the accuracy are planted."""

import dataclasses
import json
import re

import numpy as np
import onnx
import pytest
from pydantic import ValidationError

from layerline import cli
from layerline.calib.plan import QuantPlan
from layerline.export.signature import Value
from layerline.graph.io import onnx_files
from layerline.stages.quantize import Quantize
from tests.forms import as_ir
from tests.stages.test_quantize import model, work  # noqa: F401 - a fixture

RNG = np.random.default_rng(3)
EYE = np.eye(8, dtype=np.float32)
MIX = EYE + 0.1 * RNG.standard_normal((8, 8)).astype(np.float32)
# A channel of 1000 that the next product multiplies by 0: its scale leaves the others less than one step.
HUGE = np.float32([0, 0, 0, 0, 0, 0, 0, 1000])
DEAF = EYE.copy()
DEAF[7] = 0
X = (Value(name="x", dtype="float32", shape=("n", 8)),)
FEEDS = [{"x": RNG.random((n, 8)).astype(np.float32)} for n in (4, 1)]
ONE = model(
    """g (float[n, 8] x) => (float[n, 8] y) {
  h = MatMul (x, w1)
  b = Add (h, huge)
  bad = MatMul (b, w2)
  r = Relu (bad)
  y = MatMul (r, w3)
}""",
    w1=MIX, w2=DEAF, w3=MIX, huge=HUGE,
)  # fmt: skip
TWO = model(
    """g (float[n, 8] x) => (float[n, 8] y) {
  b = Add (x, huge)
  bad = MatMul (b, w2)
  c = Add (bad, huge)
  y = MatMul (c, w2)
}""",
    w2=DEAF, huge=HUGE,
)  # fmt: skip
TASK = """
X = (0.2 * rng.random((200, 8)) + np.eye(8)[np.arange(200) % 7]).astype(np.float32)
W, D = np.load(__file__.replace("task.py", "mix.npy")), np.diag([1.0] * 7 + [0.0])
def calib_data():
    return X
"""
LABELS = """
def eval_data():
    y = np.maximum(X @ W @ D, 0) @ W
    return X, y.argmax(1)
"""
PLAIN_LABELS = """
def eval_data():
    return X, (X @ D).argmax(1)
"""


@pytest.fixture
def searched(work, tmp_path):  # noqa: F811
    """Runs a search on a model; gives the report and the work."""

    def run(net=ONE, task=LABELS, **fields):
        np.save(tmp_path / "mix.npy", MIX)
        made = work(TASK + task, net=net, inputs=X, feeds=FEEDS)
        return Quantize(**{"search": True, "calibrator": "minmax", **fields}).run(made), made

    return run


def formats(report):
    return {row["value"]: row["format"] for row in report.tables["search"]}


@pytest.mark.parametrize(("fields", "chosen"), [({}, "fp16"), ({"rest": "fp32"}, "fp32"), ({"rest": "bf16"}, "bf16")])
def test_exactly_the_layer_that_loses_the_accuracy_stays_float(searched, fields, chosen):
    report, made = searched(**fields)
    assert report.passed, report.gates
    assert formats(report) == {"bad": chosen, "h": "int8", "y": "int8"}
    assert report.tables["search"][0]["value"] == "bad"
    assert report.metrics["accuracy"] == report.metrics["accuracy_float"] == 1.0
    assert report.metrics["evaluations"] == (3 if chosen == "fp16" else 2)
    plan = QuantPlan.from_json((made.out / "plan.json").read_text())
    assert {v.name for v in plan.values} == {"x", "w1", "r", "w3"}
    assert any(k.name == "bad" and k.reason.startswith("search:") for k in plan.kept)
    note = next(n for n in report.notes if n.startswith("full evaluations"))
    assert "write in pipe.yaml, beside the budget: `quantize: {search: true}`; formats alone" in note
    assert note.endswith(f'`quantize: {{layers: {{"bad": "{chosen}"}}}}`')


def test_the_fragment_gives_the_same_formats_without_a_search(searched):
    first, made = searched()
    plan = (made.out / "plan.json").read_text()
    again, made = searched(search=False, layers={"bad": "fp16"}, max_drop="0.5%")
    assert again.passed and again.metrics["accuracy"] == first.metrics["accuracy"]
    values = [json.loads(text)["values"] for text in (plan, (made.out / "plan.json").read_text())]
    assert values[0] == values[1]


def test_a_budget_that_holds_already_keeps_no_layer_and_takes_one_evaluation(searched):
    report, _ = searched(max_drop=1.0)
    assert report.passed and report.metrics["evaluations"] == 1
    assert set(formats(report).values()) == {"int8"}
    assert [row["why"] for row in report.tables["search"]] == ["the budget holds with it in int8"] * 3


def test_layers_that_stay_float_for_other_reasons_are_in_the_table(searched):
    report, _ = searched(layers={"h": "skip"})
    row = report.tables["search"][-1]
    assert (row["value"], row["format"], row["why"]) == ("h", "float", "layers: h is skip")
    assert formats(report)["bad"] == "fp16" and report.passed


def test_a_budget_that_no_assignment_keeps_fails_with_the_best_reached(searched):
    report, _ = searched(net=TWO, task=PLAIN_LABELS, max_drop=0.0)
    gate = report.gates[0]
    assert not report.passed and gate.name == "search"
    assert gate.seen.startswith("the best reached is accuracy 0.") and gate.seen.endswith("of 2 layers in int8")
    assert report.failure().exit_code == 1


def test_without_a_metric_the_outputs_are_the_budget(searched):
    report, _ = searched(task="")
    assert report.passed and formats(report)["bad"] == "fp16" and formats(report)["h"] == "int8"
    assert report.metrics["output_sqnr_db"] >= 25
    assert next(g for g in report.gates if g.name == "output SQNR").expected == "at least 25 dB"
    low, _ = searched(task="", min_db=-50.0)
    assert set(formats(low).values()) == {"int8"}
    near, _ = searched(task="", min_db=-50.0, min_cosine=0.999)
    assert formats(near)["bad"] == "fp16"


def test_eval_data_that_changes_between_calls_is_refused(searched):
    from layerline.pipeline.errors import TaskError

    with pytest.raises(TaskError, match="other samples than at its first call"):
        searched(task="def eval_data():\n    x = rng.random((50, 8)).astype(np.float32)\n    return x, x.argmax(1)\n")


def test_a_search_takes_mode_int8():
    with pytest.raises(ValidationError, match="mode: int8"):
        Quantize(mode="fp16", search=True)


def test_pipe_tune_prints_the_table_and_is_cached_the_second_time(tmp_path, monkeypatch, capsys):
    onnx.save(ONE, tmp_path / "net.onnx")
    np.save(tmp_path / "mix.npy", MIX)
    text = "import numpy as np\nrng = np.random.default_rng(1)" + TASK + LABELS
    (tmp_path / "task.py").write_text(text.replace("__file__", repr(str(tmp_path / "task.py"))))
    (tmp_path / "pipe.yaml").write_text(
        "import-onnx: {file: net.onnx}\nquantize: {calibrator: minmax, max_drop: 0.002}\n"
    )
    monkeypatch.setenv("COLUMNS", "400")
    states = []
    for arguments in (["tune"], ["tune", "--json"]):
        assert not cli.app([*arguments, "-C", str(tmp_path)], standalone_mode=False)
        states.append(capsys.readouterr().out)
    assert re.search(r"MatMul_bad +bad/cut +MatMul .* fp16 +in int8 the budget fails", states[0])
    # Evened out, the channel of 1000 loses one or two of the 200 samples; the budget allows none.
    assert re.search(r"equalize +kept .* accuracy 0\.99\d* .* with it, accuracy 0\.1\S+ .* without", states[0])
    assert 'repairs: [equalize], layers: {"MatMul_bad": "fp16"}}`' in states[0].replace("\n     ", " ")
    # The note says what to do next, and nothing else does.
    assert "to keep this choice for `pipe run all`, write in pipe.yaml" in states[0].replace("\n     ", " ")
    assert "next:" not in states[0]
    document = json.loads(states[1])
    assert [s["state"] for s in document["stages"]] == ["cached"] * 3
    assert document["report"]["tables"]["search"][0]["layer"] == "MatMul_bad"
    # The first of the two ways that the note names gives the very model that was judged.
    fields = "quantize: {calibrator: minmax, max_drop: 0.002, search: true}"
    (tmp_path / "pipe.yaml").write_text(f"import-onnx: {{file: net.onnx}}\n{fields}\n")
    assert not cli.app(["run", "quantize", "--json", "-C", str(tmp_path)], standalone_mode=False)
    assert [s["state"] for s in json.loads(capsys.readouterr().out)["stages"]] == ["cached"] * 3


NO_TARGETS = """
def eval_data():
    return X
"""


def test_a_model_without_a_layer_for_int8_and_without_a_metric_is_judged_by_its_outputs(searched):
    net = model("g (float[n, 8] x) => (float[n, 8] y) { y = Mul (x, huge) }", huge=HUGE)
    report, _ = searched(net=net, task=NO_TARGETS)
    assert [(gate.name, gate.passed) for gate in report.gates if gate.name != "onnxruntime runs it alike"] == [
        ("output SQNR", True)
    ]
    assert any("eval_data() gives no targets" in note for note in report.notes)


# Behind the first product one channel is 40 times the others; the second undoes that.
UNEVEN = np.float32([40, 1, 1, 1, 1, 1, 1, 1])
REPAIRED = model(
    """g (float[n, 8] x) => (float[n, 8] y) {
  h = Gemm (x, w1)
  r = Relu (h)
  y = Gemm (r, w2)
}""",
    w1=np.abs(MIX) * UNEVEN, w2=MIX / UNEVEN[:, None],
)  # fmt: skip


def test_repairs_are_measured_and_scaled_values_get_their_own_names(searched):
    net = onnx.shape_inference.infer_shapes(REPAIRED)
    plain, _ = searched(net=net, task="", search=False)
    report, made = searched(net=net, task="", search=False, repairs=["adaround", "smooth", "equalize"])
    rows = {row["repair"]: row for row in report.tables["repairs"]}
    assert list(rows) == ["equalize", "smooth", "adaround"]
    assert rows["equalize"]["outcome"] == "kept" and rows["smooth"]["measured"] == "no layer that it is for"
    assert rows["equalize"]["with_db"] > rows["equalize"]["without_db"] + 3
    assert report.metrics["output_sqnr_db"] > plain.metrics["output_sqnr_db"] + 3
    weights = {row["value"]: row["sqnr_db"] for row in report.tables["quantized"] if row["role"] == "weight"}
    nearest = {row["value"]: row["sqnr_db"] for row in plain.tables["quantized"] if row["role"] == "weight"}
    assert weights["w1/rescaled"] < nearest["w1"]
    # What keeps its name has the numbers of the float model.
    assert [record.name for record in report.records] == ["x", "h/rescaled", "r/rescaled", "y"]
    plan = QuantPlan.from_json((made.out / "plan.json").read_text())
    assert {v.name for v in plan.values if v.role == "activation"} == {"x", "r/rescaled"}
    assert plan.value("r/rescaled").readers == (("y", 0),)
    graph = onnx.load(made.out / "model.onnx").graph
    onnx.checker.check_model(onnx.load(made.out / "model.onnx"), full_check=True)
    assert {name for node in graph.node for name in node.output} >= {"h/rescaled", "r/rescaled", "r/rescaled/quantized"}


def test_layers_and_skip_mean_the_values_of_the_float_model_beside_repairs(searched):
    net = onnx.shape_inference.infer_shapes(REPAIRED)
    # A report names the scaled value, pipe.yaml either.
    for fields in ({"skip": ["h"]}, {"skip": ["h/rescaled"]}, {"layers": {"h/rescaled": "fp16"}}):
        report, made = searched(net=net, task="", search=False, repairs=["equalize"], **fields)
        assert report.tables["repairs"][0]["outcome"] == "kept"
        plan = QuantPlan.from_json((made.out / "plan.json").read_text())
        assert [k.name for k in plan.kept if k.op == "Gemm"] == ["h/rescaled"]


def test_a_search_makes_repairs_before_it_keeps_layers_float(searched):
    net = onnx.shape_inference.infer_shapes(REPAIRED)
    without, _ = searched(net=net, task="", repairs=[], min_db=30.0)
    report, _ = searched(net=net, task="", min_db=30.0)
    assert set(formats(report).values()) == {"int8"} and "fp16" in formats(without).values()
    assert report.metrics["evaluations"] == 2
    assert [row["repair"] for row in report.tables["repairs"]] == ["equalize"]
    note = next(n for n in report.notes if n.startswith("full evaluations"))
    assert "repairs: [equalize]" in note


def test_no_assignment_is_evaluated_twice(searched, monkeypatch):
    from layerline.parity import search_judge

    tried = []

    def judge(converted):
        """Passes a model with four of the six layers in float, of which two are in half precision at most."""
        kept = {item.name for item in converted.plan.kept}
        nodes = sum(converted.halved.values())
        tried.append((frozenset(kept), converted.halved.get("fp16", 0)))
        passed = len(kept) >= 4 and nodes <= 2
        return search_judge.Verdict(passed, float(not passed), "")

    monkeypatch.setattr(search_judge, "judge", lambda *_: judge)
    report, _ = searched(net=SIX, repairs=[])
    assert report.passed
    assert sorted(formats(report).values()) == ["fp16", "fp16", "fp32", "fp32", "int8", "int8"]
    # All four in half precision fail, two hold; with the other two they are the four again, and are not evaluated.
    assert [nodes for _, nodes in tried].count(4) == 1


def test_what_stays_float_is_halved_one_by_one_where_all_of_it_in_half_precision_is_too_much(
    searched, monkeypatch, tmp_path
):
    from layerline.parity import search_judge

    def judge(converted):
        """Needs two layers in float, and one of them in float32."""
        kept = {item.name for item in converted.plan.kept}
        onnx_files.save(converted.measured, tmp_path)
        rounded = {name for node in onnx_files.load(tmp_path / onnx_files.FILE).graph.node for name in node.output}
        passed = {"bad", "y"} <= kept and "bad/narrow" not in rounded
        return search_judge.Verdict(passed, float(not passed), "")

    monkeypatch.setattr(search_judge, "judge", lambda *_: judge)
    report, _ = searched(repairs=[])
    assert formats(report) == {"h": "int8", "bad": "fp32", "y": "fp16"}


def test_a_model_that_loses_the_budget_on_the_first_samples_is_not_run_on_the_others(work, tmp_path):  # noqa: F811
    from layerline.graph.quantization import convert
    from layerline.graph.quantization.calibration_data import CalibrationData
    from layerline.parity.accuracy_budget import Evaluation

    np.save(tmp_path / "mix.npy", MIX)
    made = work(TASK + PLAIN_LABELS, net=TWO, inputs=X, feeds=FEEDS)
    data = CalibrationData(made, X, hooks=("calib_data",), samples=512, batch_size=16)
    evaluation = Evaluation(data)
    exact = convert.unchanged(as_ir(model("g (float[n, 8] x) => (float[n, 8] y) { y = MatMul (x, d) }", d=DEAF)))
    # Of 200 samples the largest numbers lie in seven channels in turn: without the first one, 29 answers are wrong.
    deaf = DEAF.copy()
    deaf[0, 0] = 0
    other = model("g (float[n, 8] x) => (float[n, 8] y) { y = MatMul (x, d) }", d=deaf)
    wrong = dataclasses.replace(exact, measured=as_ir(other))
    assert evaluation.hopeless(wrong, 0.01) is None  # the float model was not measured yet
    evaluation.measure(exact)
    first = evaluation.hopeless(wrong, 0.01)
    # Four batches of 16 hold a quarter, with ten of the wrong answers: 0.05 of all 200.
    assert first is not None and first.after["accuracy"] == pytest.approx(54 / 64)
    assert evaluation.hopeless(wrong, 0.049) is not None and evaluation.hopeless(wrong, 0.051) is None
    assert evaluation.hopeless(exact, 0.0) is None


def test_what_int8_loses_is_tried_in_fp8_before_it_becomes_half(searched):
    report, made = searched(try_fp8=True)
    assert report.passed, report.gates
    assert formats(report) == {"bad": "fp8", "h": "int8", "y": "int8"}
    plan = QuantPlan.from_json((made.out / "plan.json").read_text())
    types = {(value.name, value.dtype) for value in plan.values}
    assert types == {
        ("x", "int8"),
        ("w1", "int8"),
        ("b", "float8e4m3fn"),
        ("w2", "float8e4m3fn"),
        ("r", "int8"),
        ("w3", "int8"),
    }
    note = next(n for n in report.notes if n.startswith("full evaluations"))
    assert "write in pipe.yaml, beside the budget: `quantize: {search: true, try_fp8: true}`; formats alone" in note
    assert note.endswith('`quantize: {layers: {"bad": "fp8"}}`')
    # It moves half of what fp16 moves, and pipe.yaml gives the same again.
    half, _ = searched()
    assert report.metrics["cost_saved_percent"] > half.metrics["cost_saved_percent"]
    again, again_made = searched(search=False, layers={"bad": "fp8"}, max_drop="0.5%")
    assert again.passed
    other = QuantPlan.from_json((again_made.out / "plan.json").read_text())
    assert {(value.name, value.dtype, value.scales) for value in other.values} == {
        (value.name, value.dtype, value.scales) for value in plan.values
    }


def test_where_fp8_fails_too_the_layer_becomes_half(searched):
    # A channel beside which even fp8's steps are too coarse for the budget on the outputs.
    report, _ = searched(task="", try_fp8=True, min_db=38.0)
    assert report.passed and formats(report)["bad"] == "fp16", formats(report)
    with pytest.raises(ValidationError, match="search: true"):
        Quantize(try_fp8=True)


@pytest.mark.parametrize(
    ("quantize", "targets", "expected"),
    [
        ({}, ("8.9", "12.0"), True),
        ({}, ("8.6", "8.9"), False),
        ({}, (), False),
        ({"mode": "fp8"}, ("8.9",), False),
        ({"target": "onnxruntime"}, ("8.9",), False),
    ],
)
def test_fp8_is_tried_where_every_device_has_it(quantize, targets, expected):
    from layerline.pipeline.config.quantize_fields import takes_fp8
    from layerline.stages.engine import Engine

    assert takes_fp8([Quantize(**quantize), Engine(targets=targets)]) == expected


SIX = model(
    """g (float[n, 8] x) => (float[n, 8] y) {
  a = MatMul (x, w) b = MatMul (a, w) c = MatMul (b, w) d = MatMul (c, w) e = MatMul (d, w) y = MatMul (e, w)
}""",
    w=MIX,
)


@pytest.mark.parametrize(("place", "evaluations"), [(0, 2), (2, 6), (5, 6)])
def test_a_layer_that_fails_alone_leaves_the_others_quantised(searched, monkeypatch, place, evaluations):
    from layerline.parity import search_judge

    needed = set()

    def judge(converted):
        passed = needed <= {item.name for item in converted.plan.kept}
        return search_judge.Verdict(passed, float(not passed), "a verdict")

    monkeypatch.setattr(search_judge, "judge", lambda *_: judge)
    ranked, _ = searched(net=SIX, repairs=[])
    # The layer with the least error may be the one that fails: on few samples a verdict is noisy.
    layer = ranked.tables["search"][place]["value"]
    needed.add(layer)
    report, _ = searched(net=SIX, repairs=[], rest="fp32")
    assert "search" not in {gate.name for gate in report.gates}
    assert formats(report) == {**formats(ranked), layer: "fp32"}
    assert list(formats(report).values()).count("int8") == 5
    assert report.metrics["evaluations"] == evaluations
    row = next(row for row in report.tables["search"] if row["value"] == layer)
    assert row["why"] == "in int8 the budget fails: a verdict"


def test_layers_that_add_far_too_much_error_are_not_evaluated_again(searched, monkeypatch):
    from layerline.parity import format_search

    steps = "".join(
        f"b{i} = Add ({source}, huge) bad{i} = MatMul (b{i}, deaf) h{i} = MatMul (bad{i}, mix) "
        for i, source in enumerate(["x", "h0", "h1", "h2"])
    )
    text = f"g (float[n, 8] x) => (float[n, 8] y) {{ {steps} y = MatMul (h3, mix) }}"
    net = model(text, deaf=DEAF, mix=MIX, huge=HUGE)
    fields = {"net": net, "task": "", "repairs": [], "min_db": 25.0, "rest": "fp32"}
    report, _ = searched(**fields)
    assert {value for value, name in formats(report).items() if name != "int8"} == {"bad0", "bad1", "bad2", "bad3"}
    row = next(row for row in report.tables["search"] if row["value"] == "bad0")
    assert re.fullmatch(r"int8 would add [\d.e+]+ times the error that is left to it", row["why"])
    monkeypatch.setattr(format_search, "FAR_BEYOND", float("inf"))
    each, _ = searched(**fields)
    assert formats(each) == formats(report)
    # All in int8 and the three of a bisection that begins at the four layers that the effects predict; then these in
    # groups and alone, one of which was evaluated.
    assert report.metrics["evaluations"] == 4 and each.metrics["evaluations"] == 9
