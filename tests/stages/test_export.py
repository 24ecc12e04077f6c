"""export: what people bring comes out as ONNX that does the same at every declared size, or the reason is told."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare import noise_floor
from layerline.export import probe_files, torch_export
from layerline.export.signature import Dim, Signature
from layerline.graph.io import module_identity, onnx_files
from layerline.parity.export_report import flip_notes, start_of_difference
from layerline.pipeline.errors import ConfigError, PipeError, StageError, TaskError
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.export import Axis, Export
from layerline.stages.fuse import Fuse
from layerline.training.data import golden_outputs
from layerline.training.model import canonical_names as names
from layerline.training.state import safetensors_io

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


class Quiet:
    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: Any) -> None: ...


class Project:
    """A task file, its weights as the ema stage leaves them, and an artifact folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "onnx"

    def work(self, source: str) -> Work:
        for folder in ("weights", "onnx", "scratch"):
            (self.root / folder).mkdir(exist_ok=True)
        (self.root / "task.py").write_text(HEAD + source)
        task, weights = Task(self.root / "task.py"), self.root / "weights"
        torch.manual_seed(0)
        module = task.call("model").eval()
        known = names.named(module)
        safetensors_io.save(weights / "model.safetensors", known.tensors, {"aliases": known.aliases})
        return Work(inputs={"weights": weights}, task=task, out=self.out, scratch=self.root / "scratch", log=Quiet())

    def export(self, source: str, **config: Any) -> Report:
        return Export(**config).run(self.work(source))

    def model(self) -> onnx.ModelProto:
        return onnx_files.load(self.out / onnx_files.FILE)

    def shapes(self) -> dict[str, list[int | str]]:
        graph = self.model().graph
        return {
            i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
            for i in (*graph.input, *graph.output)
        }

    def run(self, **feed: Any) -> dict[str, np.ndarray]:
        return OnnxRuntime().open(self.out / onnx_files.FILE).run({k: np.asarray(v) for k, v in feed.items()})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def module(body: str, init: str = "pass", example: str = "torch.randn(2, 3),", takes: str = "x") -> str:
    lines = "\n        ".join(body.splitlines())
    return f"""
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
    def forward(self, {takes}):
        {lines}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, {takes}):
        return self.inner({takes})
def model(): return Net()
def example_inputs(): return ({example})
"""


@pytest.mark.parametrize(("declared", "told"), [("batch", 1), ({"name": "batch", "max": 4}, 0)])
def test_how_far_an_axis_without_max_goes_is_told(project: Project, declared: Any, told: int) -> None:
    report = project.export(module("return x + 1"), dynamic={"x": {0: declared}})
    found = [n for n in report.notes if "declared without max" in n]
    assert len(found) == told and all("batch" in n and f"to {Signature.load(project.out).dims['batch'].max}," in n
                                      for n in found)  # fmt: skip


