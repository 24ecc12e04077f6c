"""The quantize stage in mode qat: what training gains, that it resumes, and what it refuses."""

import itertools
import re

import numpy as np
import pytest
import torch
from onnx import numpy_helper, parser
from pydantic import ValidationError

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.plan import QuantPlan
from layerline.export import probe_files
from layerline.export.signature import Signature, Value
from layerline.graph.io import onnx_files
from layerline.graph.io.opset import raise_opset
from layerline.graph.quantization import own_qdq
from layerline.pipeline.errors import StageError, TaskError, Unavailable
from layerline.pipeline.inspection import Inspection
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
  y = Gemm <transB = 1> (f, wf, bf)
}"""
SHAPES = {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 4, 3, 3), "b2": (4,), "wf": (4, 4)}
WEIGHTS = {k: RNG.standard_normal(v).astype(np.float32) for k, v in SHAPES.items()}
WEIGHTS["bf"] = np.zeros(4, np.float32)
TASK = """
import numpy as np
rng = np.random.default_rng(1)
X = rng.standard_normal((192, 3, 6, 6)).astype(np.float32)
Y = np.load(__file__.replace("task.py", "answers.npy"))
def train_data(): return X, Y
def eval_data(): return X, Y
"""
POOR = {"calibrator": "percentile", "percentile": 60.0}


class Log:
    def __init__(self):
        self.steps = []

    def say(self, text):
        pass

    def progress(self, done, total, **fields):
        self.steps.append(done)

    def row(self, figures):
        pass


@pytest.fixture
def work(tmp_path):
    """Work on a model whose labels are its own answers."""

    def make(more="", net=None, scratch="scratch"):
        folder = tmp_path / "fused"
        for path in (folder, tmp_path / "out", tmp_path / scratch):
            path.mkdir(exist_ok=True)
        model = net or parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{NET}')
        if net is None:
            model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in WEIGHTS.items())
            # Every class is the answer of some samples.
            bias = -outputs(raise_opset(model, 11)).mean(0)
            model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(bias, "bf"))
        onnx_files.save(model, folder)
        x, y = (Value(name=n, dtype="float32", shape=("n", *s)) for n, s in {"x": (3, 6, 6), "y": (4,)}.items())
        Signature(inputs=(x,), outputs=(y,)).save(folder)
        drawn = np.random.default_rng(2)
        probe_files.save(folder, [{"x": drawn.standard_normal((n, 3, 6, 6)).astype(np.float32)} for n in (2, 1, 5)])
        np.save(tmp_path / "answers.npy", outputs(own_qdq.without(raise_opset(model, 11))).argmax(1))
        (tmp_path / "task.py").write_text(TASK + more)
        return Work(
            inputs={"model": folder}, task=Task(tmp_path / "task.py"), out=tmp_path / "out",
            scratch=tmp_path / scratch, log=Log(),
        )  # fmt: skip

    return make


def outputs(model):
    x = np.random.default_rng(1).standard_normal((192, 3, 6, 6)).astype(np.float32)
    return OnnxRuntime().open(model).run({"x": x})["y"]


def figures(report):
    return {row["figure"]: row for row in report.tables["float, PTQ, QAT"]}


def gate(report, name):
    return next(g for g in report.gates if g.name == name)


def test_training_gains_back_what_a_poor_range_lost_and_quantises_the_same_values(work):
    task = work()
    calibrated = Quantize(**POOR, min_db=-99).run(task)
    plan = QuantPlan.from_json((task.out / "plan.json").read_text())
    report = Quantize(mode="qat", **POOR, min_db=-99, qat={"steps": 60, "lr": 1e-3, "scale_lr": 0.03}).run(task)
    trained = QuantPlan.from_json((task.out / "plan.json").read_text())
    row = figures(report)["accuracy"]
    assert row["float"] == 1.0 and row["PTQ"] == calibrated.metrics["accuracy"] < 0.9
    assert row["QAT"] == report.metrics["accuracy"] > row["PTQ"] + 0.05
    assert gate(report, "quantised as trained").passed and gate(report, "steps accepted").passed
    for before, after in zip(plan.values, trained.values, strict=True):
        assert (before.name, before.role, before.axis, before.readers) == (
            after.name, after.role, after.axis, after.readers,
        )  # fmt: skip
        assert after.calibrator == "qat" and after.scales != before.scales
    assert {r.name for r in report.records} == {r.name for r in calibrated.records}
    assert {row["model"] for row in report.tables["worst layers"]} == {"PTQ", "QAT"}
    assert any(re.match(r"accuracy: float 1, PTQ 0\.\d+, QAT 0?\.?\d+", note) for note in report.notes)


def test_an_interrupted_training_goes_on_and_ends_in_the_same_bytes(work):
    options = {"mode": "qat", **POOR, "min_db": -99, "qat": {"steps": 8, "freeze_after": 0.5}}
    loss = """
