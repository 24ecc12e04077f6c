"""import-weights: a checkpoint is found in whatever it lies, or the error says what was found and what was expected."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layerline.pipeline.errors import StageError, TaskError
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.import_weights import ImportWeights

TASK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
    def forward(self, ids):
        return self.head(self.backbone(self.emb(ids).mean(1)))

def model():
    torch.manual_seed(0)
    return Net()

def example_inputs():
    return (torch.tensor([[1, 2], [3, 4]]),)
"""

State = dict[str, Tensor]


class Quiet:
    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: Any) -> None: ...
    def row(self, figures: Any) -> None: ...


def _net(root: Path) -> Any:
    (root / "task.py").write_text(TASK)
    net = Task(root / "task.py").call("model")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        net.backbone[1].running_mean.fill_(0.5)
    return net


def _import(root: Path, file: str = "w.pt", **config: Any) -> tuple[Report, State]:
    for name in ("out", "scratch"):
        (root / name).mkdir(exist_ok=True)
    work = Work(inputs={}, task=Task(root / "task.py"), out=root / "out", scratch=root / "scratch", log=Quiet())
    report = ImportWeights(file=file, **config).run(work)
    return report, load_file(root / "out" / "model.safetensors")


def _renamed(state: State, change: Callable[[str], str]) -> State:
    return {change(n): t for n, t in state.items()}


def _average(state: State) -> State:
    return {n: t * 2 if t.is_floating_point() else t for n, t in state.items()}


@pytest.mark.parametrize("file", ["w.pt", "w.pth", "w.bin", "w.ckpt", "w.safetensors"])
def test_any_kind_of_file(file: str, tmp_path: Path) -> None:
    net = _net(tmp_path)
    state = {n: t.clone() for n, t in net.state_dict().items()}
    save_file(state, tmp_path / file) if file.endswith("safetensors") else torch.save(state, tmp_path / file)
    report, shipped = _import(tmp_path, file)
    assert report.passed and all(torch.equal(t, state[n]) for n, t in shipped.items())
    golden = load_file(tmp_path / "out" / "golden.safetensors")
    assert torch.equal(net.eval()(golden["inputs/ids"]), golden["outputs/output"])
    assert ImportWeights(file=file).files() == (file,)


PREFIXES: dict[str, Callable[[str], str]] = {
    "DDP": lambda n: f"module.{n}",
    "compile(whole)": lambda n: f"_orig_mod.{n}",
    "DDP(compile(whole))": lambda n: f"module._orig_mod.{n}",
    "compile(DDP)": lambda n: f"_orig_mod.module.{n}",
    "compile(backbone)": lambda n: n.replace("backbone.", "backbone._orig_mod."),
    "DDP(backbone)": lambda n: n.replace("backbone.", "backbone.module."),
    "DDP(compile(backbone))": lambda n: n.replace("backbone.", "backbone.module._orig_mod."),
    "checkpointed": lambda n: n.replace("backbone.0.", "backbone.0._checkpoint_wrapped_module."),
    "lightning": lambda n: f"model.{n}",
    "lightning with compile": lambda n: f"net._orig_mod.{n}",
    "a path": lambda n: f"system.learner.{n}",
    "DDP(lightning)": lambda n: f"module.model.{n}",
}