CONV = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
def model(): return Net()
def eval_data(): return torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2
"""


def test_an_example_batch_of_one_is_traced_as_dynamic(project: Project) -> None:
    """T01; and everything the artifact holds."""
    source = CONV + "def example_inputs(): return (torch.randn(1, 3, 8, 8),)\n"
    report = project.export(source, dynamic={"x": {0: "batch"}})
    assert report.passed and report.first_failing() is None
    assert project.shapes() == {"x": ["batch", 3, 8, 8], "output": ["batch", 2]}
    names_ = [r.name for r in report.records]
    assert names_ == ["conv2d", "getitem", "relu", "mean", "view", "output"]
    by_name = {r.name: r for r in report.records}
    assert [by_name[n].module for n in ("conv2d", "getitem", "output")] == ["conv", "norm", "head"]
    assert by_name["conv2d"].extra["source"] == "task.py:10"
    assert {"floor", "ratio"} <= by_name["conv2d"].extra.keys()
    assert [g.name for g in report.gates] == [
        "module itself, example", "module itself, 4 samples", "module itself, batch=1", "module itself, batch=3",
        "module itself, batch=8",
    ]  # fmt: skip
    signature = Signature.load(project.out)
    assert signature.dims == {"batch": Dim(min=1, max=8)}
    assert [(v.name, v.dtype, v.shape) for v in signature.inputs] == [("x", "float32", ("batch", 3, 8, 8))]
    feeds = probe_files.load(project.out)
    assert [len(f["x"]) for f in feeds] == [2, 4, 1, 3, 8]
    assert noise_floor.load(project.out).keys() >= by_name.keys()
    net = Task(project.root / "task.py").call("model").eval()
    names.load(net, safetensors_io.load(project.root / "weights" / "model.safetensors")[0])
    for n in (1, 2, 5):
        x = torch.randn(n, 3, 8, 8)
        np.testing.assert_allclose(project.run(x=x)["output"], net(x).detach(), rtol=1e-3, atol=1e-5)


def test_the_same_content_has_the_same_bytes(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Project(tmp_path_factory.mktemp("elsewhere"))
    for each in (project, other):
        each.export(CONV, dynamic={"x": {0: "batch"}})
    for file in sorted(p.name for p in project.out.iterdir()):
        assert (project.out / file).read_bytes() == (other.out / file).read_bytes(), file
    assert str(project.root).encode() not in (project.out / onnx_files.FILE).read_bytes()


def test_data_stands_in_for_an_example_and_bounds_are_kept(project: Project) -> None:
    config = {"dynamic": {"x": {0: {"name": "batch", "min": 1, "max": 6}}}, "probes": 3}
    report = project.export(CONV, **config)
    assert report.passed
    assert [g.name.rpartition(", ")[2] for g in report.gates] == [
        "example",
        "3 samples",
        "batch=1",
        "batch=3",
        "batch=6",
    ]
    assert Signature.load(project.out).dims == {"batch": Dim(min=1, max=6)}


GRU = module(
    "return self.g(data, h0)", "self.g = nn.GRU(20, 20)", "torch.randn(10, 1, 20), torch.zeros(1, 1, 20)", "data, h0"
)


def test_a_misspelt_input_is_an_error(project: Project) -> None:
    """T02."""
    with pytest.raises(ConfigError, match="unknown input 'attention_mask'") as error:
        project.export(GRU, dynamic={"data": {1: "b"}, "attention_mask": {0: "b"}})
    assert "data, h0" in error.value.hint
    with pytest.raises(TaskError, match="at b=2") as blamed:
        project.export(GRU, dynamic={"data": {1: "b"}})
    assert "tie the other inputs' axes" in blamed.value.hint


def test_a_recurrent_layer_over_any_length(project: Project) -> None:
    """The exporter notes the example's length down as the output's; the artifact must not."""
    report = project.export(GRU, dynamic={"data": {0: "t", 1: "b"}, "h0": {1: "b"}})
    assert report.passed
    assert project.shapes()["output_0"] == ["t", "b", 20]
    assert project.run(data=np.zeros((3, 4, 20), np.float32), h0=np.zeros((1, 4, 20), np.float32))[
        "output_0"
    ].shape == (3, 4, 20)


@pytest.mark.parametrize("values", ["-5, -1, 0, 4", "1, 2, 0, 4"])
def test_floor_division_of_negative_integers(project: Project, values: str) -> None:
    """T03: the probes hold negatives even where the example has none."""
    report = project.export(module("return x // 3, x % 3", example=f"torch.tensor([{values}]),"))
    assert report.passed
    found = project.run(x=np.array([-5, -1, 0, 4]))
    assert found["output_0"].tolist() == [-2, -1, 0, 1]
    assert found["output_1"].tolist() == [1, 2, 0, 1]
    assert min(int(f["x"].min()) for f in probe_files.load(project.out)) < 0


EMBED = module(
    "return self.o(self.e(ids))",
    "self.e, self.o = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False); self.o.weight = self.e.weight",
    "torch.tensor([[1, 5, 3]]),", "ids",
)  # fmt: skip


def test_declared_integers_are_probed_to_both_ends_and_tied_weights_stored_once(project: Project) -> None:
    """T37, and the range of T03."""
    report = project.export(EMBED, ranges={"ids": {"low": 0, "high": 8}})
    assert report.passed
    seen = np.concatenate([f["ids"].ravel() for f in probe_files.load(project.out)])
    assert (seen.min(), seen.max()) == (0, 8)
    assert (Signature.load(project.out).inputs[0].low, Signature.load(project.out).inputs[0].high) == (0, 8)
    assert len(project.model().graph.initializer) == 1
    assert not any("refuses" in n for n in report.notes)


@pytest.mark.parametrize(
    ("ranges", "told"),
    [({"ids": {"low": 0, "high": 9}}, "index out of range"), ({"x": {"low": 0, "high": 1}}, "unknown input 'x'")],
)
def test_ranges_that_do_not_fit_are_errors(project: Project, ranges: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        project.export(EMBED, ranges=ranges)


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        ({"id": {"low": 0, "high": 5}}, "unknown input 'id'"),
        ({"ids": {"low": 0, "high": 99}}, "forward() itself fails"),
    ],
)
def test_ranges_are_checked_before_the_trace(
    project: Project, ranges: Mapping[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("traced, which takes minutes for a large model")

    monkeypatch.setattr(torch_export, "trace", never)
    with pytest.raises(ConfigError, match=re.escape(told)):
        project.export(EMBED, ranges=ranges)


NESTED = """
from dataclasses import dataclass
@dataclass
class Out:
    logits: torch.Tensor
    extra: tuple
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
    def forward(self, x, batch, flag=None, n=2, *, scale):
        y = self.inner(x) * n * scale
        y = torch.where(batch["mask"], y, batch["pair"][0].float())
        return Out(logits=y, extra=(batch["pair"][1] + 1, None, x))
def model(): return Net()
def example_inputs():
    mask = torch.tensor([[True, False, True]] * 2)
    return {"scale": torch.tensor(2.0), "x": torch.randn(2, 3),
            "batch": {"mask": mask, "pair": [torch.ones(2, 3, dtype=torch.int32), torch.tensor(5)]}}