import signal, torch
calls = 0
def loss(net, batch):
    global calls
    calls += 1
    if calls == 6 and STOPS: signal.raise_signal(signal.SIGINT)
    x, y = batch
    return torch.nn.functional.cross_entropy(net(x + torch.randn_like(x) * 0.1), y)
"""
    task = work(f"STOPS = False\n{loss}", scratch="first")
    Quantize(**options).run(task)
    whole = {p.name: p.read_bytes() for p in task.out.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        Quantize(**options).run(work(f"STOPS = True\n{loss}", scratch="second"))
    task = work(f"STOPS = False\n{loss}", scratch="second")
    report = Quantize(**options).run(task)
    assert {p.name: p.read_bytes() for p in task.out.iterdir()} == whole
    assert "training resumed at step 5" in report.notes


def test_the_float_model_teaches_and_a_user_model_keeps_its_signature(work):
    task = work("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x): return {"y": self.conv(x).mean((2, 3)), "name": "net"}
def model(): return Net()
def loss(net, batch):
    x, y = batch
    result = net(x=x)
    assert result["name"] == "net"
    return nn.functional.cross_entropy(result["y"], y)
""")
    report = Quantize(mode="qat", **POOR, min_db=-99, qat={"steps": 40, "distill": 0.9, "scale_lr": 0.05}).run(task)
    row = figures(report)["SQNR of y, dB"]
    assert row["QAT"] > row["PTQ"] + 3


def test_scales_of_activations_stay_where_they_are_not_learned_and_the_rest_may_be_half(work):
    task = work()
    Quantize(**POOR, min_db=-99, rest="fp16").run(task)
    before = QuantPlan.from_json((task.out / "plan.json").read_text())
    options = {"steps": 3, "learned_scales": False, "ema_decay": 0.0}
    report = Quantize(mode="qat", **POOR, min_db=-99, rest="fp16", qat=options).run(task)
    after = QuantPlan.from_json((task.out / "plan.json").read_text())
    for old, new in zip(before.values, after.values, strict=True):
        assert (old.scales == new.scales) == (old.role == "activation")
    assert report.metrics["fp16_nodes"] > 0 and gate(report, "quantised as trained").passed


def test_fp8_is_trained_too(work):
    task = work()
    report = Quantize(mode="qat", **POOR, min_db=-99, qat={"format": "fp8", "steps": 20, "scale_lr": 0.03}).run(task)
    plan = QuantPlan.from_json((task.out / "plan.json").read_text())
    assert {value.dtype for value in plan.values} == {"float8e4m3fn"}
    assert gate(report, "quantised as trained").passed
    assert figures(report)["accuracy"]["QAT"] >= figures(report)["accuracy"]["PTQ"]


def test_frozen_scales_stay_and_weights_go_on(work):
    task = work()
    Quantize(**POOR, min_db=-99).run(task)
    before = QuantPlan.from_json((task.out / "plan.json").read_text())
    report = Quantize(mode="qat", **POOR, min_db=-99, qat={"steps": 3, "freeze_after": 0.0, "lr": 0.01}).run(task)
    after = QuantPlan.from_json((task.out / "plan.json").read_text())
    assert [v.scales for v in after.values] == [v.scales for v in before.values]
    assert [v.seen for v in after.values] != [v.seen for v in before.values]
    assert gate(report, "quantised as trained").passed


