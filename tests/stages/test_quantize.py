"""The quantize stage on small models: what it leaves, what it says, and what it refuses."""

import dataclasses
import json
import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from pydantic import ValidationError

from layerline.calib.plan import QuantPlan
from layerline.export import probe_files
from layerline.export.signature import Dim, Signature, Value
from layerline.graph.io import onnx_files
from layerline.graph.io.ir_convert import as_ir
from layerline.parity import accuracy_budget, output_sqnr
from layerline.pipeline.errors import ConfigError, StageError, TaskError
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import CONVERGENCE, HISTOGRAMS, LayerDiff
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.quantize import Quantize

RNG = np.random.default_rng(0)
NET = """g (float[n, 3, 6, 6] x) => (float[n, 4] y) {
  a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
  r = Relu (a)
  c = Conv <pads = [1, 1, 1, 1]> (r, w2, b2)
  s = Add (c, r)
  t = Relu (s)
  p = GlobalAveragePool (t)
  f = Flatten (p)
  y = Gemm <transB = 1> (f, wf)
}"""
SHAPES = {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 4, 3, 3), "b2": (4,), "wf": (4, 4)}
WEIGHTS = {k: RNG.standard_normal(v).astype(np.float32) for k, v in SHAPES.items()}
X = (Value(name="x", dtype="float32", shape=("n", 3, 6, 6)),)
TASK = """
import numpy as np
rng = np.random.default_rng(1)
X = rng.standard_normal((40, 3, 6, 6)).astype(np.float32)
"""
FALLING = """
def metric(outputs, targets):
    calls = metric.calls = getattr(metric, "calls", 0) + 1
    return {}
"""
CALIB, LABELLED = "def calib_data():\n    return X\n", "def eval_data():\n    return X, np.arange(40) % 4\n"


class Log:
    def __init__(self):
        self.seen = []

    def say(self, text):
        self.seen.append(text)

    def progress(self, done, total, **fields):
        self.seen.append((done, total))


def model(text=NET, **weights):
    out = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    out.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    return out


@pytest.fixture
def work(tmp_path):
    """Work on a model, with a task made of the given source."""

    def make(task=CALIB, net=None, inputs=X, feeds=None):
        folder = tmp_path / "fused"
        for path in (folder, tmp_path / "out", tmp_path / "scratch"):
            path.mkdir(exist_ok=True)
        onnx_files.save(net or model(**WEIGHTS), folder)
        Signature(inputs=inputs, outputs=(Value(name="y", dtype="float32", shape=("n", 4)),)).save(folder)
        probe_files.save(
            folder, feeds or [{"x": RNG.standard_normal((n, 3, 6, 6)).astype(np.float32)} for n in (2, 1, 5)]
        )
        (tmp_path / "task.py").write_text(TASK + task)
        return Work(
            inputs={"model": folder}, task=Task(tmp_path / "task.py"), out=tmp_path / "out",
            scratch=tmp_path / "scratch", log=Log(),
        )  # fmt: skip

    return make


def rows(report):
    return {r.name: r for r in report.records}


@pytest.mark.parametrize("calibrator", ["auto", "entropy", "percentile", "minmax", "mse"])
def test_int8_leaves_model_plan_ranges_and_copies(work, calibrator):
    task = work(CALIB + LABELLED)
    report = Quantize(calibrator=calibrator).run(task)
    assert report.passed
    assert {p.name for p in task.out.iterdir()} == {
        "model.onnx", "plan.json", "ranges.json", "signature.json", "probes.safetensors",
    }  # fmt: skip
    plan = QuantPlan.from_json((task.out / "plan.json").read_text())
    ranges = json.loads((task.out / "ranges.json").read_text())
    assert ranges["samples"] == 40 or calibrator == "auto"
    assert set(ranges["values"]) == {v.name for v in plan.values if v.role == "activation"}
    chosen = {v.calibrator for v in plan.values if v.role == "activation"}
    assert chosen <= {"entropy", "percentile", "minmax", "mse"} if calibrator == "auto" else chosen == {calibrator}
    for name in ("signature.json", "probes.safetensors"):
        assert (task.out / name).read_bytes() == (task.inputs["model"] / name).read_bytes()
    quantized = onnx_files.load(task.out / onnx_files.FILE)
    assert {n.op_type for n in quantized.graph.node} >= {"QuantizeLinear", "DequantizeLinear", "Relu", "Add"}