"""


def test_nested_inputs_of_every_type_and_a_dataclass_as_output(project: Project) -> None:
    tied = {"x": {0: "n"}, "batch_mask": {0: "n"}, "batch_pair_0": {0: "n"}}
    report = project.export(NESTED, dynamic=tied)
    assert report.passed
    assert project.shapes() == {
        "x": ["n", 3], "batch_mask": ["n", 3], "batch_pair_0": ["n", 3], "batch_pair_1": [], "scale": [],
        "logits": ["n", 3], "extra_0": [], "extra_2": ["n", 3],
    }  # fmt: skip
    dtypes = [v.dtype for v in Signature.load(project.out).inputs]
    assert dtypes == ["float32", "bool", "int32", "int64", "float32"]


def test_arguments_that_are_no_tensors_are_told(project: Project) -> None:
    source = module("return x * n", example="torch.ones(2, 3), 3", takes="x, n")
    report = project.export(source)
    assert any("input n is no tensor: its value 3 is part of the graph" in n for n in report.notes)
    assert (project.run(x=np.ones((2, 3), np.float32))["output"] == 3).all()


def test_one_tensor_given_for_two_inputs(project: Project) -> None:
    source = module("return x - 2 * y", example="T, T", takes="x, y") + "T = torch.ones(2, 3)\n"
    assert project.export(source).passed
    ones = np.ones((2, 3), np.float32)
    assert (project.run(x=3 * ones, y=ones)["output"] == 1).all()


def test_sizes_in_steps(project: Project) -> None:
    source = module("return F.pixel_unshuffle(x, 4)", example="torch.randn(1, 3, 4, 8),")
    steps = {2: {"name": "h", "multiple": 4}, 3: {"name": "w", "multiple": 4, "max": 32}}
    report = project.export(source, dynamic={"x": steps})
    assert report.passed
    assert {f["x"].shape[2] % 4 for f in probe_files.load(project.out)} == {0}
    assert Signature.load(project.out).dims["w"] == Dim(min=4, max=32, multiple=4)


LINE_10 = "module inner (task.py:10)"
SLOW = pytest.mark.slow  # of a kind with its neighbour
COUNTER = "self.register_buffer('n', torch.zeros(1))"
BN, DROPOUT = "self.n = nn.BatchNorm1d(3)", "self.d = type('D', (nn.Dropout,), {'train': lambda s, m=True: s})(0.5)"


@pytest.mark.parametrize(
    ("body", "init", "told", "where"),
    [
        pytest.param("return x + torch.zeros(2, 3)", "pass", "fixed at 2", "input x, axis 0", marks=SLOW),
        ("return x + self.h", "self.register_buffer('h', torch.zeros(2, 3))", "fixed at 2", "input x, axis 0"),
        ("for i in range(x.shape[0]): x = x + i\nreturn x", "pass", "fixed at 2", "input x, axis 0 (task.py:10)"),
        ("if x.sum() > 0: return x\nreturn -x", "pass", "control flow", "module inner (task.py:10)"),
        pytest.param("return x * [1, 2][int(x[0, 0] > 0)]", "pass", "Python number", LINE_10, marks=SLOW),
        ("return torch.special.bessel_j0(x)", "pass", "bessel_j0.default has no counter", "module inner (task.py:10)"),
        pytest.param("self.n += 1\nreturn x + self.n", COUNTER, "buffer 'inner.n'", "module inner", marks=SLOW),
        ("self.n.training = True\nreturn self.n(x)", BN, "buffer 'inner.n.running_mean'", "module inner.n"),
        ("return F.dropout(x, 0.5, True)", "pass", "in training mode", "module inner (task.py:10)"),
        ("return self.d(x)", DROPOUT, "still in training mode", "module inner.d"),
        ("return {'cache': {x}}", "pass", "returns a set", "output cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_named(project: Project, body: str, init: str, told: str, where: str) -> None:
    with pytest.raises(PipeError) as error:
        project.export(module(body, init), dynamic={"x": {0: {"name": "n", "max": 8}}})
    assert told in error.value.what
    assert error.value.where == where
    assert error.value.hint


T16: dict[int, Any] = {1: {"name": "t", "max": 16}}


@pytest.mark.parametrize(
    ("condition", "dynamic", "sizes", "guard"),
    [
        ("t == 7", T16, "t=7", "t != 7 (task.py:11)"),
        ("t > 4", T16, "t=16", "t <= 4 (task.py:11)"),
        ("t > 8 and t < 12", T16, "t=9", "t <= 8 (task.py:11)"),
        ("b * t > 64", T16 | {0: {"name": "b", "max": 8}}, "b=8, t=9", "t*b <= 64 (task.py:11)"),
        ("t == 200", {1: "t"}, "t=200", "t != 200 (task.py:11)"),
        pytest.param("t % 5 == 0", {1: {"name": "t", "max": 9}}, "t=5", "(t % 5) != 0 (task.py:11)", marks=SLOW),
        pytest.param("b == t", {1: {"name": "t", "min": 3}, 0: "b"}, "b=3", "b != t (task.py:11)", marks=SLOW),
        pytest.param("t > 5 and t == 13", T16, "t=13", "t <= 5 (task.py:11)", marks=SLOW),
    ],
)
def test_a_branch_on_a_size_fails_at_that_size(
    project: Project, condition: str, dynamic: Mapping[int, Any], sizes: str, guard: str
) -> None:
    """Also where no other probe has the size."""
    body = f"b, t = x.shape[:2]\nif {condition}: return x * 2\nreturn x"
    report = project.export(module(body, example="torch.randn(2, 3, 3),"), dynamic={"x": dynamic})
    failed = [g for g in report.gates if not g.passed]
    assert not report.passed
    assert f"module itself, {sizes}" in [g.name for g in failed]
    assert all(guard in g.hint for g in failed)


@pytest.mark.parametrize("condition", ["t == 7", "t > 4", pytest.param("t > 8 and t < 12", marks=SLOW)])
def test_a_branch_that_gives_the_same_passes(project: Project, condition: str) -> None:
    body = f"t = x.shape[1]\nif {condition}: return x + x\nreturn x * 2"
    report = project.export(module(body, example="torch.randn(2, 3, 3),"), dynamic={"x": T16})
    assert report.passed
    assert not any("forward()" in n for n in report.notes)


def test_a_size_that_no_bounds_allow_is_not_run(project: Project) -> None:
    body = "if x.shape[1] in (17, 6): return x * 2\nreturn x"
    steps = {1: {"name": "t", "max": 16, "multiple": 4}}
    report = project.export(module(body, example="torch.randn(2, 8, 3),"), dynamic={"x": steps})
    assert report.passed
    assert {f["x"].shape[1] for f in probe_files.load(project.out)} == {4, 8, 12, 16}


def test_a_size_in_the_middle_that_the_module_refuses(project: Project) -> None:
    body = "if x.shape[1] == 7: raise ValueError('seven')\nreturn x * 2"
    with pytest.raises(ConfigError, match="forward\\(\\) itself fails at 7: ValueError: seven"):
        project.export(module(body, example="torch.randn(2, 3, 3),"), dynamic={"x": T16})


def test_a_size_that_takes_too_much_memory_is_told(project: Project) -> None:
    body = "if x.shape[1] == 99999: return x\nreturn torch.einsum('btc,bsc->bts', x, x)"
    report = project.export(module(body, example="torch.randn(2, 3, 3),"), dynamic={"x": {1: "t"}})
    assert report.passed
    (note,) = (n for n in report.notes if "too much memory" in n)
    assert note.startswith("t=99999") and "breaks t != 99999 (task.py:10)" in note and "not run" in note


def test_a_size_the_module_itself_refuses(project: Project) -> None:
    source = module("return self.c(x)", "self.c = nn.Conv1d(3, 3, 5)", "torch.randn(2, 3, 9),")
    report = project.export(source, dynamic={"x": {2: "t"}})
    assert report.passed and Signature.load(project.out).dims["t"].min > 1
    assert any("forward() itself refuses t=1" in n for n in report.notes)
    with pytest.raises(ConfigError, match="forward\\(\\) itself fails at 1"):
        project.export(source, dynamic={"x": {2: {"name": "t", "min": 1}}})


def test_weights_that_do_not_fit_and_golden_outputs_that_changed(project: Project) -> None:
    work = project.work(module("return self.l(x)", "self.l = nn.Linear(3, 3)"))
    weights = work.inputs["weights"]
    net = work.task.call("model").eval()
    stored = safetensors_io.load(weights / "model.safetensors")[0]
    names.load(net, stored)
    safetensors_io.save(weights / "golden.safetensors", golden_outputs.record(net, (torch.ones(2, 3),), {}))
    assert "golden output" in [g.name for g in Export().run(work).gates if g.passed]
    moved = stored | {"inner.l.bias": stored["inner.l.bias"] + 1}
    safetensors_io.save(weights / "model.safetensors", moved)
    assert "golden output" in [g.name for g in Export().run(work).gates if not g.passed]
    safetensors_io.save(weights / "model.safetensors", {"inner.l.weight": stored["inner.l.weight"]})
    with pytest.raises(StageError, match=r"missing inner\.l\.bias"):
        Export().run(work)


def test_an_output_named_like_an_input_is_compared_with_its_golden_answer(project: Project) -> None:
    work = project.work(module("return {'x': self.l(x), 'z': x}", "self.l = nn.Linear(3, 3)"))
    weights = work.inputs["weights"]
    net = work.task.call("model").eval()
    names.load(net, safetensors_io.load(weights / "model.safetensors")[0])
    recorded = golden_outputs.record(net, (torch.ones(2, 3),), {})
    safetensors_io.save(weights / "golden.safetensors", recorded)
    assert {"golden x_out", "golden z"} <= {g.name for g in Export().run(work).gates if g.passed}
    safetensors_io.save(weights / "golden.safetensors", recorded | {"outputs/x": recorded["outputs/x"] + 1})
    assert [g.name for g in Export().run(work).gates if not g.passed] == ["golden x_out"]
    safetensors_io.save(weights / "golden.safetensors", {k: v for k, v in recorded.items() if k != "outputs/x"})
    (gate,) = (g for g in Export().run(work).gates if not g.passed)
    assert gate.name == "golden x_out" and gate.seen == "no answer was recorded for it"


def test_where_it_starts_is_told_and_written_down(project: Project) -> None:
    work = project.work(module("return self.l(x).exp()", "self.l = nn.Linear(3, 3)", "torch.randn(64, 3),"))
    assert Export().debug(work, project.root / "bug") is None
    nothing_allowed = Export(tolerance={"rtol": 0, "atol": 0})
    report = nothing_allowed.run(work)
    first = report.first_failing()
    assert first is not None and (first.name, first.module) == ("linear", "inner.l")
    told = next(n for n in report.notes if n.startswith("it starts at"))
    assert "linear (inner.l, task.py:10)" in told and "pipe debug export" in told
    assert nothing_allowed.debug(work, project.root / "bug").name == "linear"
    assert (project.root / "bug" / onnx_files.FILE).is_file()


def test_jumps_are_counted_and_told_as_causes() -> None:
    rows = (
        LayerDiff(name="gt", op="Greater", module="inner", rel_l2=0.0, tolerance=0.0, extra={"flips": 2}),
        LayerDiff(
            name="where", op="Where", module="inner", rel_l2=0.5, tolerance=1e-6, extra={"ratio": 9.0, "cause": "it"}
        ),
    )
    (note,) = flip_notes(rows)
    assert note.startswith("2 elements of inner lie on the other side of a threshold than in torch")
    assert [n[:21] for n in start_of_difference(rows)] == ["it starts at where (i", "it"]


def test_model_must_be_a_module(project: Project) -> None:
    work = project.work(module("return x + 1"))
    (project.root / "task.py").write_text("def model(): return 3\n")
    with pytest.raises(TaskError, match="gave int"):
        Export().run(Work(**{**vars(work), "task": Task(project.root / "task.py")}))


@pytest.mark.parametrize("opset", [18, pytest.param(23, marks=SLOW)])
def test_opset(project: Project, opset: int) -> None:
    assert project.export(module("return F.gelu(x)"), opset=opset).passed
    assert project.model().opset_import[0].version == opset


def test_an_opset_nobody_knows(project: Project) -> None:
    with pytest.raises(ConfigError, match="knows opsets up to"):
        project.export(module("return x + 1"), opset=99)


def test_fields_in_short_and_in_full() -> None:
    short, full = (Export(dynamic={"x": {0: v}}) for v in ("n", {"name": "n"}))
    assert short == full
    spelt = json.loads(short.model_dump_json())["dynamic"]["x"]["0"]
    assert spelt == {"name": "n", "min": None, "max": None, "multiple": 1}
    assert Export(tolerance={"rtol": 0.1}).tolerance.atol == 1e-5


def _one(body: str, init: str = "pass", takes: str = "x", example: str = "torch.randn(2, 6),") -> str:
    return f"""
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {takes}):
        {body}

