"""Whatever is wrong in a task is told as the task's: what was seen, and the line where it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerline.pipeline.errors import TaskError, Unavailable
from layerline.pipeline.inputs.batches import described
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.train import Train
from layerline.training.data import golden_outputs
from layerline.training.model.canonical_names import named
from layerline.training.run.validation import evaluation_batches, metric_of

CPU = torch.device("cpu")
HEAD = """import numpy as np, torch
from torch import nn
x, y = np.ones((9, 5), np.float32), np.arange(9) % 5
def model(): return nn.Linear(5, 5)
def train_data(): return x, y
"""
DATASET = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 9
    def __getitem__(self, i): {body}
def train_data(): return Data()
"""
MISTAKES = {
    "features": (
        "def model(): return nn.Linear(7, 2)",
        r"the model raised RuntimeError: .* on a batch x \(4, 5\) float32, y \(4,\) int64",
    ),
    "labels": ("y = np.arange(9) + 1", r"targets go from \d+ to \d+, the model has 5 outputs"),
    "negative": ("y = np.arange(9) % 5 - 1", "targets go from -1 to"),
    "lengths": (
        "def train_data(): return [(torch.ones(3, 5), torch.ones(2).long())]",
        r"outputs \(3, 5\) and integer targets \(2,\)",
    ),
    "uint16": ("x = x.astype(np.uint16)", r"the model raised RuntimeError: .* on a batch x \(4, 5\) uint16"),
    "objects": ("x = x.astype(object)", r"an array of type object and shape \(9, 5\)"),
    "strings": ("y = np.array(list('abcabcabc'))", r"an array of type <U1 and shape \(9,\)"),
    "three arrays": (
        "def train_data(): return x, x, y",
        r"the model raised TypeError: .* on a batch x0 \(4, 5\) float32, x1 \(4, 5\)",
    ),
    "lists": ("def train_data(): return [[1, 2], [3, 4]]", "a batch x of type int, y of type int, expected tensors"),
    "label list": (
        "def train_data(): return [{'input': torch.ones(2, 5), 'label': ['a', 'b']}]",
        "the label of a batch is not a tensor",
    ),
    "nothing": ("def train_data(): return []", r"train_data\(\) gave no samples"),
    "no rows": ("def train_data(): return x[:0], y[:0]", r"train_data\(\) gave no samples"),
    "sample": (
        DATASET.format(body="raise KeyError('img')"),
        r"drawing a batch of train_data\(\) raised KeyError: 'img'",
    ),
    "ragged": (
        DATASET.format(body="return np.ones(i + 1, np.float32), 0"),
        "stack expects each tensor to be equal size",
    ),
    "keyword": (
        "class Net(nn.Linear):\n    def forward(self, *, x): return x\ndef model(): return Net(5, 5)",
        "the model raised TypeError",
    ),
    "forward": (
        "class Net(nn.Linear):\n    def forward(self, x): return self.weight @ x\ndef model(): return Net(5, 5)",
        "the model raised RuntimeError",
    ),
    "batch of one": (
        "def model(): return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))",
        r"the model raised ValueError: .* on a batch x \(1, 5\)",
    ),
    "lazy": ("def model(): return nn.LazyLinear(5)", "parameter weight is not initialised"),
}
GREEDY = """
class Net(nn.Linear):
    def forward(self, x): return super().forward(x) + torch.empty(10**15)
def model(): return Net(5, 5)
"""
# Where a line of the user's own is on the way.
LINES = {"sample": 9, "forward": 7}


def _train(root: Path, code: str, **config: Any) -> Any:
    (root / "task.py").write_text(HEAD + code)
    for folder in ("out", "scratch"):
        (root / folder).mkdir(exist_ok=True)
    work = Work(inputs={}, task=Task(root / "task.py"), out=root / "out", scratch=root / "scratch", log=_Quiet())
    return Train(**{"epochs": 2, "batch_size": 4, "device": "cpu", **config}).run(work)


class _Quiet:
    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: Any) -> None: ...
    def row(self, figures: Any) -> None: ...


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_task_is_told_as_one(name: str, tmp_path: Path) -> None:
    code, told = MISTAKES[name]
    with pytest.raises(TaskError, match=told) as caught:
        _train(tmp_path, code)
    if name in LINES:
        assert caught.value.where == f"task.py:{LINES[name]}"


def test_a_sample_that_fails_in_a_worker_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"train_data\(\) raised ValueError: no such image") as caught:
        _train(tmp_path, DATASET.format(body="raise ValueError('no such image')"), workers=1)
    assert caught.value.where == "task.py:9" and "\n" not in caught.value.what