def test_the_report_has_the_distances_the_clipping_and_the_weights(work):
    report = Quantize(calibrator="percentile", percentile=99).run(work())
    found = rows(report)
    assert list(found) == ["x", "a", "r", "c", "s", "t", "p", "f", "y"]
    assert all(10 < r.sqnr_db < 80 and r.extra["isolated_sqnr_db"] > 10 for r in found.values())
    assert found["r"].extra["clipped"] == pytest.approx(0.005, abs=0.004)
    # One value in a hundred is beyond the range of the input: that is in its row, as its own error.
    assert found["x"].op == "Input" and found["x"].extra["clipped"] == pytest.approx(0.01, abs=0.004)
    assert found["x"].sqnr_db == found["x"].extra["isolated_sqnr_db"]
    assert found["c"].extra["weight_sqnr_db"] > 30 and "clipped" not in found["c"].extra
    # What the rounding of its inputs and weights explains is near what the layer loses.
    products = [found[name].extra for name in ("c", "y")]
    assert all(abs(extra["rounding_sqnr_db"] - extra["isolated_sqnr_db"]) < 0.01 for extra in products)
    there = {row["value"]: row.get("clipped_there") for row in report.tables["quantized"]}
    assert there["x"] == pytest.approx(0.01, abs=0.01) and there["w1"] is None
    assert report.metrics["quantized_activations"] == 4 and report.metrics["quantized_weights"] == 3
    assert {r["value"] for r in report.tables["quantized"]} == {"x", "w1", "r", "w2", "t", "f", "wf"}
    drawn = {str(row["value"]): row for row in report.tables[HISTOGRAMS]}
    assert drawn.keys() == {"x", "r", "t", "f"} and all(len(str(row["profile"])) == 64 for row in drawn.values())


RARE = """
X = np.concatenate([X[:14], 20 * X[:1], X[14:]])
LABELS = np.array([2 if i == 14 else i % 2 for i in range(41)])

def calib_data():
    return DATA
"""


@pytest.mark.parametrize("selection", ["stratified", "coverage"])
def test_chosen_samples_hold_a_rare_one_that_even_sampling_misses(work, selection):
    columns = RARE.replace("DATA", "X, LABELS")
    batches = RARE.replace("DATA", "[(X[:11], LABELS[:11]), (X[11:], LABELS[11:])]")

    def highest(task, **fields):
        report = Quantize(samples=8, calibrator="minmax", **fields).run(task)
        document = json.loads((task.out / "ranges.json").read_text())
        assert document["samples"] == 8 and report.tables.get(CONVERGENCE, [{"samples": 8}])[-1]["samples"] == 8
        if fields.get("selection") == "stratified":
            assert "stratified by label: 3 classes of 1 to 4 samples each" in report.notes
        return document["values"]["x"]["range"][1]

    assert highest(work(columns)) < 5
    for data in (columns, batches):
        assert highest(work(data), selection=selection, batch_size=3) > 30
        assert highest(work(data), selection=selection) > 30


def test_calibration_stops_early_when_asked(work):
    task = work("def calib_data():\n    return np.repeat(X[:1], 400, 0)\n")
    report = Quantize(stop_early=1).run(task)
    note = "calibration stopped after 64 samples: no scale moved by more than 1 % while the samples doubled twice"
    assert note in report.notes and any(text.startswith("calibrated on 64 samples;") for text in report.notes)
    assert [row["samples"] for row in report.tables[CONVERGENCE]] == [16, 32, 64]


def test_sizes_are_those_of_the_files(work):
    task = work()
    report = Quantize().run(task)
    assert report.metrics["bytes_before"] == (task.inputs["model"] / "model.onnx").stat().st_size
    assert report.metrics["bytes_after"] == (task.out / "model.onnx").stat().st_size


@pytest.mark.parametrize("mode", ["int8", "fp16", "bf16"])
def test_the_same_input_gives_the_same_bytes(work, mode, tmp_path):
    task = work()
    found = []
    for _ in range(2):
        Quantize(mode=mode).run(task)
        found.append({p.name: p.read_bytes() for p in task.out.iterdir()})
    assert found[0] == found[1]


def test_metrics_before_and_after_come_from_the_eval_data(work):
    metric = "def metric(outputs, targets):\n    return {'mean': float(outputs.mean()), 'n': len(targets)}\n"
    report = Quantize(batch_size=7).run(work(CALIB + LABELLED + metric))
    assert report.metrics["n"] == report.metrics["n_float"] == 40
    assert report.metrics["mean"] != report.metrics["mean_float"]
    assert report.metrics["mean"] == pytest.approx(report.metrics["mean_float"], abs=0.1)


def test_the_accuracy_budget_is_a_gate_in_the_metrics_own_units(work):
    metric = "def metric(outputs, targets):\n    return -float(np.abs(outputs).max() * 1000 % 7)\n"
    task = work(CALIB + LABELLED + metric)
    report = Quantize(max_drop=100.0).run(task)
    [gate] = report.gates
    assert gate.passed and gate.name == "metric budget" and gate.expected == "a drop of at most 100"
    report = Quantize(max_drop=0.4, calibrator="minmax").run(work(CALIB + LABELLED + FALLING.format("1.0 / calls")))
    [gate] = report.gates
    gains = {r.name: r.extra["gain_db"] for r in report.records if r.extra.get("gain_db", 0) > 0}
    worst = sorted(gains, key=lambda n: -gains[n])[:3]
    assert len(worst) == 3
    assert not report.passed and gate.seen == "1 -> 0.5"
    assert f"keep them float with `skip: {json.dumps(worst)}` under quantize" in gate.hint
    assert gate.hint.endswith("pipe diff quantize --sort gain")


