"""Wrong projects: what a run would find out after hours is told by `pipe check`, by item and in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from layerline.pipeline.config.project import load
from layerline.pipeline.run import check as checking
from layerline.pipeline.run.check import Checked
from layerline.pipeline.run.outcome import Outcome
from layerline.pipeline.run.runner import Runner

TASK = """import numpy as np, torch
from torch import nn
X = np.random.default_rng(0).standard_normal((41, 6)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int64)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.head(torch.relu(self.hidden(x)))
def model(): return Net()
def train_data(): return X, Y
def eval_data(): return X[:20], Y[:20]
def loss(net, batch):
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)
def metric(outputs, targets): return float((outputs.argmax(1) == targets).mean())
"""
YAML = """train: {epochs: 1, batch_size: 8}
export: {dynamic: {x: {0: {name: batch, min: 1, max: 32}}}}
quantize: {max_drop: 0.1, samples: 8}
engine: {profiles: [{batch: [1, 4, 32]}]}
"""
TOKENS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)
    def forward(self, x): return self.head(self.table(x).mean(1))
X = np.random.default_rng(0).integers(0, 8, (41, 6))
"""
DATASET = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): {body}
"""


class Wrong(NamedTuple):
    """An edit of the project, and the finding that must come of it."""

    item: str
    words: str
    task: str = ""
    yaml: str = ""
    old: str = ""
    state: str = "error"


FAST = {
    "no teacher": Wrong(
        "teacher()",
        "distillation.alpha asks for it",
        yaml="train: {epochs: 1, distillation: {alpha: 0.5}}",
        old="train",
    ),
    "a teacher of other classes": Wrong(
        "loss()",
        "the student gives (2, 2), the teacher (2, 3)",
        "def teacher(): return nn.Linear(6, 3)",
        "train: {epochs: 1, distillation: {alpha: 0.5}}",
        "train",
    ),
    "a teacher of other inputs": Wrong(
        "loss()",
        "teacher() raised RuntimeError",
        "def teacher(): return nn.Linear(5, 2)",
        "train: {epochs: 1, distillation: {alpha: 0.5}}",
        "train",
    ),
    "metric raises": Wrong(
        "metric()",
        "metric() raised IndexError: index 7 is out of bounds for axis 0 with size 2; it was called with outputs: "
        "float32 (2, 2), targets: int64 (2,)",
        "def metric(outputs, targets): return outputs[0][7]",
    ),
    "metric of dicts": Wrong(
        "metric()",
        "raised KeyError: 'class'; it was called with outputs: float32 (2, 2), targets: {kind: int64 (2,)}",
        DATASET.format(body="return X[i], {'kind': int(Y[i])}")
        + "def eval_data(): return Data()\ndef metric(outputs, targets): return targets['class'].mean()",
    ),
    "metric is text": Wrong("metric()", "metric() gave 'good'", "def metric(outputs, targets): return 'good'"),
    "metrics": Wrong("task.py", "metrics() is no hook", "def metrics(", old="def metric(", state="warning"),
    "mdel": Wrong("model()", "needs the hook model()", "def mdel(", old="def model("),
    "unknown input": Wrong(
        "export.dynamic", "unknown input 'image'", yaml="export: {dynamic: {image: {0: batch}}}", old="export"
    ),
    "profile beyond": Wrong(
        "engine.profiles", "exported for 1 to 32", yaml="engine: {profiles: [{batch: [1, 4, 64]}]}", old="engine"
    ),
    "skip": Wrong("quantize.skip", "'haed' matches no", yaml="quantize: {skip: [haed]}", old="quantize"),
    "ops": Wrong("quantize.ops", "'Gem' has no int8 rule", yaml="quantize: {ops: [Gem]}", old="quantize"),
    "labels": Wrong("loss()", "targets go from", "Y = Y + 5\nfrom functools import partial\ndel loss"),
    "list of columns": Wrong(
        "train_data()",
        "list whose items differ: float32 (41, 6) and int64 (41,)",
        "def train_data(): return [X, Y]",
    ),
    "calibration": Wrong(
        "calib_data()", "gives shape (2, 5); the model takes (batch, 6)", "def calib_data(): return X[:, :5]"
    ),
    "syntax": Wrong("task.py", "importing it raised SyntaxError", "def metric(:"),
}
SLOW = {
    "metric takes one": Wrong("metric()", "takes 1 positional argument", "def metric(outputs): return 1.0"),
    "metric is empty": Wrong("metric()", "it gave no figure", "def metric(outputs, targets): return {}"),
    "eval_dat": Wrong("task.py", "eval_dat() is no hook", "def eval_dat(", old="def eval_data(", state="warning"),
    "no evaluation": Wrong("quantize.max_drop", "the task has no eval_data()", "def eval_dat(", old="def eval_data("),
    "calibration_data": Wrong(
        "task.py", "there is a hook calib_data()", "def calibration_data(): return X", state="warning"
    ),
    "train_loader": Wrong("train_data()", "needs the hook train_data()", "def train_loader(", old="def train_data("),
    "a module for a hook": Wrong("task.py", "model is a Net, expected a function", "model = Net()"),
    "a loss for a hook": Wrong("task.py", "loss is a CrossEntropyLoss", "loss = nn.CrossEntropyLoss()"),
    "no such axis": Wrong(
        "export.dynamic", "there is no axis 5", yaml="export: {dynamic: {x: {5: batch}}}", old="export"
    ),
    "bounds": Wrong(
        "export.dynamic", "leave nothing to vary", yaml="export: {dynamic: {x: {0: {name: b, max: 1}}}}", old="export"
    ),
    "a size that is fixed": Wrong(
        "export.dynamic",
        "forward() itself fails at 12",
        yaml="export: {dynamic: {x: {1: {name: features, max: 12}}}}",
        old="export",
    ),
    "ranges of floats": Wrong(
        "export.ranges", "ranges are for integers", yaml="export: {ranges: {x: {low: 0, high: 9}}}", old="export"
    ),
    "ranges of nothing": Wrong(
        "export.ranges", "unknown input 'ids'", yaml="export: {ranges: {ids: {low: 0, high: 9}}}", old="export"
    ),
    "ranges below the example": Wrong(
        "export.ranges", "the example holds", TOKENS, "export: {ranges: {x: {low: 9, high: 9}}}", "export"
    ),
    "ranges beyond the table": Wrong(
        "export.ranges",
        "forward() itself fails on x over [0, 10]",
        TOKENS,
        "export: {ranges: {x: {low: 0, high: 10}}}",
        "export",
    ),
    "a dimension of no name": Wrong(
        "engine.profiles", "dynamic dimension 'bach'", yaml="engine: {profiles: [{bach: [1, 2, 4]}]}", old="engine"
    ),
    "a profile where nothing varies": Wrong("engine.profiles", "'batch'", yaml="export: {}", old="export"),
    "opset": Wrong("export.opset", "knows opsets up to", yaml="export: {opset: 99}", old="export"),
    "model gives a class": Wrong("model()", "expected a torch.nn.Module", "def model(): return Net"),
    "model raises": Wrong("model()", "model() raised FileNotFoundError", "def model(): return open('weights.pt')"),
    "lazy": Wrong("model()", "is not initialised", "def model(): return nn.LazyLinear(2)"),
    "features": Wrong("loss()", "mat1 and mat2 shapes cannot be multiplied", "def model(): return nn.Linear(7, 2)"),
    "a loss for each sample": Wrong(
        "loss()", "a tensor of shape (2,)", "def loss(net, batch): return net(batch[0])[:, 0]"
    ),
    "a loss of no tensor": Wrong("loss()", "loss() gave float", "def loss(net, batch): return 1.0"),
    "a detached loss": Wrong(
        "loss()",
        "expected a scalar tensor with a gradient",
        "def loss(net, batch): return net(batch[0]).sum().detach()",
    ),
    "a key of no batch": Wrong(
        "loss()",
        "batch: (float32 (2, 6), int64 (2,))",
        "def loss(net, batch): return net(batch['x']).sum()",
    ),
    "frozen": Wrong(
        "train", "no parameter of the model requires a gradient", "def model(): return Net().requires_grad_(False)"
    ),
    "lengths": Wrong("train_data()", "lengths [41, 40]", "def train_data(): return X, Y[1:]"),
    "a generator": Wrong("train_data()", "cannot be replayed", "def train_data(): yield X, Y"),
    "no samples": Wrong("train_data()", "gave no samples", "def train_data(): return X[:0], Y[:0]"),
    "no length": Wrong(
        "train_data()",
        "does not tell its length",
        "class Data:\n    def __iter__(self): return iter([(X, Y)])\ndef train_data(): return Data()",
    ),
    "a sample that fails": Wrong(
        "train_data()",
        "raised KeyError: 'img'",
        DATASET.format(body="raise KeyError('img')") + "def train_data(): return Data()",
    ),
    "ragged samples": Wrong(
        "train_data()",
        "equal size",
        DATASET.format(body="return X[i][:i + 1], 0") + "def train_data(): return Data()",
    ),
    "a name that is no input": Wrong("calib_data()", "unknown input 'image'", "def calib_data(): return {'image': X}"),
    "integers for floats": Wrong(
        "calib_data()", "gives complex128; the model takes float32", "def calib_data(): return X.astype(complex)"
    ),
    "evaluation without targets": Wrong("metric()", "gives no targets", "def eval_data(): return X"),
    "classes as floats": Wrong(
        "metric()", "are no classes", "def eval_data(): return X, Y.astype(np.float32)\ndel metric"
    ),
    "an example of another shape": Wrong(
        "example_inputs()", "cannot run on the example", "def example_inputs(): return torch.ones(2, 5)"
    ),
    "an example of too much": Wrong(
        "example_inputs()", "does not fit forward()", "def example_inputs(): return torch.ones(2, 6), torch.ones(2)"
    ),
    "a branch on values": Wrong(
        "export",
        "exporter can't follow this",
        "class Branches(Net):\n    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x[:, :2]\n"
        "def model(): return Branches()",
    ),
    "a package that is not there": Wrong("task.py", "ModuleNotFoundError", "import no_such_package"),
    "validation without data": Wrong(
        "eval_data()",
        "training.valid_interval asks for the metric",
        "del eval_data",
        "train: {epochs: 1, batch_size: 8, training: {valid_interval: 5}}",
        "train",
    ),
    "a last batch of one": Wrong(
        "train.batch_size",
        "the last batch of an epoch has 1 of the 41 samples",
        "def model(): return nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))",
    ),
    "NaN in the data": Wrong("loss()", "the loss is NaN or infinite", "X[0, 0] = np.nan", state="warning"),
    "a budget below one sample": Wrong(
        "quantize.max_drop",
        "0.01 is less than one of the 20 samples of eval_data() is worth in a share (0.05)",
        yaml="quantize: {max_drop: 0.01}",
        old="quantize",
        state="warning",
    ),
    "a budget for no metric": Wrong(
        "quantize.max_drop",
        "metric() gives no metric 'acuracy'",
        "def metric(outputs, targets): return {'accuracy': 1.0}",
        yaml="quantize: {max_drop: {acuracy: 0.5%}}",
        old="quantize",
    ),
    "operators that are not there": Wrong(
        "quantize.ops",
        "none of Conv is in the model",
        yaml="quantize: {ops: [Conv]}",
        old="quantize",
        state="warning",
    ),
    "an example of no example": Wrong(
        "eval_data()", "mat1 and mat2 shapes cannot be multiplied", "def eval_data(): return X[:, :5], Y"
    ),
    "more samples than there are": Wrong(
        "quantize.samples",
        "5000 are requested, train_data() has 41",
        yaml="quantize: {samples: 5000}",
        old="quantize",
        state="warning",
    ),
    "a layer that nothing reads": Wrong(
        "loss()",
        "2 of 6 parameters get no gradient: spare.weight, spare.bias",
        "class Spare(Net):\n    def __init__(self):\n        super().__init__()\n        self.spare = nn.Linear(2, 2)\n"
        "def model(): return Spare()",
        state="warning",
    ),
}


def project(root: Path, wrong: Wrong | None = None) -> Path:
    root.mkdir(exist_ok=True)
    task, yaml = TASK, YAML
    if wrong and wrong.old in ("export", "engine", "quantize", "train"):
        yaml = "".join(f"{wrong.yaml}\n" if ln.startswith(wrong.old) else f"{ln}\n" for ln in YAML.splitlines())
        task += wrong.task
    elif wrong and wrong.old:
        task = task.replace(wrong.old, wrong.task)
    elif wrong:
        task += wrong.task
    (root / "task.py").write_text(task)
    (root / "pipe.yaml").write_text(yaml)
    return root


def looked_at(root: Path) -> Checked:
    return checking.check(load(root))


def told(wrong: Wrong, root: Path) -> None:
    done = looked_at(project(root, wrong))
    seen = [(f.item, f.state, f.seen) for f in done.findings if f.state != "ok"]
    assert any(wrong.words in s and (i, st) == (wrong.item, wrong.state) for i, st, s in seen), seen
    assert done.exit_code == (2 if wrong.state == "error" else done.exit_code)


def test_nothing_is_wrong_with_a_project_that_runs(tmp_path: Path) -> None:
    done = looked_at(project(tmp_path / "p"))
    assert [f.item for f in done.findings if f.state != "ok"] == [] and done.exit_code == 0
    items = {f.item for f in done.findings}
    assert {"task.py", "model()", "train_data()", "loss()", "eval_data()", "metric()"} <= items
    assert {"export.dynamic", "export", "engine.profiles", "engine.runtime", "disk"} <= items
    assert json.loads(json.dumps(done.to_json()))["passed"] is True


@pytest.mark.parametrize("name", FAST)
def test_a_wrong_project_is_told(name: str, tmp_path: Path) -> None:
    told(FAST[name], tmp_path / "p")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_further_wrong_projects_are_told(name: str, tmp_path: Path) -> None:
    told(SLOW[name], tmp_path / "p")


RIGHT = {
    "a loss over pairs": Wrong(
        "",
        "",
        "def loss(net, batch):\n    assert len(batch[0]) >= 4\n    return net(batch[0]).pow(2).mean()",
    ),
    "a metric over classes, in loaders sorted by class": Wrong(
        "",
        "",
        "def eval_data(): return [(X[Y == k][:19], Y[Y == k][:19]) for k in (0, 1) for _ in range(5)]\n"
        "def metric(outputs, targets):\n    if len(set(targets)) < 2: raise ValueError('one class')\n    return 1.0",
    ),
    "a warm-up longer than the epochs are many": Wrong(
        "", "", yaml="train: {epochs: 2, batch_size: 4, scheduler: {name: cosine, warmup_steps: 8}}", old="train"
    ),
    "a calibration that is read once": Wrong("", "", "def calib_data(): yield X[:9]"),
    "an optional second input": Wrong(
        "",
        "",
        "class Masked(Net):\n    def forward(self, x, mask=None):\n"
        "        return super().forward(x if mask is None else x * mask)\n"
        "def model(): return Masked()",
    ),
    "no profiles and no bounds": Wrong("", "", yaml="engine: {}\nexport: {dynamic: {x: {0: n}}}", old="engine"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_training_takes_is_not_refused(name: str, tmp_path: Path) -> None:
    right = RIGHT[name]
    root = project(tmp_path / "p", right)
    if "export" in right.yaml:
        text = "".join(f"{ln}\n" for ln in (root / "pipe.yaml").read_text().splitlines() if "max: 32" not in ln)
        (root / "pipe.yaml").write_text(text)
    assert not looked_at(root).errors


def test_a_disk_without_room_is_the_machines_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    done = looked_at(project(tmp_path / "p"))
    (lack,) = done.errors
    assert (lack.item, lack.exit_code, done.exit_code) == ("disk", 3, 3) and "0.00 GB are free" in lack.seen


STATEFUL = """
DRAWN, CALLS = np.random.default_rng(3), []
def train_data():
    CALLS.append(1)
    order = DRAWN.permutation(41)
    return X[order], (Y + len(CALLS) - 1)[order] % 2