def model(): return Inner()
def example_inputs(): return ({example})
"""


@pytest.mark.parametrize(
    ("takes", "example", "names"),
    [
        ("x", "{'a': torch.randn(2, 3), 'b': torch.randn(2, 3)},", ["x_a", "x_b"]),
        ("y, x", "torch.randn(2, 3), {'a': torch.randn(2, 3), 'b': torch.randn(2, 3)}", ["y", "x_a", "x_b"]),
        ("*xs", "{'a': torch.randn(2, 3), 'b': torch.randn(2, 3)},", ["xs_0_a", "xs_0_b"]),
        ("x, y=None", "{'b': torch.randn(2, 3), 'a': (torch.randn(2, 3),)},", ["x_b", "x_a_0"]),
    ],
)
def test_a_dict_in_the_last_place(project: Project, takes: str, example: str, names: list[str]) -> None:
    body = f"x = {'xs[0]' if takes == '*xs' else 'x'}; a = x['a']; return (a if torch.is_tensor(a) else a[0]) - x['b']"
    report = project.export(_one(body, takes=takes, example=example), dynamic={n: {0: "b"} for n in names})
    assert report.passed and [*project.shapes()][:-1] == names


COMPLEX = {
    "fft": "return torch.fft.rfft(x).abs()",
    "stft": "return torch.stft(x, 4, 2, window=torch.ones(4), return_complex=True).abs()",
    "product": "c = torch.view_as_complex(x.reshape(-1, 3, 2).contiguous()); return torch.view_as_real(c * c)",
    "conj": "c = torch.fft.fft(x); return (c * c.conj()).real",
    "output": "return torch.fft.fft(x)",
}


@pytest.mark.parametrize("what", COMPLEX)
def test_complex_inner_values(project: Project, what: str) -> None:
    report = project.export(_one(COMPLEX[what]), dynamic={"x": {0: "b"}})
    assert report.passed and all(r.tolerance is not None for r in report.records)


def test_complex_weights_and_inputs(project: Project) -> None:
    turned = "self.register_buffer('f', torch.polar(torch.ones(6), torch.arange(6.0)))"
    report = project.export(
        _one("return (x * self.f).abs()", turned, example="torch.randn(2, 6, dtype=torch.complex64),"),
        dynamic={"x": {0: "b"}},
    )
    assert report.passed and project.shapes()["x"] == ["b", 6, 2] and any("is complex" in n for n in report.notes)


@pytest.mark.parametrize(
    "value", ["x.shape[0]", "x.shape[0] / 2", "3", "2.5", "True", "'a'", "None", "{'n': 1}", "x.shape"]
)
def test_what_is_no_tensor_among_the_outputs_is_left_out(project: Project, value: str) -> None:
    report = project.export(_one(f"return x * 2, {value}"), dynamic={"x": {0: "b"}})
    assert report.passed and [*project.shapes()] == ["x", "output_0"]
    assert value == "None" or any("output_1" in n and "does not give it" in n for n in report.notes)


def test_parameters_and_buffers_among_the_outputs(project: Project) -> None:
    init = "self.w = nn.Parameter(torch.ones(3)); self.register_buffer('k', torch.ones(2))"
    report = project.export(_one("return x * 2, self.w, self.w[:2], self.k, x", init), dynamic={"x": {0: "b"}})
    assert report.passed and project.shapes()["output_1"] == [3]


def test_state_in_an_attribute_fails_by_name(project: Project) -> None:
    source = _one("self.s = self.s or x.shape[1]; return x * self.s", "self.s = None")
    report = project.export(source, dynamic={"x": {1: "t"}})
    gate = next(g for g in report.gates if g.name == "module keeps no state")
    assert not gate.passed and "'s' (model, task.py:11)" in gate.seen
    report = project.export(_one("self.calls += 1; return x * 2", "self.calls = 0"), dynamic={"x": {0: "b"}})
    assert report.passed and any("'calls'" in n for n in report.notes)


@pytest.mark.parametrize(
    ("body", "told", "line"),
    [
        ("return (x.bfloat16() * 3).float()", "Mul", 11),
        ("return x * float(x.detach().numpy().max())", "numpy", 11),
        ("y = x.numpy()\n        return x * float(y.max())", "numpy", 11),
    ],
)
def test_the_runtime_and_numpy_are_blamed_on_module_and_line(project: Project, body: str, told: str, line: int) -> None:
    outer = (
        "class Outer(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.inner = Inner()\n"
    )
    outer += "    def forward(self, x):\n        return self.inner(x)\ndef model(): return Outer()\n"
    with pytest.raises(StageError, match=told) as error:
        project.export(_one(body) + outer)
    assert error.value.where.startswith("module inner") and f"task.py:{line}" in error.value.where and error.value.hint


UNSHUFFLE = module("return F.pixel_unshuffle(x, 4)", example="torch.randn(1, 3, 8, 32),")


def test_a_step_that_nobody_declared_is_found(project: Project) -> None:
    report = project.export(UNSHUFFLE, dynamic={"x": {0: "batch", 2: "h", 3: "w"}})
    dims = Signature.load(project.out).dims
    assert report.passed and (dims["h"].multiple, dims["w"].multiple, dims["batch"].multiple) == (4, 4, 1)
    assert {f["x"].shape[2] % 4 for f in probe_files.load(project.out)} == {0}
    assert [n for n in report.notes if "steps of 4" in n and "`multiple: 4`" in n] and dims["h"].min == 4
    assert not any("refuses" in n for n in report.notes)


def test_a_bound_off_the_step_is_an_error_that_names_the_step(project: Project) -> None:
    with pytest.raises(ConfigError, match="fails at 6") as error:
        project.export(UNSHUFFLE, dynamic={"x": {2: {"name": "h", "min": 6, "max": 32}}})
    assert "multiple: 4" in error.value.hint


def test_sizes_that_are_refused_make_one_note(project: Project) -> None:
    source = module("return self.c(x)", "self.c = nn.Conv1d(3, 3, 7)", "torch.randn(2, 3, 16),")
    report = project.export(source, dynamic={"x": {2: "t"}})
    assert len([n for n in report.notes if "refuses t=" in n]) == 1
    assert any(n.startswith("forward() itself refuses t=1, 2, 4: ") for n in report.notes)


def test_a_batch_that_is_fixed_is_said(project: Project) -> None:
    report = project.export(module("return x * 2"))
    assert report.metrics["batch"] == "fixed at 2"
    assert any("no axis is dynamic" in n and "dynamic: {x: {0: batch}}" in n for n in report.notes)
    assert "batch" not in project.export(module("return x * 2"), dynamic={"x": {0: "batch"}}).metrics


FFT = module("n = 2 * u.shape[-1]\nreturn torch.fft.irfft(torch.fft.rfft(u, n=n), n=n)[..., : u.shape[-1]]", takes="u",
             example="torch.randn(2, 3, 16),")  # fmt: skip


def test_a_fourier_transform_of_any_length_runs_in_a_default_session(project: Project) -> None:
    """onnx infers the spectrum's length to be the input's, and a default session shares memory by that."""
    report = project.export(FFT, dynamic={"u": {2: "t"}})
    assert report.passed and any("a default onnxruntime session gives the same on all" in n for n in report.notes)
    session = OnnxRuntime(defaults=True).open(project.out / onnx_files.FILE)
    for t in (4, 16, 23):
        u = np.random.default_rng(t).standard_normal((2, 3, t)).astype(np.float32)
        np.testing.assert_allclose(session.run({"u": u})["output"], u, atol=1e-5)


ENCODER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
    def forward(self, x, pad): return self.e(x, src_key_padding_mask=pad)
def model(): return Net()
def example_inputs(): return torch.randn(3, 6, 16), torch.arange(6)[None] >= torch.tensor([6, 4, 0])[:, None]
"""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_is_exported_without_the_fast_path_that_writes_0_at_padding(project: Project) -> None:
    """The golden answers were recorded with it, and are compared with it."""
    work = project.work(ENCODER)
    net, weights = work.task.call("model").eval(), work.inputs["weights"]
    names.load(net, safetensors_io.load(weights / "model.safetensors")[0])
    safetensors_io.save(
        weights / "golden.safetensors", golden_outputs.record(net, work.task.call("example_inputs"), {})
    )
    report = Export().run(work)
    assert report.passed and "golden output" in [g.name for g in report.gates]
    assert any("fast path, which writes 0" in n for n in report.notes)
    feed = probe_files.load(project.out)[0]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = net(*map(torch.from_numpy, feed.values())).detach()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    np.testing.assert_allclose(project.run(**feed)["output"], expected, atol=1e-5)