def test_momentum_does_not_move_a_scale_after_it_is_frozen(work, monkeypatch):
    from layerline.training.run import train_loop

    scales = []
    trained = train_loop.one_batch

    def one_batch(run, stream):
        batch = trained(run, stream)
        scales.append([p.detach().clone() for n, p in run.lane.named.params.items() if ".quantizers." in n])
        return batch

    monkeypatch.setattr(train_loop, "one_batch", one_batch)
    Quantize(mode="qat", **POOR, min_db=-99, qat={"steps": 6, "freeze_after": 0.5}).run(work())
    moved = [any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(scales)]
    assert moved == [True, True, False, False, False]


def test_training_starts_from_repaired_weights(work):
    text = NET.replace("s = Add (c, r)", "").replace("Relu (s)", "Relu (c)")
    net = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    uneven = np.array([100, 1, 0.01, 1], np.float32)
    weights = {**WEIGHTS, "w1": WEIGHTS["w1"] * uneven[:, None, None, None], "b1": WEIGHTS["b1"] * uneven}
    weights["w2"] = WEIGHTS["w2"] / uneven[:, None, None]
    net.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    task = work(net=net)
    options = {"calibrator": "minmax", "repairs": ["equalize"], "min_db": -99}
    report = Quantize(mode="qat", **options, qat={"steps": 2}).run(task)
    assert [row["outcome"] for row in report.tables["repairs"]] == ["kept"]
    plan = QuantPlan.from_json((task.out / "plan.json").read_text())
    assert "r/rescaled" in {value.name for value in plan.values}
    assert gate(report, "quantised as trained").passed
    assert {r.name for r in report.records} >= {"r/rescaled", "y"}
    row = figures(report)["SQNR of y, dB"]
    assert [*row] == ["figure", "float", "PTQ", "PTQ with repairs", "QAT"] and row["PTQ with repairs"] > row["PTQ"]
    assert {row["model"] for row in report.tables["worst layers"]} == {"PTQ", "PTQ with repairs", "QAT"}


def test_a_training_that_loses_is_left_out_unless_it_is_asked_for(work):
    task = work()
    options = {"steps": 3, "lr": 0.3, "ema_decay": 0.0}
    report = Quantize(mode="qat", min_db=-99, qat=options).run(task)
    row = figures(report)["accuracy"]
    assert row["QAT"] < row["PTQ"] == report.metrics["accuracy"]
    plan = QuantPlan.from_json((task.out / "plan.json").read_text())
    assert "qat" not in {value.calibrator for value in plan.values}
    assert f"accuracy {row['QAT']:.6g} (float 1) after it; the model from before is the result" in report.notes[0]
    assert not report.reference.startswith("trained")
    report = Quantize(mode="qat", min_db=-99, qat={**options, "keep": "trained"}).run(task)
    assert report.metrics["accuracy"] == figures(report)["accuracy"]["QAT"] == row["QAT"]
    assert "the trained model is the result" in report.notes[0]


def test_a_loss_that_is_not_finite_is_told_what_this_training_has(work):
    task = work("def loss(net, batch): return net(batch[0]).sum() * float('nan')\n")
    with pytest.raises(StageError, match="the loss is nan") as error:
        Quantize(mode="qat", **POOR, min_db=-99, qat={"steps": 30}).run(task)
    assert "scale_lr" in error.value.hint and "triage" not in error.value.hint
    task = work(
        """
calls = 0
def loss(net, batch):
    global calls
    calls += 1
    return net(batch[0]).square().mean() * (float('nan') if calls == 3 else 1.0)
""",
        scratch="second",
    )
    report = Quantize(mode="qat", **POOR, min_db=-99, qat={"steps": 4}).run(task)
    [note] = [note for note in report.notes if "rejected" in note]
    assert note == "step 2 was rejected, since the loss is nan"


