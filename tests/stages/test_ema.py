"""ema: the weights that ship, under canonical names, with golden inputs and outputs that reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from layerline.export.example_call import call
from layerline.parity import module_gates
from layerline.pipeline.errors import StageError, TaskError
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.ema import Ema
from layerline.stages.export import Export
from layerline.stages.train import Train
from layerline.training.state import safetensors_io

TASK = """
import numpy as np, torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
    def forward(self, ids):
        x = self.norm(self.emb(ids).mean(1))
        return self.head(self.norm(x))

def model():
    return Tied()

def train_data():
    return np.arange(60).reshape(20, 3) % 7, np.arange(20) % 7
"""


class Quiet:
    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: Any) -> None: ...
    def row(self, figures: Any) -> None: ...


def _work(root: Path, name: str, task: str = TASK, **inputs: Path) -> Work:
    (root / "task.py").write_text(task)
    for folder in (name, f"{name}_scratch"):
        (root / folder).mkdir(exist_ok=True)
    return Work(
        inputs=inputs, task=Task(root / "task.py"), out=root / name, scratch=root / f"{name}_scratch", log=Quiet()
    )


def _trained(root: Path, task: str = TASK, **config: Any) -> Path:
    work = _work(root, "train", task)
    Train(**{"epochs": 3, "batch_size": 5, **config}).run(work)
    return work.out


def _shipped(root: Path, task: str = TASK, **config: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = Task(root / "task.py").call("model")
    from layerline.training.state.checkpoint import load_weights

    load_weights(model, root / "ema" / "model.safetensors")
    return model.eval(), load_file(root / "ema" / "golden.safetensors")


def test_it_leaves_the_average_and_golden_answers(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path)
    report = Ema().run(_work(tmp_path, "ema", checkpoint=checkpoint))
    model, golden = _shipped(tmp_path)
    assert sorted(golden) == ["inputs/ids", "outputs/output"] and golden["inputs/ids"].shape == (2, 3)
    assert torch.equal(model(golden["inputs/ids"]), golden["outputs/output"])
    tensors, state = load_file(tmp_path / "ema" / "model.safetensors"), load_file(checkpoint / "checkpoint.safetensors")
    assert sorted(tensors) == ["emb.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean",
                               "norm.running_var", "norm.weight"]  # fmt: skip
    assert torch.equal(tensors["emb.weight"], state["ema/emb.weight"])
    assert torch.equal(tensors["norm.running_mean"], state["ema/norm.running_mean"])
    assert tensors["norm.num_batches_tracked"] == state["online/norm.num_batches_tracked"] == 24
    with safe_open(tmp_path / "ema" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["layerline"])["aliases"] == {"head.weight": "emb.weight"}
    assert report.passed and report.notes == ()


def test_the_report_compares_weights_and_activations(tmp_path: Path) -> None:
    report = Ema().run(_work(tmp_path, "ema", checkpoint=_trained(tmp_path)))
    names = [r.name for r in report.records]
    assert names == ["emb.weight", "norm.weight", "norm.bias", "emb", "norm", "norm:1", "head"]
    by_name = {r.name: r for r in report.records}
    assert by_name["emb.weight"].op == "parameter" and by_name["norm:1"].op == "BatchNorm1d"
    assert by_name["norm:1"].module == "norm" and by_name["head"].shape == (2, 7)
    assert all(r.rel_l2 is not None and 0 < r.rel_l2 < 1 and r.sqnr_db is not None for r in report.records)


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path)
    seen = []
    for name in ("a", "b"):
        torch.manual_seed(len(seen))
        Ema().run(_work(tmp_path, name, checkpoint=checkpoint))
        seen.append([(tmp_path / name / f).read_bytes() for f in ("model.safetensors", "golden.safetensors")])
    assert seen[0] == seen[1]


def test_without_an_average_the_online_weights_ship(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path, training={"ema_decay": 0})
    report = Ema().run(_work(tmp_path, "ema", checkpoint=checkpoint))
    assert len(report.notes) == 1
    assert "online weights ship" in report.notes[0]
    state = load_file(checkpoint / "checkpoint.safetensors")
    assert torch.equal(load_file(tmp_path / "ema" / "model.safetensors")["emb.weight"], state["online/emb.weight"])
    assert all(r.rel_l2 == 0 for r in report.records)


def test_an_average_that_never_began_does_not_ship_the_initial_weights(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path, training={"ema_decay": 0.9, "ema_start_step": 1000})
    report = Ema().run(_work(tmp_path, "ema", checkpoint=checkpoint))
    state = load_file(checkpoint / "checkpoint.safetensors")
    shipped = load_file(tmp_path / "ema" / "model.safetensors")
    assert torch.equal(shipped["emb.weight"], state["online/emb.weight"])
    assert not torch.equal(shipped["emb.weight"], state["ema/emb.weight"])
    assert "ema_start_step" in report.notes[0]


def test_the_online_weights_where_asked(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path)
    report = Ema(weights="online").run(_work(tmp_path, "ema", checkpoint=checkpoint))
    state = load_file(checkpoint / "checkpoint.safetensors")
    assert torch.equal(load_file(tmp_path / "ema" / "model.safetensors")["emb.weight"], state["online/emb.weight"])
    assert report.notes == ("the online weights ship, as the configuration asks",)
    assert any(r.rel_l2 for r in report.records), "how far the average is stays visible"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_models_ship_the_average_of_their_masters(dtype: str, tmp_path: Path) -> None:
    task = (
        TASK
        + f"\ndef model(): return Tied().to(torch.{dtype})\ndef example_inputs(): return (torch.tensor([[1, 2, 3]]),)"
    )
    task += "\ndef loss(model, batch): return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])"
    checkpoint = _trained(tmp_path, task)
    Ema().run(_work(tmp_path, "ema", task, checkpoint=checkpoint))
    weight = load_file(tmp_path / "ema" / "model.safetensors")["emb.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, load_file(checkpoint / "checkpoint.safetensors")["ema/emb.weight"])
    assert not torch.equal(weight, weight.to(getattr(torch, dtype)).float()), "nothing was rounded on the way"


def test_arguments_and_outputs_go_by_their_names(tmp_path: Path) -> None:
    task = """