def test_a_failed_budget_names_no_layer_where_none_is_worth_it():
    extras = ({"isolated_sqnr_db": 5.0, "gain_db": 0.3}, {"isolated_sqnr_db": 5.0, "gain_db": -1.0})
    rows = [LayerDiff(name=name, op="Conv", extra=extra) for name, extra in zip("ab", extras, strict=True)]
    assert accuracy_budget._remedy(rows).startswith("the outputs gain at most 0.3 dB by one layer in float: pipe why")
    rows[0] = dataclasses.replace(rows[0], extra={"isolated_sqnr_db": 5.0, "gain_db": 3.1})
    assert 'a in a (3.1 dB); keep them float with `skip: ["a"]`' in accuracy_budget._remedy(rows)
    rows[1] = dataclasses.replace(rows[1], extra={"gain_db": float("nan")})
    assert '`skip: ["a"]`' in accuracy_budget._remedy(rows)
    rows[1] = dataclasses.replace(rows[1], extra={"gain_db": float("inf")})
    assert 'b in b (no error is left), a in a (3.1 dB); keep them float with `skip: ["b", "a"]`' in (
        accuracy_budget._remedy(rows)
    )


def test_a_metric_that_is_nan_for_the_float_model_blames_no_layer(work):
    report = Quantize(max_drop=0.4, calibrator="minmax").run(work(CALIB + LABELLED + FALLING.format("float('nan')")))
    (gate,) = (gate for gate in report.gates if gate.name == "metric budget")
    assert not gate.passed
    assert gate.hint == (
        "metric() gives NaN for the float model itself, so that there is nothing to compare with: mend metric()"
    )


def test_a_drop_of_exactly_the_budget_passes(work):
    task = CALIB + LABELLED + FALLING.format("0.985 - 0.005 * (calls - 1)")
    assert Quantize(max_drop=0.005).run(work(task)).passed


TWO = """
def metric(outputs, targets):
    calls = metric.calls = getattr(metric, "calls", 0) + (len(targets) == 40)  # of all samples: a few are a trial
    return {"accuracy": 0.8 - 0.004 * (calls - 1), "mse": 0.1 + 0.004 * (calls - 1)}
"""


@pytest.mark.parametrize(
    ("budget", "passed"),
    [
        ({"accuracy": "0.5%"}, {"accuracy": True}),  # 0.5 % of 0.8 is 0.004
        ({"accuracy": "0.4%"}, {"accuracy": False}),
        ({"mse": {"rise": "5%"}, "accuracy": 0.01}, {"accuracy": True, "mse": True}),
        ({"mse": {"rise": "3%"}, "accuracy": 0.01}, {"accuracy": True, "mse": False}),
        ({"mse": 0.0}, {"mse": True}),  # it rose, and more is better
        ("0.5%", {"accuracy": True, "mse": True}),
        ("0.4%", {"accuracy": False, "mse": True}),
    ],
)
def test_each_metric_has_its_own_budget_and_direction(work, budget, passed):
    report = Quantize(max_drop=budget).run(work(CALIB + LABELLED + TWO))
    assert {g.name.removesuffix(" budget"): g.passed for g in report.gates} == passed
    assert [row["metric"] for row in report.tables["metrics"]] == ["accuracy", "mse"]
    # Without a direction a rise counts as a gain, and a note says so.
    assert any("mse rose from 0.1 to 0.104" in note for note in report.notes) == isinstance(budget, str)


def test_a_budget_for_an_unknown_metric_is_refused_with_the_nearest(work):
    with pytest.raises(ConfigError, match="no metric 'acuracy'") as caught:
        Quantize(max_drop={"acuracy": "0.5%"}).run(work(CALIB + LABELLED + TWO))
    assert caught.value.where == "quantize.max_drop" and caught.value.hint == "did you mean 'accuracy'?"


def test_metrics_that_one_model_alone_has_are_refused(work):
    metric = (
        "def metric(outputs, targets):\n"
        "    metric.calls = getattr(metric, 'calls', 0) + 1\n"
        "    return {'a': 1.0, **({'b': 2.0} if metric.calls == 1 else {})}\n"
    )
    with pytest.raises(TaskError, match="gives b for one of") as caught:
        Quantize().run(work(CALIB + LABELLED + metric))
    assert caught.value.where == "metric"


def test_a_drop_stands_with_its_interval(work):
    report = Quantize(max_drop=1.0).run(work(CALIB + LABELLED))
    [row] = report.tables["metrics"]
    assert row["metric"] == "accuracy" and row["by"] == "McNemar" and row["low_95"] < row["change"] < row["high_95"]
    [gate] = report.gates
    assert "a drop of" in gate.seen and "95 % interval" in gate.seen and "McNemar's p" in gate.seen


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (CALIB, "the task has no eval_data()"),
        (CALIB + "def eval_data():\n    return X\n", "eval_data() gives no targets"),
        (CALIB + "def eval_data():\n    return X, X[:, 0, 0, 0]\n", "targets of type float32 are no classes"),
    ],
)
def test_without_a_measurable_metric_there_are_no_numbers_but_a_sentence(work, task, why):
    report = Quantize().run(work(task))
    assert report.passed and any(why in note for note in report.notes)
    assert set(report.metrics) == {
        "bytes_before", "bytes_after", "output_sqnr_db", "int8_products", "quantized_activations", "quantized_weights",
    }  # fmt: skip
    assert report.metrics["int8_products"] == "3 of 3"
    if "eval_data" in why and "targets" not in why:
        with pytest.raises(ConfigError, match="no eval_data"):
            Quantize(max_drop=0.1).run(work(task))
        return
    report = Quantize(max_drop=0.1).run(work(task))
    assert not report.passed and report.gates[-1].seen == "not measured"
    assert not report.is_wrong, "pipe why blames no layer for it"