@pytest.mark.parametrize("name", ['a"b', "class", "a\nb"])
def test_a_module_of_any_name_is_exported(project: Project, name: str) -> None:
    body = f"return getattr(self, {name!r})(x)"
    assert project.export(module(body, f"self.add_module({name!r}, nn.Linear(3, 3))")).passed
    assert module_identity.modules(project.model()) == {"output": f"inner.{name}"}


def test_a_normalisation_by_the_batch_is_named(project: Project) -> None:
    norms = "nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3), nn.InstanceNorm1d(3)"
    report = project.export(module("return self.n(x)", f"self.n = nn.Sequential({norms})", "torch.randn(4, 3, 5),"))
    told = [n for n in report.notes if "keeps no running statistics" in n]
    assert len(told) == 1 and told[0].startswith("module inner.n.0 (BatchNorm1d)")


def test_an_rnn_that_the_exporter_unrolls_is_named(project: Project) -> None:
    with pytest.raises(StageError, match="has it fixed at") as error:
        project.export(module("return self.r(x)[0]", "self.r = nn.RNN(3, 3)"), dynamic={"x": {0: "t"}})
    assert "unrolls nn.RNN (module inner.r)" in error.value.hint and "nn.GRU" in error.value.hint


FAKE = """
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, disable_observer
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = FakeQuantize(MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)
        self.register_buffer("s", torch.full((4,), 0.01))
        self.register_buffer("z", torch.zeros(4, dtype=torch.int32))
        self.l = nn.Linear(3, 4)
    def forward(self, x):
        weight = torch.fake_quantize_per_channel_affine(self.l.weight, self.s, self.z, 0, -128, 127)
        return F.linear(self.q(x), weight, self.l.bias)
def model():
    net = Net()
    net(torch.linspace(-1, 1, 6).reshape(2, 3))
    return net.apply(disable_observer)
def example_inputs(): return torch.linspace(-1, 1, 6).reshape(2, 3)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fake_quantisation_is_exported_with_a_dynamic_batch(project: Project) -> None:
    report = project.export(FAKE, dynamic={"x": {0: "batch"}})
    assert report.passed
    ops = [n.op_type for n in project.model().graph.node]
    assert ops.count("QuantizeLinear") == 1 and ops.count("DequantizeLinear") == 2  # the weight is stored in int8
    net, x = Task(project.root / "task.py").call("model").eval(), torch.linspace(-1, 1, 15).reshape(5, 3)
    names.load(net, safetensors_io.load(project.root / "weights" / "model.safetensors")[0])
    np.testing.assert_allclose(project.run(x=x)["output"], net(x).detach(), atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_observer_that_is_on_is_named(project: Project) -> None:
    with pytest.raises(StageError, match="observer of this FakeQuantize is on") as error:
        project.export(FAKE.replace(".apply(disable_observer)", ""))
    assert error.value.where == "module q" and "disable_observer" in error.value.hint


LEARNED = module(
    "q = x.view(2, 6, 4, 4).transpose(1, 2)\nbias = self.e(torch.arange(6)[None] + torch.zeros(6, 1).long())\n"
    "return F.scaled_dot_product_attention(q, q, q, attn_mask=bias.permute(2, 0, 1)[None], scale=1.0)",
    "self.e = nn.Embedding(9, 4)", "torch.randn(2, 6, 16),",
)  # fmt: skip


def test_a_learned_bias_of_attention_passes(project: Project) -> None:
    """torch's exporter fails on the strides of a mask that requires a gradient."""
    assert project.export(LEARNED).passed