@pytest.mark.parametrize(
    "code",
    [
        "def model(): return nn.Linear(10**7, 10**7)",
        "def train_data(): return torch.empty(10**9, 10**6), y",
        "def loss(model, batch): return torch.empty(10**15).sum()",
        GREEDY,
        "def loss(model, batch): raise torch.OutOfMemoryError('CUDA out of memory')",
        "def loss(model, batch): raise MemoryError",
    ],
)
def test_memory_that_cannot_be_had_is_the_machines_lack(code: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="out of memory"):
        _train(tmp_path, code)


def test_uninitialised_parameters_are_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"parameter 1\.weight is not initialised") as caught:
        named(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
    assert "run the model once" in caught.value.hint
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.ones(1, 4))
    assert named(model).params["0.weight"].shape == (3, 4)


def test_a_batch_in_words() -> None:
    assert described((torch.ones(2, 3), torch.zeros(2).long())) == "a batch x (2, 3) float32, y (2,) int64"
    assert described({"ids": torch.ones(2), "labels": torch.ones(2)}) == "a batch ids (2,) float32, y (2,) float32"
    assert described([]) == "a batch of type list"


def _metric(root: Path, code: str, model: nn.Module) -> dict[str, float]:
    (root / "task.py").write_text(HEAD + code)
    task = Task(root / "task.py")
    return metric_of(task, model, evaluation_batches(task, 4), device=CPU)


class _Several(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        a, b = x * 2, x.sum(1)
        return {"dict": {"a": a, "b": b}, "tuple": (a, b), "one": {"a": a}, "list": [a, b], "plain": a}[self.form]


@pytest.mark.parametrize(
    ("form", "shapes"),
    [
        ("dict", [(9, 5), (9,)]),
        ("tuple", [(9, 5), (9,)]),
        ("list", [(9, 5), (9,)]),
        ("one", (9, 5)),
        ("plain", (9, 5)),
    ],
)
def test_the_metric_gets_every_output(form: str, shapes: Any, tmp_path: Path) -> None:
    code = f"""
def eval_data(): return x, y
def metric(outputs, targets):
    seen = [o.shape for o in outputs] if isinstance(outputs, tuple) else outputs.shape
    return float(seen == {shapes!r} and targets.shape == (9,))
"""
    assert _metric(tmp_path, code, _Several(form)) == {"metric": 1.0}


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def eval_data(): return [{'x': torch.ones(2, 5)}]", "a batch has no label"),
        ("def eval_data(): return [{'x': torch.ones(2, 5), 'label': ['a', 'b']}]", "the label of a batch is no tensor"),
        ("def eval_data(): return np.ones((3, 4, 5)), np.ones(4)", "lengths"),
        ("def eval_data(): return [(torch.ones(2, 5), torch.ones(2)), (torch.ones(2, 4), torch.ones(2))]",
         "the outputs of different batches cannot be joined"),
        ("def eval_data(): return [(1, torch.ones(2))]", r"the model raised TypeError: .* on a batch x of type int"),
    ],
)  # fmt: skip
def test_mistakes_in_the_evaluation(code: str, told: str, tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.relu(x)

    with pytest.raises(TaskError, match=told):
        _metric(tmp_path, code, Named())


@pytest.mark.parametrize("nested", [False, True])
def test_golden_inputs_are_those_before_a_forward_that_writes_into_them(nested: bool) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x[0] if nested else x).mul_(2) + 1

    given = torch.tensor([1.0, 2.0])
    kept = golden_outputs.record(InPlace(), ((given,),) if nested else (given,), {})
    assert given.tolist() == [1.0, 2.0] and kept["outputs/output"].tolist() == [3.0, 5.0]
    assert nested or kept["inputs/x"].tolist() == [1.0, 2.0]
    assert golden_outputs.record(InPlace(), (), {"x": (given,) if nested else given})["outputs/output"].tolist() == [
        3.0,
        5.0,
    ]


def test_bytes_into_a_float_model_are_told_with_what_to_do() -> None:
    with pytest.raises(TaskError, match="cannot run on the example") as caught:
        golden_outputs.record(nn.Linear(3, 2), (torch.ones(2, 3, dtype=torch.uint8),), {})
    assert "uint8" in caught.value.hint and "float()" in caught.value.hint
    with pytest.raises(TaskError) as caught:
        golden_outputs.record(nn.Linear(3, 2), (torch.ones(2, 4),), {})
    assert "uint8" not in caught.value.hint