import torch
from torch import nn
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(2, 2)
    def forward(self, x, *rest, scale=None, flag=True, **more):
        y = self.f(x + sum(rest)) * (scale if scale is not None else 1)
        return {"logits": y, "hidden": y + 1} if more else (y, y + 1)
def model(): return Two()
"""
    for inputs, names in {
        "(torch.ones(3, 2), torch.ones(3, 2))":
            ["inputs/rest_0", "inputs/x", "outputs/output_0", "outputs/output_1"],
        "{'x': torch.ones(3, 2), 'scale': torch.ones(1), 'extra': torch.ones(1)}":
            ["inputs/extra", "inputs/scale", "inputs/x", "outputs/hidden", "outputs/logits"],
    }.items():  # fmt: skip
        text = f"{task}\ndef example_inputs(): return {inputs}"
        root = tmp_path / str(len(names))
        root.mkdir()
        work = _work(root, "ema", text, checkpoint=root)
        safetensors_io.save(root / "checkpoint.safetensors", work.task.call("model").state_dict())
        Ema().run(work)
        assert sorted(load_file(root / "ema" / "golden.safetensors")) == names


def test_mistakes_are_told(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path)
    changed = TASK.replace("nn.Embedding(7, 4)", "nn.Embedding(9, 4)")
    with pytest.raises(StageError, match=r"emb\.weight is \(7, 4\), the model has \(9, 4\)"):
        Ema().run(_work(tmp_path, "ema", changed, checkpoint=checkpoint))
    with pytest.raises(TaskError, match="does not fit forward"):
        Ema().run(_work(tmp_path, "ema", TASK + "\ndef example_inputs(): return {'idx': torch.ones(1)}",
                        checkpoint=checkpoint))  # fmt: skip


def test_golden_inputs_are_those_before_an_in_place_forward(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
    def forward(self, x):
        return x.mul_(2) * self.w
def model(): return InPlace()
def example_inputs(): return torch.tensor([[1.0, 2.0]])
"""
    work = _work(tmp_path, "ema", text, checkpoint=tmp_path)
    safetensors_io.save(tmp_path / "checkpoint.safetensors", {"w": torch.ones(2)})
    Ema().run(work)
    golden = load_file(work.out / "golden.safetensors")
    assert golden["inputs/x"].tolist() == [[1.0, 2.0]] and golden["outputs/output"].tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize(
    ("forward", "random"),
    [("self.w * x + torch.rand_like(x)", True), ("nn.functional.dropout(self.w * x, 0.5, True)", True),
     ("self.w * x + 1", False)],
)  # fmt: skip
def test_a_model_that_differs_from_itself_is_not_told_as_changed(forward: str, random: bool, tmp_path: Path) -> None:
    """T11, at the golden answers."""
    text = f"""
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
    def forward(self, x): return {forward}
def model(): return Net()
"""
    work = _work(tmp_path, "export", text, weights=tmp_path)
    x = torch.arange(16.0).reshape(2, 8)
    recorded = {"inputs/x": x.numpy(), "outputs/output": x.numpy()}
    (gate,) = module_gates.golden_gates(recorded, call(work.task.call("model"), (x,), {}))
    assert not gate.passed and gate.hint.startswith("non-deterministic op" if random else "was model() changed?")