@pytest.mark.parametrize("wrapped", PREFIXES)
def test_prefixes_come_off(wrapped: str, tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    given = _renamed(state, PREFIXES[wrapped])
    if "lightning" in wrapped or wrapped == "a path":
        given |= {"criterion.weight": torch.ones(3)}
    torch.save({"state_dict": given}, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert set(shipped) == set(state) - {"head.weight"}
    assert all(torch.equal(t, state[n]) for n, t in shipped.items())


@pytest.mark.parametrize(
    "path",
    ["state_dict", "model", "params", "net.weights", "checkpoint.model.state_dict", "ema", "model_ema"],
)
def test_nesting_is_seen_through(path: str, tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    nested: Any = state
    for key in reversed(path.split(".")):
        nested = {key: nested}
    noise = {"epoch": 3, "lr": [0.1], "optimizer": torch.optim.AdamW([torch.ones(2, requires_grad=True)]).state_dict()}
    torch.save({**nested, **noise}, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert all(torch.equal(t, state[n]) for n, t in shipped.items())
    assert f"the weights are those of {path}" in report.notes


def test_parts_of_a_model_under_keys_of_their_own(tmp_path: Path) -> None:
    net = _net(tmp_path)
    parts = {n: getattr(net, n).state_dict() for n in ("emb", "backbone", "head")}
    torch.save(parts, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert torch.equal(shipped["backbone.0.weight"], net.backbone[0].weight)


@pytest.mark.parametrize(
    ("key", "averages"),
    [("ema", "state_dict"), ("model_ema", "model"), ("state_dict_ema", "state_dict"), ("params_ema", "params"),
     ("ModelEMA", "net"), ("swa_model", "model"), ("averaged", "online")],
)  # fmt: skip
def test_averages_ship_where_there_are_any(key: str, averages: str, tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    torch.save({averages: state, key: _renamed(_average(state), PREFIXES["DDP"])}, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], state["emb.weight"] * 2)
    assert (report.reference, report.candidate) == ("online weights", "EMA weights")
    assert {"emb.weight", "emb", "head"} <= {r.name for r in report.records}, "weights, and activations on the example"
    report, shipped = _import(tmp_path, weights="online")
    assert torch.equal(shipped["emb.weight"], state["emb.weight"])
    assert f"{key} fits as well, and does not ship" in report.notes


def test_averages_in_one_dict_with_the_online_weights(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    flat = _renamed(state, lambda n: f"model.{n}") | _renamed(_average(state), lambda n: f"model_ema.{n}")
    torch.save({"state_dict": flat}, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], state["emb.weight"] * 2)


def test_averages_alone(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    torch.save({"ema_state_dict": _average(state)}, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], state["emb.weight"] * 2) and report.reference == "weights in the file"
    with pytest.raises(StageError, match="holds only averages, in ema_state_dict"):
        _import(tmp_path, weights="online")


def test_averages_of_parameters_take_the_online_buffers(tmp_path: Path) -> None:
    net = _net(tmp_path)
    named = {n: p.detach() * 2 for n, p in net.named_parameters()}
    torch.save({"model": net.state_dict(), "ema": named}, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], net.emb.weight * 2)
    assert torch.equal(shipped["backbone.1.running_mean"], torch.full((4,), 0.5))
    assert any("the averages hold no buffers" in n for n in report.notes)


def test_averages_by_position(tmp_path: Path) -> None:
    net = _net(tmp_path)
    shadow = {"decay": 0.999, "num_updates": 3, "shadow_params": [p.detach() * 2 for p in net.parameters()]}
    torch.save({"model": net.state_dict(), "ema": shadow}, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert torch.equal(shipped["backbone.0.weight"], net.backbone[0].weight * 2)


def test_torchs_averaged_model(tmp_path: Path) -> None:
    net = _net(tmp_path)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    averaged.update_parameters(net)
    torch.save(averaged.state_dict(), tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], net.emb.weight) and any("n_averaged" in n for n in report.notes)


# Tied weights (T37)


@pytest.mark.parametrize("kept", ["both", "emb.weight", "head.weight"])
def test_tied_weights_are_one(kept: str, tmp_path: Path) -> None:
    state = {n: t.clone() for n, t in _net(tmp_path).state_dict().items()}
    gone = {"emb.weight", "head.weight"} - {kept} if kept != "both" else set()
    torch.save({n: t for n, t in state.items() if n not in gone}, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], state["emb.weight"]) and "head.weight" not in shipped
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["layerline"])["aliases"] == {"head.weight": "emb.weight"}


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    state["head.weight"] = state["head.weight"] + 1
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(StageError, match=r"emb\.weight.*tied in the model and differ in the file"):
        _import(tmp_path)


# What does not fit


def test_the_error_lists_what_was_found_and_expected(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    state["backbone.0.weight"] = torch.ones(5, 4)
    del state["backbone.1.bias"]
    torch.save({"model": state | {"extra.weight": torch.ones(2)}, "epoch": 1}, tmp_path / "w.pt")
    with pytest.raises(StageError) as error:
        _import(tmp_path)
    said = error.value.what
    assert "the file holds" in said and "model (" in said and "emb.weight (7, 4)" in said
    assert "expected 8 tensors" in said
    assert "missing backbone.1.bias (4,)" in said and "unknown extra.weight (2,)" in said
    assert "backbone.0.weight is (5, 4), the model has (4, 4)" in said


def test_names_that_the_model_need_not_have(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict() | {"aux.weight": torch.ones(2), "aux.bias": torch.ones(2)}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(StageError, match=r"unknown aux\.weight"):
        _import(tmp_path)
    report, shipped = _import(tmp_path, ignore=("aux.*",))
    assert "aux.weight" not in shipped and any("left out" in n and "aux.weight" in n for n in report.notes)


def test_two_that_fit_and_differ_must_be_chosen_between(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    torch.save({"student": state, "teacher": _average(state)}, tmp_path / "w.pt")
    with pytest.raises(StageError, match="student and teacher") as error:
        _import(tmp_path)
    assert "key: student" in error.value.hint
    _, shipped = _import(tmp_path, key="teacher")
    assert torch.equal(shipped["emb.weight"], state["emb.weight"] * 2)
    with pytest.raises(StageError, match=r"nothing under 'nobody'.*the file holds.*student"):
        _import(tmp_path, key="nobody")
    torch.save(
        _renamed(state, PREFIXES["a path"]) | _renamed(_average(state), lambda n: f"other.{n}"), tmp_path / "w.pt"
    )
    _, shipped = _import(tmp_path, key="system.learner")
    assert torch.equal(shipped["emb.weight"], state["emb.weight"])
    torch.save({"student": state, "copy": state}, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], state["emb.weight"])


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [1, 2], 7, {"state": {0: {"step": torch.ones(1)}}}])
def test_nothing_to_find(content: Any, tmp_path: Path) -> None:
    _net(tmp_path)
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(StageError, match=r"the file holds (no tensors|state|the whole file)|expected 8 tensors"):
        _import(tmp_path)


def test_counters_of_batches_may_be_missing(tmp_path: Path) -> None:
    state = {n: t for n, t in _net(tmp_path).state_dict().items() if "num_batches" not in n}
    torch.save(state, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert shipped["backbone.1.num_batches_tracked"] == 0 and any("counters" in n for n in report.notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in _net(tmp_path).state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert shipped["emb.weight"].dtype == torch.float32 and torch.equal(
        shipped["emb.weight"], state["emb.weight"].float()
    )
    assert all(r.rel_l2 is not None and r.rel_l2 < 1e-7 for r in report.records)


def test_a_model_that_lies_in_one_module(tmp_path: Path) -> None:
    """model() may wrap the network that was trained."""
    state = _net(tmp_path).state_dict()
    wrapped = TASK + "\nclass Outer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    wrapped += "        self.net = Net()\n    def forward(self, ids):\n        return self.net(ids)\n"
    (tmp_path / "task.py").write_text(wrapped + "\ndef model():\n    return Outer()\n")
    torch.save(state, tmp_path / "w.pt")
    report, shipped = _import(tmp_path)
    assert torch.equal(shipped["net.emb.weight"], state["emb.weight"]) and any(
        "without net." in n for n in report.notes
    )


# Nothing pickled runs


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_nothing_pickled_runs_without_trust(tmp_path: Path) -> None:
    state, ran = _net(tmp_path).state_dict(), tmp_path / "ran"
    torch.save({"state_dict": state, "bomb": Bomb(ran)}, tmp_path / "w.pt")
    with pytest.raises(StageError, match="holds more than weights") as error:
        _import(tmp_path)
    assert not ran.exists() and "trust: true" in error.value.hint and "--trust" in error.value.hint
    report, _ = _import(tmp_path, trust=True)
    assert ran.exists() and any("trusted" in n for n in report.notes)


class Folder:
    """A pickle that makes a folder, by a function of a module that torch blocks."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("kind", [Bomb, Folder])
def test_an_old_pickle_is_refused_by_what_it_holds_without_torchs_advice_to_run_it(kind: Any, tmp_path: Path) -> None:
    content = {"state_dict": _net(tmp_path).state_dict(), "bomb": kind(tmp_path / "ran")}
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(StageError, match=r"GLOBAL (getattr|posix\.mkdir)") as error:
        _import(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "likely succeed" not in error.value.what and "safe_globals" not in error.value.what


def test_what_needs_trust_is_named(tmp_path: Path) -> None:
    net = _net(tmp_path)
    torch.save({"model": net.state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "w.pt")
    with pytest.raises(StageError, match=r"argparse\.Namespace"):
        _import(tmp_path)
    _, shipped = _import(tmp_path, trust=True)
    assert torch.equal(shipped["emb.weight"], net.emb.weight)


def test_whole_modules_and_programs_with_trust(tmp_path: Path) -> None:
    _net(tmp_path)
    (tmp_path / "task.py").write_text(
        "import torch\nfrom torch import nn\ndef model(): return nn.Linear(3, 2)\n"
        "def example_inputs(): return (torch.ones(2, 3),)\n"
    )
    linear = nn.Linear(3, 2)
    torch.save(linear, tmp_path / "w.pt")
    torch.jit.script(linear).save(str(tmp_path / "w.jit"))
    for file, said in (("w.pt", r"torch\.nn\.modules\.linear\.Linear"), ("w.jit", "TorchScript")):
        with pytest.raises(StageError, match=said):
            _import(tmp_path, file)
        _, shipped = _import(tmp_path, file, trust=True)
        assert torch.equal(shipped["weight"], linear.weight)


def test_rubbish_is_no_checkpoint(tmp_path: Path) -> None:
    _net(tmp_path)
    for file in ("w.pt", "w.safetensors"):
        (tmp_path / file).write_bytes(b"rubbish" * 9)
        with pytest.raises(StageError) as error:
            _import(tmp_path, file)
        assert error.value.where == file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"hello", "it is text.*'hello'"),
        (b"<!DOCTYPE html><html>not found", "it is text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
        (b'{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}', "m-1.safetensors, m-2.safetensors"),
        (b'{"weight_map": {"a": "m-1.bin"}}', "in 1 files: m-1.bin"),
        (b"{}", "it is text"),
        (b"\x80\x02half", r"damaged, or not a checkpoint: [A-Za-z]+: \S"),
    ],
)
@pytest.mark.parametrize("file", ["w.pt", "w.safetensors.index.json"])
def test_what_is_no_checkpoint_says_what_it_is(content: bytes, said: str, file: str, tmp_path: Path) -> None:
    _net(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(StageError, match=said) as error:
        _import(tmp_path, file)
    assert error.value.where == file and "weights_only" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t * float("nan"), r"backbone.0.weight\[0, 0\] is nan, expected a finite number"),
        (lambda t: t.double() * 1e300, r"backbone.0.weight\[0, 0\] is .*expected a number that float32 can hold"),
        (lambda t: t.to(torch.int8), "backbone.0.weight is int8, the model has float32"),
        (lambda t: t.to(torch.complex64), "backbone.0.weight is complex64, the model has float32"),
    ],
)
def test_weights_that_are_no_numbers_of_the_models(change: Any, said: str, tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    torch.save({n: change(t + 1) if n == "backbone.0.weight" else t for n, t in state.items()}, tmp_path / "w.pt")
    with pytest.raises(StageError, match=said):
        _import(tmp_path)


def test_float8_weights_become_float32(tmp_path: Path) -> None:
    state = _net(tmp_path).state_dict()
    small = {n: t.to(torch.float8_e4m3fn) if t.is_floating_point() else t for n, t in state.items()}
    torch.save(small, tmp_path / "w.pt")
    _, shipped = _import(tmp_path)
    assert torch.equal(shipped["emb.weight"], small["emb.weight"].float())


def test_our_own_checkpoints_and_weights(tmp_path: Path) -> None:
    from layerline.stages.train import Train

    _net(tmp_path)
    task = (
        TASK
        + "\ndef train_data():\n    ids = torch.arange(40).reshape(20, 2) % 7\n    return ids, torch.arange(20) % 7\n"
    )
    (tmp_path / "task.py").write_text(task)
    (tmp_path / "train").mkdir()
    work = Work(inputs={}, task=Task(tmp_path / "task.py"), out=tmp_path / "train", scratch=tmp_path, log=Quiet())
    Train(epochs=1, batch_size=5).run(work)
    _, shipped = _import(tmp_path, "train/checkpoint.safetensors")
    held = load_file(tmp_path / "train" / "checkpoint.safetensors")
    assert torch.equal(shipped["emb.weight"], held["ema/emb.weight"])
    again, _ = _import(tmp_path, "out/model.safetensors")
    assert again.passed


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    torch.save(_net(tmp_path).state_dict(), tmp_path / "w.pt")
    seen = []
    for _ in range(2):
        _import(tmp_path)
        seen.append([(tmp_path / "out" / f).read_bytes() for f in ("model.safetensors", "golden.safetensors")])
    assert seen[0] == seen[1]


# Dicts in, dataclasses out

NESTED = """
import dataclasses, numpy as np, torch
from torch import nn
@dataclasses.dataclass
class Out:
    boxes: torch.Tensor
    heads: list
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)
    def forward(self, batch):
        h = self.a(batch["user"]["x"])
        return Out(boxes=h, heads=[h + 1, {"mask": h > 0}])
def model(): return Net()
def example_inputs(): return {EXAMPLE}
"""


def test_nested_arrays_in_and_a_dataclass_out_go_by_the_names_of_export(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(NESTED.replace("EXAMPLE", '"batch": {"user": {"x": np.ones((2, 3), "f")}}'))
    torch.save({"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(2)}, tmp_path / "w.pt")
    _import(tmp_path)
    stored = load_file(tmp_path / "out" / "golden.safetensors")
    outputs = {"outputs/boxes", "outputs/heads_0", "outputs/heads_1_mask"}
    assert stored.keys() == {"inputs/batch_user_x", *outputs}
    assert stored["outputs/heads_0"].tolist() == [[4.0, 4.0]] * 2


def test_arguments_by_other_names_are_told_with_both_lists(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(2)}, tmp_path / "w.pt")
    (tmp_path / "task.py").write_text(NESTED.replace("EXAMPLE", '"user": np.ones(2), "batch_item": np.ones(2)'))
    with pytest.raises(TaskError, match=r"it gives user, batch_item, forward.. takes batch") as error:
        _import(tmp_path)
    assert "{'batch': {'user': …, 'item': …}}" in error.value.hint and "batch_user, batch_item" in error.value.hint
    text = NESTED.replace("self, batch)", "self, batch=None, **more)").replace("EXAMPLE", '"ids": np.ones(2)')
    (tmp_path / "task.py").write_text(text)
    with pytest.raises(TaskError, match=r"it gives ids, which forward.. does not name: it takes batch"):
        _import(tmp_path)


@pytest.mark.parametrize(
    ("extra", "patterns"),
    [(("aux_head.0.weight", "aux_head.0.bias"), "aux_head.*"), (("backbone.9.weight", "scale"), "backbone.9.*, scale")],
)
def test_names_left_over_are_told_with_their_patterns(extra: tuple[str, ...], patterns: str, tmp_path: Path) -> None:
    torch.save(_net(tmp_path).state_dict() | dict.fromkeys(extra, torch.ones(2)), tmp_path / "w.pt")
    with pytest.raises(StageError, match="nothing in the file fits") as error:
        _import(tmp_path)
    assert f"ignore: [{patterns}]" in error.value.hint
    assert "\n      unknown " in error.value.what, "one a line"
    _import(tmp_path, ignore=tuple(patterns.split(", ")))