def test_what_the_exporter_fails_to_convert_is_told_in_its_own_words(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relu has a counterpart in ONNX: that it had none would be false."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("the rank is wrong")

    table = torch.onnx._internal.exporter._registration.ONNXRegistry
    kept = table.get_decomps

    def get(self: Any, target: Any) -> Any:
        found = kept(self, target)
        for one in found if target is torch.ops.aten.relu.default else ():
            monkeypatch.setattr(one, "onnx_function", broken)
            monkeypatch.setattr(one, "signature", None)
        return found

    monkeypatch.setattr(table, "get_decomps", get)
    with pytest.raises(StageError, match=r"could not convert aten\.relu") as error:
        project.export(module("return torch.relu(x)"))
    assert "no counterpart" not in error.value.what and error.value.where == LINE_10


def test_debug_tells_the_gates_where_no_value_is_at_fault(project: Project) -> None:
    work = project.work(module("return x * 2 if x.shape[0] > 5 else x"))
    stage = Export(dynamic={"x": {0: Axis(name="n", max=8)}})
    with pytest.raises(StageError, match=r"every inner value passes.*module itself, n=8") as error:
        stage.debug(work, project.root / "debug")
    assert "forward() branches on sizes" in error.value.hint and not (project.root / "debug").exists()


def test_a_random_operator_is_named_with_its_line(project: Project) -> None:
    work = project.work(module("y = x * 2\nreturn y + torch.rand_like(y)"))
    x = torch.ones(2, 3)
    stored = {"inputs/x": x, "outputs/output": 2 * x}
    safetensors_io.save(project.root / "weights" / "golden.safetensors", stored)
    (gate,) = (g for g in Export().run(work).gates if not g.passed)
    assert "non-deterministic op" in gate.hint and "rand_like" in gate.hint and "task.py:11" in gate.hint


RANGES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)
        self.register_buffer("s", torch.tensor([0.03, 0.05, 0.1]))
        self.register_buffer("z", torch.zeros(3, dtype=torch.int32))
    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, LOW, HIGH)
        weight = torch.fake_quantize_per_channel_affine(self.l.weight, self.s, self.z, 0, LOW, HIGH)
        return F.linear(x, weight, self.l.bias)