def test_where_the_samples_come_from_is_said(work):
    assert not any("no calib_data()" in n for n in Quantize().run(work()).notes)
    report = Quantize().run(work("def train_data():\n    return X, X\n"))
    assert "no calib_data() in the task: calibrated on train_data()" in report.notes


@pytest.mark.parametrize("samples", [1, 10, 500])
def test_samples_limit_the_calibration(work, samples):
    task = work()
    Quantize(samples=samples, batch_size=3, calibrator="minmax").run(task)
    assert json.loads((task.out / "ranges.json").read_text())["samples"] == min(samples, 40)


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        (CALIB, [(16, 40), (32, 40), (40, 40)]),
        ("def calib_data():\n    return [{'x': X[:3]}, {'x': X[3:8]}]\n", [(3, 8), (8, 8)]),
        ("def calib_data():\n    yield X[:20]\n    yield X[20:]\n", [(20, 512), (40, 512)]),
    ],
)
def test_progress_counts_to_what_there_is(work, task, seen):
    made = work(task)
    Quantize().run(made)
    assert [s for s in made.log.seen if isinstance(s, tuple)] == seen


# What may not pass in silence


def test_int8_that_quantises_nothing_fails_with_the_reasons(work):
    report = Quantize(skip=("*",)).run(work())
    [gate] = [g for g in report.gates if not g.passed]
    assert gate.seen == "0 of 3 matrix products are quantised" and "because skip" in gate.hint
    assert report.metrics["int8_products"] == "0 of 3"


def test_the_reasons_are_those_of_the_matrix_products(work):
    report = Quantize(skip=("*",), ops=("MatMul",), attention=False).run(work())
    [gate] = [g for g in report.gates if not g.passed]
    assert re.findall(r"(\d+) because", gate.hint) == ["3"], gate.hint


def test_a_destroyed_output_fails_where_there_is_no_metric_and_warns_where_there_is_one(work):
    """Channel 0 of the input is 500 times larger than the other two, and no weight reads it."""
    w1 = WEIGHTS["w1"].copy()
    w1[:, 0] = 0
    task = "X[:, 0] *= 500\n" + CALIB
    report = Quantize(calibrator="minmax").run(work(task, model(**{**WEIGHTS, "w1": w1})))
    [gate] = [g for g in report.gates if not g.passed]
    db = report.metrics["output_sqnr_db"]
    assert db < 10 and gate.seen == f"y has {db:.1f} dB" and gate.expected == "at least 10 dB"
    assert report.notes[0].startswith(f"WARNING: output y has {db:.1f} dB: its error is")
    assert Quantize(calibrator="minmax", min_db=-20).run(work(task, model(**{**WEIGHTS, "w1": w1}))).passed
    labelled = task + LABELLED
    report = Quantize(calibrator="minmax").run(work(labelled, model(**{**WEIGHTS, "w1": w1})))
    assert report.passed and report.notes[0].startswith("WARNING: output y")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("X * 255", r"x reaches [\d.]+ in the calibration data and [\d.]+ in eval_data\(\)"),
        ("X / 255", r"x reaches 0.0\d+ in the calibration data and [\d.]+ in eval_data\(\)"),
        ("X * 0", "x holds only zeros"),
        ("X * 4", ""),
    ],
)
def test_calibration_data_of_another_scale_fails(work, change, message):
    report = Quantize(max_drop=1).run(work(f"def calib_data():\n    return {change}\n" + LABELLED))
    failed = [g for g in report.gates if g.name == "calibration data"]
    assert len(failed) == bool(message)
    assert all(re.match(message, g.seen) for g in failed)


def test_sizes_that_calibration_never_met_are_told_and_the_extremes_have_rows(work):
    net = model("g (float[n, s, 4] x) => (float[n, s, 4] y) { y = MatMul (x, w) }", w=WEIGHTS["wf"])
    task = work(
        "def calib_data():\n    for k in (3, 5):\n        yield X[:2, 0, :k, :4]\n", net,
        (Value(name="x", dtype="float32", shape=("n", "s", 4)),),
        [{"x": RNG.standard_normal((2, k, 4)).astype(np.float32)} for k in (3, 1, 9)],
    )  # fmt: skip
    signature = Signature.load(task.inputs["model"])
    dims = {"n": Dim(max=8), "s": Dim(max=9)}
    dataclasses.replace(signature, dims=dims).save(task.inputs["model"])
    report = Quantize().run(task)
    assert [n for n in report.notes if "calibration met" in n] == [
        "s may be 1 to 9, and calibration met 3 to 5: ranges at other sizes were not observed"
    ]
    assert [row["sizes"] for row in report.tables["outputs by size"]] == ["n=2, s=1", "n=2, s=9"]


