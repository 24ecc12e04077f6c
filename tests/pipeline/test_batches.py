"""What a data hook returns has one meaning: training and calibration read the same from it, or refuse it alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from layerline.calib.samples import Samples
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import collate, form, split
from layerline.pipeline.outline import outlined
from layerline.pipeline.task import Task
from layerline.training.data.batches import Batches
from layerline.training.run.validation import evaluation_batches, metric_of

A = np.arange(12, dtype=np.float32).reshape(6, 2)
B = np.arange(18, dtype=np.float32).reshape(6, 3) * -1
Y = np.arange(6)


@dataclass(frozen=True)
class In:
    name: str
    dtype: str
    shape: tuple[int | str, ...]


ONE = (In("a", "float32", ("n", 2)),)
TWO = (*ONE, In("b", "float32", ("n", 3)))


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(A, Y, strict=True))


class TakesTwo(nn.Module):
    def forward(self, a: Any, b: Any) -> Any:
        return a.sum() + b.sum()


class TakesOne(nn.Module):
    def forward(self, a: Any) -> Any:
        return a.sum()


def both(rows: Any) -> Any:
    return torch.tensor(A[rows]), torch.tensor(B[rows])


TWO_INPUTS = {
    "nested columns": ((A, B), Y),
    "flat columns": (A, B, Y),
    "lists in columns": ([A, B], Y),
    "lists of numbers": (A.tolist(), B.tolist(), Y.tolist()),
    "dict of columns": {"b": B, "a": A, "label": Y},
    "dict and target": ({"a": A, "b": B}, Y),
    "nested samples": Items([((A[i], B[i]), Y[i]) for i in range(6)]),
    "flat samples": Items([(A[i], B[i], int(Y[i])) for i in range(6)]),
    "dict samples": Items([{"a": A[i], "b": B[i], "target": Y[i]} for i in range(6)]),
    "samples of lists": Items([{"a": A[i].tolist(), "b": B[i].tolist(), "label": int(Y[i])} for i in range(6)]),
    "nested batches": [(both(slice(i, i + 2)), torch.tensor(Y[i : i + 2])) for i in (0, 2, 4)],
    "flat batches": [(*both(slice(i, i + 3)), Y[i : i + 3]) for i in (0, 3)],
    "dict batches": [{"a": A[:4], "b": B[:4], "labels": Y[:4]}, {"a": A[4:], "b": B[4:], "labels": Y[4:].tolist()}],
    "loader": DataLoader(TensorDataset(torch.tensor(A), torch.tensor(B), torch.tensor(Y)), batch_size=4),
}
WITHOUT_TARGET = {
    "one-tuple": (A,),
    "array": A,
    "tensor": torch.tensor(A),
    "dict of one column": {"a": A},
    "samples": Items(list(A)),
    "batches of one": [(A[:2],), (A[2:],)],
    "batches": [torch.tensor(A[:2]), torch.tensor(A[2:])],
}


def trained_on(source: Any, forward: Any) -> tuple[list[Any], Any]:
    parts = [split(b, forward) for b in Batches(source, batch_size=4, seed=None).one_epoch()]
    order = list(parts[0][1]) or range(len(parts[0][0]))
    columns = [np.concatenate([np.asarray((p[1] or p[0])[k]) for p in parts]) for k in order]
    targets = None if parts[0][2] is None else np.concatenate([np.asarray(p[2]) for p in parts])
    return [c for _, c in sorted(zip(order, columns, strict=True), key=lambda pair: str(pair[0]))], targets


def calibrated_on(source: Any, inputs: Any) -> tuple[list[Any], Any]:
    batches = list(Samples(source, inputs, hook="train_data", batch_size=4))
    targets = None if batches[0].target is None else np.concatenate([b.target for b in batches])
    return [np.concatenate([b.feed[i.name] for b in batches]) for i in inputs], targets


@pytest.mark.parametrize("name", TWO_INPUTS)
def test_two_inputs_and_a_target(name: str) -> None:
    source = TWO_INPUTS[name]
    for (a, b), y in (trained_on(source, TakesTwo().forward), calibrated_on(source, TWO)):
        assert (a == A).all() and (b == B).all() and (y == Y).all()


@pytest.mark.parametrize("name", WITHOUT_TARGET)
def test_inputs_alone(name: str) -> None:
    source = WITHOUT_TARGET[name]
    for (a,), y in (trained_on(source, TakesOne().forward), calibrated_on(source, ONE)):
        assert (a == A).all() and y is None


def test_the_last_column_is_an_input_where_the_model_cannot_be_called_without_it() -> None:
    for (a, b), y in (trained_on((A, B), TakesTwo().forward), calibrated_on((A, B), TWO)):
        assert (a == A).all() and (b == B).all() and y is None


REFUSED = {
    "a list of columns": ([A, Y], r"list whose items differ: float32 \(6, 2\) and int64 \(6,\)"),
    "a list of two columns of one type": ([A, B], r"items differ: float32 \(6, 2\) and float32 \(6, 3\)"),
    "a list of nested columns": ([(A, B), Y], "list whose items differ"),
    "a tuple of batches": (((A[:3], Y[:3]), (A[3:], Y[3:])), "2 parts that look alike"),
    "a tuple of uneven batches": (((A[:4], Y[:4]), (A[4:], Y[4:])), r"lengths \[4, 4, 2, 2\]"),
    "a tuple of loaders": ((TWO_INPUTS["loader"], TWO_INPUTS["loader"]), "holds a value of type DataLoader"),
    "a dict of datasets": ({"train": Items([1]), "test": Items([2])}, "holds a value of type Items"),
    "a list of samples": ([(A[i], int(Y[i])) for i in range(6)], r"single samples: \(float32 \(2,\), int\)"),
    "a list of samples in dicts": ([{"a": A[i], "label": Y[i]} for i in range(6)], "single samples"),
    "a stream of samples": (Stream(), "whose items are samples, not batches"),
    "columns of other lengths": ((A, Y[:4]), r"lengths \[6, 4\]"),
    "no samples": ((A[:0], Y[:0]), "gave no samples"),
    "no columns": ((), "gave no samples"),
    "text": ("train.csv", "gave str"),
    "a number": (3, "gave int"),
    "numbers": ((1.0, 2), "holds a value of type float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_mean_two_things_is_refused_alike_with_what_was_seen(name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(TaskError, match=message) as by_training:
        Batches(source, batch_size=2)
    with pytest.raises(TaskError, match=message) as by_calibration:
        list(Samples(source, ONE, hook="train_data"))
    assert str(by_training.value) == str(by_calibration.value)


def test_batches_of_different_length_are_a_list_like_any_other() -> None:
    assert form([np.ones((4, 7)), np.ones((4, 9)), np.ones((2, 5))], "calib_data") == "batches"
    assert form([(A[:4], Y[:4]), (A[4:], Y[4:])], "calib_data") == "batches"


def test_an_argument_that_is_a_dict_or_a_pair_is_given_whole_where_forward_takes_it_so() -> None:
    class Whole(nn.Module):
        def forward(self, batch: Any) -> Any:
            return batch

    args, kwargs, target = split(({"a": A, "b": B}, Y), Whole().forward)
    assert list(args[0]) == ["a", "b"] and not kwargs and target is Y
    assert split(((A, B), Y), Whole().forward)[0] == ((A, B),)
    named = (In("batch_a", "float32", ("n", 2)), In("batch_b", "float32", ("n", 3)))
    (batch,) = Samples(({"a": A, "b": B}, Y), named, hook="train_data", batch_size=8)
    assert (batch.feed["batch_a"] == A).all() and (batch.feed["batch_b"] == B).all()


NESTED = [
    ((1.5, {"boxes": np.ones((2, 4), np.float32), "n": 1}), 2),
    ((2.5, {"boxes": np.zeros((2, 4), np.float32), "n": 3}), 5),
]


def test_samples_are_stacked_as_torch_stacks_them() -> None:
    ours = collate(NESTED, lambda parts: np.stack([np.asarray(p) for p in parts]))
    torchs = default_collate(NESTED)
    assert outlined(ours).replace("float64", "") == outlined(torchs).replace("float64", "")
    assert ours[0][1]["boxes"].tolist() == torchs[0][1]["boxes"].tolist() and ours[1].tolist() == [2, 5]


def test_targets_in_a_dict_reach_the_metric_joined_by_key_while_training_and_after(tmp_path: Path) -> None:
    targets = [{"box": B[i], "kind": int(Y[i])} for i in range(6)]
    source = Items(list(zip(A, targets, strict=True)))
    batches = list(Samples(source, ONE, hook="eval_data", batch_size=4))
    assert outlined(batches[0].target) == "{box: float32 (4, 3), kind: int64 (4,)}"
    (tmp_path / "task.py").write_text(
        "def eval_data(): return SOURCE\n"
        "def metric(outputs, targets): return float(targets['box'].shape == (6, 3)) + targets['kind'].sum()\n"
    )
    task = Task(tmp_path / "task.py")
    task._load().SOURCE = source  # type: ignore[attr-defined]
    assert metric_of(task, nn.Identity(), evaluation_batches(task, 4), device=torch.device("cpu")) == {"metric": 16.0}