def model(): return Net()
def example_inputs(): return torch.arange(-200., 200.).reshape(100, 4) / 20
"""


@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-127, 127), (-8, 7), (0, 255)])
def test_fake_quantised_values_keep_their_range_and_stay_within_a_step(project: Project, low: int, high: int) -> None:
    # Half of the inputs lie half-way between two steps of 0.1.
    report = project.export(RANGES.replace("LOW", str(low)).replace("HIGH", str(high)), dynamic={"x": {0: "n"}})
    assert report.passed
    (row,) = [r for r in report.records if r.name == "fake_quantize_per_tensor_affine"]
    if low < -8:
        assert 0 < row.extra["flips"] <= 400
    stored = {i.name: numpy_helper.to_array(i) for i in project.model().graph.initializer}
    weight = stored["fake_quantize_per_channel_affine/quantized"]
    assert weight.dtype == (np.uint8 if low == 0 else np.int8) and weight.min() >= low and weight.max() <= high
    np.testing.assert_array_equal(stored["fake_quantize_per_channel_affine/scale"], np.float32([0.03, 0.05, 0.1]))
    torch.manual_seed(0)
    net = Task(project.root / "task.py").call("model")
    names.load(net, safetensors_io.load(project.root / "weights" / "model.safetensors")[0])
    x = torch.rand(64, 4) * 8 - 4
    step = 0.1 * float(net.l.weight.detach().abs().sum(1).max())
    np.testing.assert_allclose(project.run(x=x)["output"], net(x).detach(), atol=step)


TORCHAO = """
from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig
def model():
    weights = IntxFakeQuantizeConfig(torch.int8, GROUPS, is_symmetric=True)
    return nn.Sequential(FakeQuantizedLinear(16, 32, True, None, weights), nn.ReLU(),
                         FakeQuantizedLinear(32, 8, False, None, weights))