def test_weights_that_half_precision_turns_to_zero_are_counted(work):
    wf = WEIGHTS["wf"].copy()
    wf[0] = 2e-8
    report = Quantize(mode="fp16").run(work(net=model(**{**WEIGHTS, "wf": wf})))
    assert "wf: 4 of 16 numbers are too small for fp16 and became 0" in report.notes
    assert not any("too small for" in n for n in Quantize(mode="bf16").run(work()).notes)


def test_a_layer_that_int8_would_spoil_stays_float_and_is_told(work):
    """Channel 0 of the input is 500 times larger than the other two, and no weight reads it."""
    w1 = WEIGHTS["w1"].copy()
    w1[:, 0] = 0
    report = Quantize().run(work("X[:, 0] *= 500\n" + CALIB, model(**{**WEIGHTS, "w1": w1})))
    assert report.passed and report.metrics["int8_products"] == "2 of 3" and report.metrics["output_sqnr_db"] > 20
    [reason] = [row["reason"] for row in report.tables["stays float"] if row["name"] == "a"]
    assert re.fullmatch(r"int8 would leave it -?[\d.]+ dB by itself", reason)
    assert f"a stays float: {reason}" in report.notes


@pytest.mark.parametrize("percentile", [80, 90, 99.9])
def test_bias_correction_is_kept_where_the_outputs_gain_and_says_what(work, percentile):
    made = work("X = np.abs(X)\n" + CALIB)
    report = Quantize(calibrator="percentile", percentile=percentile, min_db=0, bias_correction=True).run(made)
    [note] = [n for n in report.notes if n.startswith("bias correction")]
    figures = re.search(r": (\S+) dB at the outputs with it, (\S+) dB without", note)
    corrected, plain = float(figures[1]), float(figures[2])
    assert corrected > plain or "left out" in note
    # The report measures the outputs on the same held-out samples.
    assert report.metrics["output_sqnr_db"] == pytest.approx(plain if "left out" in note else corrected, abs=0.06)


def test_auto_is_as_good_as_the_best_calibrator_for_all(work):
    made = work("X[::9] *= 6\n" + CALIB + LABELLED)
    others = [
        Quantize(calibrator=c).run(made).metrics["output_sqnr_db"] for c in ("entropy", "percentile", "minmax", "mse")
    ]
    assert Quantize().run(made).metrics["output_sqnr_db"] > max(others) - 1


def test_the_float_part_of_a_graph_with_text_is_quantised(work):
    net = model("""g (float[n, 3, 6, 6] x) => (string[n, 1] y, float[n, 4] p) {
      m = GlobalAveragePool (x) f = Flatten (m) p = MatMul (f, w) i = ArgMax <axis = 1> (p) y = Gather (names, i)
    }""", w=WEIGHTS["wf"][:3])  # fmt: skip
    net.graph.initializer.append(
        onnx.helper.make_tensor("names", onnx.TensorProto.STRING, [4], [b"a", b"b", b"c", b"d"])
    )
    for mode in ("int8", "fp16"):
        report = Quantize(mode=mode).run(work(net=net))
        assert report.passed and rows(report)["p"].sqnr_db > 20
        assert rows(report)["p"].extra["isolated_sqnr_db"] > 20


# T17, T19


def test_t17_a_nan_in_calibration_stops_naming_tensor_batch_and_count_or_is_skipped(work):
    broken = "X[33, 0, 0, :2] = np.nan\n"
    task = work(broken + CALIB)
    with pytest.raises(StageError, match="x: 2 NaN and 0 Inf elements in calibration batch 3"):
        Quantize(batch_size=10).run(task)
    assert list(task.out.iterdir()) == []
    report = Quantize(nonfinite="skip").run(work(broken + CALIB))
    assert any("2 non-finite elements of x were left out" in n for n in report.notes)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("", r"0 calibration samples: the task defines none of calib_data\(\)"),
        ("def calib_data():\n    return []\n", r"calib_data\(\) gave no samples"),
        ("def calib_data():\n    return {'image': X}\n", "unknown input 'image'"),
        ("def calib_data():\n    return X[:, :2]\n", "the model takes"),
        ("def calib_data():\n    yield 1 / 0\n", "raised ZeroDivisionError"),
    ],
)
def test_t19_readers_that_give_nothing_usable_are_told_and_leave_no_file(work, task, message):
    made = work(task)
    with pytest.raises(TaskError, match=message):
        Quantize().run(made)
    assert list(made.out.iterdir()) == []


def test_t19_a_generator_serves_for_the_one_pass_that_calibration_takes(work):
    reader = "def calib_data():\n    yield X[:20]\n    yield X[20:]\n"
    task = work(reader)
    Quantize(calibrator="minmax").run(task)
    assert json.loads((task.out / "ranges.json").read_text())["samples"] == 40


# T21