FAKE = """
import numpy as np, torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = FakeQuantize(MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)
        self.l = nn.Linear(4, 3)
    def forward(self, x):
        return self.l(self.q(x))

def model():
    return Net()

def train_data():
    return np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32), np.arange(20) % 3
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scales_that_were_observed_in_training_ship_as_they_are(tmp_path: Path) -> None:
    for folder in ("trained", "out", "onnx", "scratch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "task.py").write_text(FAKE)
    task = Task(tmp_path / "task.py")
    common = {"task": task, "scratch": tmp_path / "scratch", "log": Quiet()}
    Train(epochs=2).run(Work(inputs={}, out=tmp_path / "trained", **common))
    Ema().run(Work(inputs={"checkpoint": tmp_path / "trained"}, out=tmp_path / "out", **common))
    trained = load_file(tmp_path / "trained" / "checkpoint.safetensors")
    shipped = load_file(tmp_path / "out" / "model.safetensors")
    assert shipped["q.observer_enabled"].item() == 0 and trained["online/q.observer_enabled"].item() == 1
    torch.testing.assert_close(shipped["q.scale"], trained["online/q.scale"], rtol=0, atol=0)
    report = Export().run(Work(inputs={"weights": tmp_path / "out"}, out=tmp_path / "onnx", **common))
    assert report.passed, report.gates


PADDED = """
import torch
from torch import nn

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 2)
    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))

def model():
    return Padded()

def train_data():
    mask = torch.zeros(8, 5, dtype=torch.bool)
    mask[::2, 3:] = True
    return {"x": torch.randn(8, 5, 8), "mask": mask, "label": torch.arange(8) % 2}

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"], batch["mask"]), batch["label"])
"""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_samples_that_torch_passes_on_as_nested_tensors_are_compared(tmp_path: Path) -> None:
    checkpoint = _trained(tmp_path, PADDED)
    report = Ema().run(_work(tmp_path, "ema", PADDED, checkpoint=checkpoint))
    shapes = {record.name: tuple(record.shape) for record in report.records if record.op == "TransformerEncoderLayer"}
    assert shapes == {"encoder.layers.0": (2, 5, 8), "encoder.layers.1": (2, 5, 8)}