def test_the_float_model_teaches_outputs_that_are_no_classes(work):
    task = work("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x): return self.conv(x).mean((2, 3))
def model(): return Net()
def loss(net, batch): return 0.0 * net(batch[0]).sum()
""")
    options = {"steps": 40, "distill": 1.0, "distill_loss": "outputs", "scale_lr": 0.05}
    report = Quantize(mode="qat", **POOR, min_db=-99, qat=options).run(task)
    row = figures(report)["SQNR of y, dB"]
    assert row["QAT"] > row["PTQ"] + 3


def test_a_loss_that_uses_more_than_a_call_is_told(work):
    task = work("def loss(net, batch):\n    return net.encoder(batch[0]).sum()\n")
    with pytest.raises(TaskError, match="encoder"):
        Quantize(mode="qat", qat={"steps": 1}).run(task)
    assert not task.log.steps, "nothing was calibrated before"


def test_a_missing_device_is_told_before_anything_is_calibrated(work, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    task = work()
    with pytest.raises(Unavailable, match="CUDA"):
        Quantize(mode="qat", qat={"steps": 1, "device": "cuda"}).run(task)
    assert not task.log.steps


def test_training_data_is_needed(work):
    task = work("calib_data = train_data\ndel train_data\n")
    with pytest.raises(TaskError, match=r"train_data\(\)"):
        Quantize(mode="qat", qat={"steps": 1}).run(task)


def test_a_model_with_its_own_scales_is_not_trained(work):
    net = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
g (float[n, 3, 6, 6] x) => (float[n, 4] y) <float s = {0.1}, int8 z = {0}> {
  q = QuantizeLinear (x, s, z)
  d = DequantizeLinear (q, s, z)
  a = Conv <pads = [1, 1, 1, 1]> (d, w1, b1)
  p = GlobalAveragePool (a)
  y = Flatten (p)
}""")
    net.graph.initializer.extend(numpy_helper.from_array(WEIGHTS[k], k) for k in ("w1", "b1"))
    with pytest.raises(StageError, match="brings its own Q/DQ"):
        Quantize(mode="qat").run(work(net=net))


def test_fields_that_belong_to_other_modes_are_refused():
    fields_of_others = [{"qat": {"steps": 1}}]
    fields_of_others += [{"mode": "qat", "bias_correction": True}, {"mode": "qat", "search": True}]
    for mode in ("fp16", "none"):
        fields_of_others += [{"mode": mode, "bias_correction": True}, {"mode": mode, "repairs": ["equalize"]}]
    for fields in fields_of_others:
        with pytest.raises(ValidationError):
            Quantize(**fields)
    Quantize(mode="qat", layers={"a": "fp16"})


def test_the_key_has_the_hooks_of_training_in_this_mode_alone():
    assert {"train_data", "loss", "model"} <= set(Quantize(mode="qat").hooks())
    assert "loss" not in Quantize().hooks() and ("train_data",) not in Quantize().rows()
    assert "torch" in Quantize(mode="qat").facts() and "torch" not in Quantize().facts()


def test_check_tries_the_loss_where_no_training_has(work):
    task = work("""
from torch import nn
def model(): return nn.Conv2d(3, 4, 6)
def loss(net, batch): raise ValueError('no')
""")
    look = Inspection(task.root, task.task)
    look.shared["signature"] = Signature.load(task.inputs["model"])
    Quantize(mode="qat").check(look)
    (found,) = [finding for finding in look.findings if finding.item == "loss()"]
    assert found.state == "error" and "ValueError: no" in found.seen


def test_check_reads_the_training_data_where_there_is_no_module(work):
    for more, state in {"": "ok", "calib_data = train_data\ndel train_data\n": "error"}.items():
        task = work(more)
        look = Inspection(task.root, task.task)
        Quantize(mode="qat").check(look)
        assert [f.state for f in look.findings if f.item == "train_data()"] == [state]