def test_t21_the_note_names_the_cpu_flag(work, tmp_path):
    from layerline.backends.onnxruntime import int8_flag, int8_note

    info = tmp_path / "cpuinfo"
    for flags, expected in (("sse avx2", ""), ("avx2 avx512_vnni", "avx512_vnni"), ("avx_vnni", "avx_vnni")):
        info.write_text(f"flags : {flags}\n")
        assert int8_flag(info) == expected
    assert "this CPU has no VNNI" in int8_note("") and "has avx_vnni" in int8_note("avx_vnni")
    assert "unknown" in int8_note(int8_flag(tmp_path / "nothing"))
    assert int8_note(int8_flag()) in Quantize().run(work()).notes
    assert int8_note(int8_flag()) not in Quantize(mode="fp8").run(work()).notes


# Half precision


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("task", ["", CALIB])
def test_half_precision_needs_no_data_and_uses_it_where_there_is_some(work, mode, task):
    made = work(task)
    report = Quantize(mode=mode).run(made)
    assert report.passed
    assert any("probe feeds alone" in n for n in report.notes) == (task == "")
    assert all(r.sqnr_db > (50 if mode == "fp16" else 30) for r in report.records)
    assert report.metrics["bytes_after"] < report.metrics["bytes_before"]
    assert report.metrics[f"{mode}_nodes"] == 8 and not any("quantized" in name for name in report.metrics)
    assert [g.name for g in report.gates] == [
        *(["onnxruntime runs it alike"] if mode == "fp16" else []),
        "output SQNR",
    ]
    assert not (made.out / "ranges.json").exists()


def test_where_nothing_is_converted_a_note_says_so(work):
    report = Quantize(mode="fp16", skip=("*",)).run(work())
    assert report.metrics["fp16_nodes"] == 0
    [gate] = [g for g in report.gates if not g.passed]
    assert gate.seen == "0 nodes compute in fp16, of a model with 3 matrix products" and "8 because skip" in gate.hint
    assert "no node computes in fp16: nothing was converted, and the result is no smaller and no faster" in report.notes
    assert not any("compute in fp16;" in note for note in report.notes)


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_outputs_that_are_drawn_at_random_are_judged_by_nobody_and_said_not_to_be(work, mode):
    net = model("g (float[n, 3, 6, 6] x) => (float[n, 3, 6, 6] y) { a = Relu (x) y = RandomNormalLike (a) }")
    report = Quantize(mode=mode).run(work(net=net))
    assert report.passed and report.gates == ()
    assert report.metrics["not_judged"] == "output y: random (RandomNormalLike)"


def test_what_overflows_on_the_samples_stays_float32_and_is_listed(work):
    body = "h = Relu (x)\n b = Mul (h, k)\n q = Mul (b, b)\n y = Mul (q, i)"
    net = model(
        f"g (float[n, 3, 6, 6] x) => (float[n, 3, 6, 6] y) {{ {body} }}", k=np.float32(1000), i=np.float32(1e-3)
    )
    made = work("X *= 3\n" + CALIB, net)
    report = Quantize(mode="fp16").run(made)
    told = {row["name"]: row["reason"] for row in report.tables["stays float"]}
    assert "q reached" in told["q"] and "q reached" in told["y"]
    assert report.passed and rows(report)["y"].sqnr_db > 50


def test_quantised_values_that_exceed_half_are_dequantised_in_float32(work):
    body = "h = Relu (x)\n b = Mul (h, k)\n c = Conv (b, w)\n y = Mul (c, i)"
    net = model(
        f"g (float[n, 3, 6, 6] x) => (float[n, 3, 6, 6] y) {{ {body} }}",
        k=np.float32(1e6),
        i=np.float32(1e-6),
        w=np.eye(3, dtype=np.float32)[..., None, None],
    )
    report = Quantize(rest="fp16").run(work(CALIB, net))
    assert report.passed and rows(report)["y"].sqnr_db > 30


@pytest.mark.parametrize("rest", ["fp16", "bf16"])
def test_int8_with_the_rest_in_half(work, rest):
    made = work(CALIB + LABELLED)
    report = Quantize(rest=rest).run(made)
    quantized = onnx_files.load(made.out / onnx_files.FILE)
    types = {t.name: t.data_type for t in quantized.graph.initializer}
    half = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}[rest]
    assert types["w1/quantized"] == onnx.TensorProto.INT8 and types["w1/scale"] == types["b1"] == half
    assert report.passed and all(r.sqnr_db > 20 for r in report.records)


def test_none_passes_the_model_on(work):
    made = work(CALIB + LABELLED)
    report = Quantize(mode="none").run(made)
    assert report.metrics["accuracy"] == report.metrics["accuracy_float"]
    assert (made.out / "model.onnx").read_bytes() == (made.inputs["model"] / "model.onnx").read_bytes()
    assert json.loads((made.out / "plan.json").read_text()) == {"values": [], "kept": []}
    assert Quantize(mode="none").hooks() == ("eval_data", "metric") and "calib_data" in Quantize().hooks()


# Configuration


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "int3"},
        {"calibrator": "max"},
        {"percentile": 0},
        {"percentile": 101},
        {"samples": 0},
        {"max_drop": -1},
        {"max_drop": {}},
        {"max_drop": "x"},
        {"max_drop": {"a": {}}},
    ],
)
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Quantize(**wrong)