def example_inputs(): return torch.randn(4, 16)
"""


@pytest.mark.parametrize(("groups", "scales"), [("'per_channel'", [32, 8]), ("group_size=8", [64, 32])])
def test_fake_quantisation_of_torchao_keeps_its_scales(project: Project, groups: str, scales: list[int]) -> None:
    pytest.importorskip("torchao")
    report = project.export(TORCHAO.replace("GROUPS", groups), dynamic={"input": {0: "n"}})
    assert report.passed
    stored = {i.name: numpy_helper.to_array(i) for i in project.model().graph.initializer}
    assert [a.size for n, a in stored.items() if n.endswith("/scale")] == scales
    weight = safetensors_io.load(project.root / "weights" / "model.safetensors")[0]["0.weight"]
    # torchao's symmetric scale: the greatest |w| of a channel (or group) over 127.5.
    wanted = weight.reshape(scales[0], -1).abs().amax(1) / 127.5
    np.testing.assert_allclose(stored["fake_quantize_per_channel_affine/scale"], wanted, rtol=1e-6)
    assert "QuantizeLinear" not in [n.op_type for n in project.model().graph.node]


PRUNED = """
from layerline.training.loop.masks import channels
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.m, self.head = nn.BatchNorm2d(8), nn.Linear(8, 2)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.n(self.a(x))), 2)
        return self.head(F.adaptive_avg_pool2d(F.relu(self.m(self.b(x))), 1).flatten(1))
def model():
    torch.manual_seed(0)
    net = Net()
    masks = channels(net, 0.5, skip=["head.*"], norms=True)
    with torch.no_grad():
        for name, mask in masks.items():
            net.get_parameter(name).mul_(mask)
    return net
def example_inputs(): return torch.randn(2, 3, 8, 8)
"""


def test_pruned_channels_are_gone_behind_fuse(project: Project) -> None:
    work = project.work(PRUNED)
    assert Export(dynamic={"x": {0: Axis(name="n")}}).run(work).passed
    fused = project.root / "fused"
    fused.mkdir()
    given = Work(inputs={"model": project.out}, task=work.task, out=fused, scratch=work.scratch, log=Quiet())
    report = Fuse().run(given)
    assert report.passed and report.metrics["undone"] == 0
    sizes = sorted(tuple(t.dims) for t in onnx_files.load(fused / onnx_files.FILE).graph.initializer if len(t.dims) > 1)
    assert sizes == [(2, 4), (4, 3, 3, 3), (4, 4, 3, 3)]
    before, after = (int(str(report.metrics[f"initializer_bytes_{side}"])) for side in ("before", "after"))
    assert after < 0.45 * before