def loss(net, batch):
    x, y = batch
    return nn.functional.cross_entropy(net(nn.functional.dropout(x + torch.rand(()) + np.random.rand(), 0.3)), y)
"""


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, done: int, total: int, **fields: Any) -> None: ...
    def row(self, figures: Any) -> None: ...
    def started(self, stage: Any, reason: str) -> None: ...
    def finished(self, result: Any) -> None: ...


def trained(root: Path, *sets: str, names: list[str] | None = None) -> tuple[Outcome, Heard]:
    heard = Heard()
    return Runner(load(root, sets), heard).run(names or ["train"]), heard


def test_a_check_before_training_changes_nothing_of_it(tmp_path: Path) -> None:
    digests = set()
    for check in ("true", "false"):
        root = project(tmp_path / check, Wrong("", "", STATEFUL))
        (result,) = trained(root, f"check={check}")[0].results
        assert result.record is not None and result.state == "ran", result.error
        digests.add(result.record.digest)
        assert (root / ".layerline" / "cache" / "checked.json").exists() == (check == "true")
    assert len(digests) == 1


def test_training_does_not_start_where_a_later_stage_of_the_run_would_fail(tmp_path: Path) -> None:
    root = project(tmp_path / "p", FAST["profile beyond"])
    done, _ = trained(root, names=["engine"])
    first = done.results[0]
    assert (first.name, first.state, done.exit_code) == ("train", "failed", 2)
    assert "engine.profiles: the dimension 'batch' runs from 1 to 64" in str(first.error)
    assert [r.state for r in done.results[1:]] == ["blocked"] * 5


def test_what_only_later_stages_need_is_said_and_training_goes_on(tmp_path: Path) -> None:
    root = project(tmp_path / "p", FAST["profile beyond"])
    done, heard = trained(root)
    assert done.passed and any("engine.profiles: the dimension 'batch'" in text for text in heard.said)


def test_a_check_that_passed_is_not_repeated_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, looks, look = project(tmp_path / "p"), list[str](), checking.check

    def counted(found: Any) -> Checked:
        looks.append(found.name)
        return look(found)

    monkeypatch.setattr(checking, "check", counted)
    for sets in ((), ("train.epochs=1",), ("train.epochs=2",)):
        assert Runner(load(root, sets), Heard()).run(["train"], force=True).passed
    assert len(looks) == 2


def test_a_project_that_starts_at_an_onnx_file(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    weight = numpy_helper.from_array(np.ones((6, 2), np.float32), "w")
    ends = [helper.make_tensor_value_info(n, 1, ["n", d]) for n, d in (("x", 6), ("y", 2))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(tmp_path / "m.onnx"))
    (tmp_path / "task.py").write_text(
        "import numpy as np\nX = np.ones((9, 6), np.float32)\ndef calib_data(): return X\n"
        "def eval_data(): return X, np.zeros(9, np.int64)\n"
    )
    wrong = {
        "dims: {batch: {max: 4}}": ("import-onnx.dims", "there is no dimension 'batch'"),
        "values: {sr: 16000}": ("import-onnx.dims", "there is no input 'sr'"),
        "ranges: {x: {low: 0, high: 4}}": ("import-onnx.dims", "there is no integer input 'x'"),
        "dims: {n: {max: 4}}}\nengine: {profiles: [{n: [1, 2, 8]}]": ("engine.profiles", "exported for 1 to 4"),
        "file: other.onnx": ("import-onnx.file", ""),
        "opset: 20}\nquantize: {skip: [hh]": ("quantize.skip", "'hh' matches no value"),
        "opset: 20}\nquantize: {ops: [Conv]": ("quantize.ops", "none of Conv is in the model"),
    }
    (tmp_path / "pipe.yaml").write_text("import-onnx: {file: m.onnx}\n")
    assert [f for f in looked_at(tmp_path).findings if f.state != "ok"] == []
    for text, (item, words) in wrong.items():
        file = "" if text.startswith("file") else "file: m.onnx, "
        (tmp_path / "pipe.yaml").write_text(f"import-onnx: {{{file}{text}}}\n")
        seen = [(f.item, f.seen) for f in looked_at(tmp_path).findings if f.state != "ok"]
        assert any(item == i and words in s for i, s in seen), (text, seen)


def test_calibration_without_data_is_an_error_where_the_run_would_fail(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    weight = numpy_helper.from_array(np.ones((6, 2), np.float32), "w")
    ends = [helper.make_tensor_value_info(n, 1, ["n", d]) for n, d in (("x", 6), ("y", 2))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    (tmp_path / "task.py").write_text("")
    states = {
        "mode: int8": "error",
        "mode: fp8": "error",
        "mode: fp16": None,
        "mode: int4": None,
        "mode: int4, repairs: [gptq]": "error",
        "mode: int8, ops: [Conv]": "warning",  # nothing to calibrate: that there is no Conv is a finding of its own
    }
    for fields, state in states.items():
        (tmp_path / "pipe.yaml").write_text(f"import-onnx: {{file: m.onnx}}\nquantize: {{{fields}}}\n")
        findings = {finding.item: finding for finding in looked_at(tmp_path).findings}
        assert getattr(findings.get("calib_data()"), "state", None) == state, fields
    (tmp_path / "pipe.yaml").write_text("import-onnx: {file: m.onnx}\n")
    [error] = [finding for finding in looked_at(tmp_path).findings if finding.state == "error"]
    assert "defines none of calib_data()" in error.seen and "fp16" in error.hint