def test_skips_and_operators_reach_the_rules(work):
    report = Quantize(skip=("y",), ops=("Conv", "Gemm")).run(work())
    told = {row["name"]: row["reason"] for row in report.tables["stays float"]}
    assert told == {
        "s": "ops leaves Add out", "t": "there is no int8 rule for Relu", "p": "ops leaves GlobalAveragePool out",
        "y": "skip",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="matches no value"):
        Quantize(skip=("nothing",)).run(work())


def test_a_model_with_a_fixed_batch_axis_is_calibrated_and_measured_on_real_rows_alone(work):
    net = model(NET.replace("[n,", "[16,"), **WEIGHTS)
    inputs = (Value(name="x", dtype="float32", shape=(16, 3, 6, 6)),)
    metric = "def metric(outputs, targets):\n    return {'rows': len(outputs)}\n"
    made = work(CALIB + LABELLED + metric, net, inputs, [{"x": RNG.standard_normal((16, 3, 6, 6)).astype(np.float32)}])
    report = Quantize().run(made)
    assert report.metrics["rows"] == 40
    ranges = json.loads((made.out / "ranges.json").read_text())
    assert ranges["values"]["x"]["count"] == 40 * 3 * 6 * 6


def test_how_many_samples_were_used_and_what_one_is_worth_is_noted(work):
    metric = "def metric(outputs, targets): return 1.0\n"
    few = Quantize(samples=5000, max_drop=0.001).run(work(CALIB + LABELLED + metric))
    [note] = [note for note in few.notes if note.startswith("calibrated on")]
    assert note.startswith("calibrated on ") and " 12 " in note and "5000 were requested" in note
    below = "max_drop 0.001 is less than one of the 40 samples of eval_data() is worth in metric (0.025)"
    assert any(note.startswith(below) for note in few.notes)
    enough = Quantize(samples=8, max_drop=0.1).run(work(CALIB + LABELLED + metric))
    assert not any("were requested" in note or "max_drop" in note for note in enough.notes)


OWN = """g (float[n, 4] x) => (float[n, 3] y) {
  q = QuantizeLinear (x, s, z)
  d = DequantizeLinear (q, s, z)
  w = DequantizeLinear <axis = 1> (wq, ws, wz)
  h = MatMul (d, w)
  r = Relu (h)
  y = MatMul (r, v)
}"""


@pytest.mark.parametrize(("kind", "zero"), [(np.int8, 0), (np.uint8, 128)])
def test_a_model_with_its_own_q_dq_goes_through_as_it_is(work, kind, zero):
    whole = (np.arange(12).reshape(4, 3) - 6 + zero).astype(kind)
    stored = {"s": np.float32(0.05), "z": np.array(zero, kind), "wq": whole, "ws": np.float32([0.1, 0.2, 0.3]),
              "wz": np.full(3, zero, kind), "v": np.eye(3, dtype=np.float32)}  # fmt: skip
    net = model(OWN, **stored)
    inputs = (Value(name="x", dtype="float32", shape=("n", 4)),)
    feeds = [{"x": RNG.standard_normal((n, 4)).astype(np.float32)} for n in (2, 5)]
    task = work("", net, inputs, feeds)
    report = Quantize().run(task)
    assert report.passed, report.gates
    ours = onnx_files.load(task.out / onnx_files.FILE)
    assert [n.op_type for n in ours.graph.node] == [n.op_type for n in net.graph.node]
    for tensor in ours.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), stored[tensor.name])
    plan = QuantPlan.from_json((task.out / "plan.json").read_text())
    x, w = plan.value("x"), plan.value("w")
    assert (x.role, x.scales, x.zero_point, x.readers) == ("activation", (pytest.approx(0.05),), zero, (("h", 0),))
    assert (w.role, w.axis, w.dtype, w.scales) == ("weight", 1, np.dtype(kind).name, pytest.approx((0.1, 0.2, 0.3)))
    assert [(k.name, k.op) for k in plan.kept] == [("y", "MatMul")]
    assert report.metrics["int8_products"] == "1 of 2"
    # Against the same weights, only the input's rounding costs something: x is off by up to half a step.
    assert 20 < rows(report)["h"].sqnr_db < 60


def placed(report):
    plan = report.tables
    kept = {row["name"]: row["reason"] for row in plan["stays float"]}
    return {row["value"] for row in plan["quantized"]}, kept


def test_layers_name_the_layer_that_computes_a_value_and_the_last_pattern_decides(work):
    quantized, kept = placed(Quantize(layers={"*": "skip", "w2": "int8", "y": "int8"}).run(work()))
    assert quantized == {"r", "w2", "f", "wf"}
    assert kept["a"] == "layers: * is skip"
    # skip by value also holds the layers that read it; layers does not.
    quantized, kept = placed(Quantize(layers={"a": "fp32"}).run(work()))
    assert "w2" in quantized and "w1" not in quantized and kept["a"] == "layers: a is fp32"
    quantized, _ = placed(Quantize(skip=("*",), layers={"y": "int8"}).run(work()))
    assert quantized == {"f", "wf"}


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_a_layer_in_half_stands_between_layers_in_int8(work, half):
    made = work()
    report = Quantize(layers={"c": half}).run(made)
    assert report.passed and report.metrics[f"{half}_nodes"] == 1
    quantized, kept = placed(report)
    assert quantized >= {"x", "w1", "f", "wf"} and "w2" not in quantized and kept["c"] == f"layers: c is {half}"
    saved = onnx_files.load(made.out / onnx_files.FILE)
    types = {t.name: t.data_type for t in saved.graph.initializer}
    expected = onnx.TensorProto.FLOAT16 if half == "fp16" else onnx.TensorProto.BFLOAT16
    assert types["w2"] == expected and [n.op_type for n in saved.graph.node].count("Cast") == 2
    rows_of = rows(report)
    assert rows_of["c"].extra["isolated_sqnr_db"] > rows_of["a"].extra["isolated_sqnr_db"]


def test_layers_in_half_modes_stay_single_and_unknown_ones_are_refused(work):
    report = Quantize(mode="fp16", layers={"c": "fp32"}).run(work())
    assert placed(report)[1]["c"] == "layers"
    with pytest.raises(ConfigError, match="'wff' matches no value") as caught:
        Quantize(layers={"wff": "skip"}).run(work())
    assert caught.value.where == "quantize.layers" and caught.value.hint == "did you mean 'wf'?"


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": {"a": "int3"}},
        {"layers": {"a": "fp16", "c": "bf16"}},
        {"layers": {"a": "fp16"}, "rest": "bf16"},
        {"layers": {"a": "int8"}, "mode": "fp16"},
        {"layers": {"a": "skip"}, "mode": "none"},
    ],
)
def test_formats_that_the_mode_does_not_have_are_refused(wrong):
    with pytest.raises(ValidationError, match=r"expected|Input should be"):
        Quantize(**wrong)


@pytest.mark.parametrize(
    "source",
    [
        "{'x': X, 'label': Y, 'slice': S}",
        "[{'x': X[i:i + 8], 'label': Y[i:i + 8], 'slice': S[i:i + 8].tolist()} for i in range(0, 40, 8)]",
        "Rows()",
    ],
)
def test_metrics_by_the_column_called_slice(work, source):
    data = (
        "Y, S = np.arange(40) % 4, np.arange(40) // 30\n"
        "class Rows:\n    def __len__(self): return 40\n"
        "    def __getitem__(self, i): return {'x': X[i], 'label': Y[i], 'slice': S[i]}\n"
        f"def eval_data():\n    return {source}\n"
    )
    report = Quantize().run(work(CALIB + data))
    found = {row["slice"]: row["samples"] for row in report.tables["slices"]}
    assert found == {0: 30, 1: 10}
    flipped = sum(1 if row["became"] == "right" else -1 for row in report.tables["flipped answers"])
    assert report.metrics["accuracy"] - report.metrics["accuracy_float"] == pytest.approx(flipped / 40)


def test_a_slice_is_no_argument_of_forward():
    from layerline.pipeline.inputs.batches import split

    batch = {"x": 1, "slice": 2, "label": 3}
    assert split(batch) == ((), {"x": 1}, 3) and split(batch, lambda x: x) == ((), {"x": 1}, 3)

    def takes_it(x, slice):  # noqa: A002
        return x

    assert split(batch, takes_it)[1] == {"x": 1, "slice": 2}


@pytest.mark.parametrize("mode", ["int8", "fp16"])
def test_names_are_looked_up_before_any_sample_is_calibrated(work, mode):
    task = "def calib_data():\n    raise RuntimeError\n" + LABELLED + TWO
    for wrong in ({"skip": ["cc"]}, {"layers": {"wff": "skip"}}, {"max_drop": {"acuracy": "0.5%"}}):
        with pytest.raises(ConfigError) as caught:
            Quantize(mode=mode, **wrong).run(work(task))
        assert caught.value.where == f"quantize.{next(iter(wrong))}"


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({}, ["error"]),
        ({"skip": ("conv",)}, ["warning"]),
        ({"mode": "fp16"}, []),
        ({"mode": "int4"}, []),
        ({"mode": "int4", "layers": {"conv": "int8"}}, ["error"]),
    ],
)
def test_check_misses_samples_only_where_ranges_are_needed(work, fields, states):
    task = work("")
    look = Inspection(task.root, task.task)
    look.shared |= {"signature": Signature.load(task.inputs["model"]), "ops": ["Conv", "Relu"]}
    Quantize(**fields).check(look)
    assert [f.state for f in look.findings if f.item == "calib_data()"] == states


def test_the_gate_says_that_one_model_alone_has_nan():
    exact, finite = (
        as_ir(model(f"g (float[4] x) => (float[4] y) {{ {body} }}")) for body in ("y = Log(x)", "y = Neg(x)")
    )
    outputs = output_sqnr.outputs(exact, finite, [{"x": np.float32([1, -1, 2, -2])}])
    (text,) = output_sqnr.warning(outputs)
    assert text == "WARNING: output y has no signal left: 2 elements are NaN or Inf in one of the two models alone"
    (gate,) = output_sqnr.gates(outputs, output_sqnr.Bounds(10.0))
    assert not gate.passed and gate.seen == text.removeprefix("WARNING: output ")
