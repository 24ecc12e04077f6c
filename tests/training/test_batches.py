"""Batches are a function of (seed, epoch, position): the same from any position and with any number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from layerline.pipeline.errors import ConfigError, TaskError
from layerline.pipeline.task import Task
from layerline.training.data import batches as data
from layerline.training.data.batches import Batches


class Noisy(Dataset[Any]):
    """Samples with draws from all three generators, and a label that is a plain int."""

    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.array([i + random.random(), np.random.rand(), torch.rand(()).item()]), i % 3


class Shuffled:
    """A re-iterable of the user's own that shuffles by the global generator, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in torch.randperm(5):
            yield torch.full((2, 3), float(i)) + torch.rand(2, 3), torch.tensor([0, 1])


def _arrays() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(20, dtype=np.float64).reshape(10, 2), np.arange(10)


def _loader() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


SOURCES = {"arrays": _arrays, "samples": Noisy, "batches": Shuffled, "loader": _loader,
           "list": lambda: [(torch.ones(2, 1) * i, torch.zeros(2).long()) for i in range(3)]}  # fmt: skip


def _take(batches: Batches, n: int) -> list[tuple[Tensor, ...]]:
    return list(islice(batches.forever(), n))


def _equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 5, 7])
def test_it_goes_on_from_any_position(kind: str, consumed: int) -> None:
    def make() -> Batches:
        return Batches(SOURCES[kind](), batch_size=4, seed=3)

    straight = _take(make(), 12)
    first = make()
    torch.manual_seed(5)
    head = _take(first, consumed)
    second = make()
    torch.manual_seed(6)
    second.load_state_dict(first.state_dict())
    assert _equal(head + _take(second, 12 - consumed), straight)


@pytest.mark.parametrize("resume_at", [0, 4])
def test_workers_change_nothing(resume_at: int) -> None:
    def take(workers: int) -> list[tuple[Tensor, ...]]:
        batches = Batches(Noisy(), batch_size=4, seed=3, workers=workers)
        batches.load_state_dict({"epoch": resume_at // 3, "position": resume_at % 3})
        return _take(batches, 5)

    assert _equal(take(0), take(2))


@pytest.mark.parametrize("kind", SOURCES)
def test_drawing_data_leaves_the_models_generators_alone(kind: str) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    _take(Batches(SOURCES[kind](), batch_size=4), 5)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("kind", ["arrays", "samples"])
def test_every_sample_comes_once_an_epoch_in_a_new_order(kind: str) -> None:
    batches = Batches(SOURCES[kind](), batch_size=4, seed=3)
    assert batches.per_epoch == 3
    orders = []
    for epoch in range(2):
        assert batches.epoch == epoch and batches.position == 0
        seen = torch.cat([b[0][:, 0].floor() for b in batches.one_epoch()])
        assert sorted(seen.tolist()) == (list(range(0, 20, 2)) if kind == "arrays" else list(range(10)))
        orders.append(seen)
    assert not torch.equal(*orders)


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_ends_where_its_data_ends(kind: str) -> None:
    batches = Batches(SOURCES[kind](), batch_size=4, seed=3)
    expected = 5 if kind == "batches" else 3
    for epoch in range(3):
        assert len(list(batches.one_epoch())) == expected
        assert (batches.epoch, batches.position) == (epoch + 1, 0)


def test_without_a_seed_the_order_is_kept() -> None:
    first = next(Batches(_arrays(), batch_size=10, seed=None).forever())
    assert torch.equal(first[1], torch.arange(10)) and first[0].dtype == torch.float32


def test_the_shape_of_dicts_and_pairs() -> None:
    batch = {"input_ids": torch.ones(2, 3), "mask": torch.ones(2), "labels": torch.zeros(2)}
    args, kwargs, target = data.split(batch)
    assert args == () and list(kwargs) == ["input_ids", "mask"] and target is batch["labels"]
    x, z, y = torch.ones(2, 1), torch.zeros(2, 1), torch.ones(2)
    assert data.split((x, y))[0] == (x,) and data.split(((x, z), y))[0] == (x, z) and data.split((x, z, y))[0] == (x, z)
    assert data.size(batch) == data.size((x, y)) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((np.ones(3), np.ones(4)), r"lengths \[3, 4\]"),
        ((np.ones((0, 2)), np.ones(0)), "no samples"),
        (iter([1]), "cannot be replayed"),
        ((x for x in [1]), "cannot be replayed"),
        (3, "gave int"),
        ("text", "gave str"),
        (None, "gave NoneType"),
        (Noisy(0), "no samples"),
    ],
)
def test_the_wrong_thing_is_told(source: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Batches(source, batch_size=2)


def test_a_number_beyond_float32_is_told_by_place() -> None:
    """It would become inf; inf itself is what the data says."""
    x = np.zeros((4, 2))
    x[2, 1] = 1e39
    with pytest.raises(ConfigError, match=r"array\[2, 1\] is 1e\+39, expected float32"):
        data.as_tensor(x, "train_data")
    x[2, 1] = np.inf
    assert data.as_tensor(x)[2, 1] == torch.inf


def test_an_empty_iterable_ends_in_a_message() -> None:
    with pytest.raises(TaskError, match="no samples"):
        _take(Batches([], batch_size=2), 1)


def _task(tmp_path: Path, text: str) -> Task:
    (tmp_path / "task.py").write_text("import numpy as np, torch\n" + text)
    return Task(tmp_path / "task.py")


@pytest.mark.parametrize(
    ("text", "shapes", "names"),
    [
        ("def example_inputs(): return torch.ones(5, 2), np.ones((5, 1))", [(5, 2), (5, 1)], []),
        ("def example_inputs(): return torch.ones(5, 2)", [(5, 2)], []),
        ("def example_inputs(): return {'a': np.ones((5, 2), 'f4')}", [], [("a", (5, 2))]),
        ("def eval_data(): return np.ones((9, 3)), np.ones(9)", [(2, 3)], []),
        ("def train_data(): return [{'ids': torch.ones(4, 3).long(), 'labels': torch.ones(4)}]", [], [("ids", (2, 3))]),
    ],
)
def test_example_inputs(text: str, shapes: list[Any], names: list[Any], tmp_path: Path) -> None:
    args, kwargs = data.example_inputs(_task(tmp_path, text))
    assert [tuple(a.shape) for a in args] == shapes and [(n, tuple(t.shape)) for n, t in kwargs.items()] == names


def test_example_inputs_beside_what_holds_for_all_samples(tmp_path: Path) -> None:
    for batches, shapes in (
        ("[{'x': np.ones((4, 3), 'f4'), 'mask': np.ones((1, 3), 'f4')}]", [(2, 3), (1, 3)]),
        ("{'x': np.ones((4, 3), 'f4'), 'scale': np.float32(2)}", [(2, 3), ()]),
    ):
        _, kwargs = data.example_inputs(_task(tmp_path, f"def train_data(): return {batches}"))
        assert [tuple(tensor.shape) for tensor in kwargs.values()] == shapes


def test_example_inputs_keep_their_memory_format(tmp_path: Path) -> None:
    images = "torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last)"
    args, _ = data.example_inputs(_task(tmp_path, f"def train_data(): return [({images}, torch.ones(4))]"))
    assert args[0].shape == (2, 3, 5, 5) and args[0].stride() == (75, 1, 15, 3)


def test_example_inputs_keep_their_integer_type(tmp_path: Path) -> None:
    args, _ = data.example_inputs(_task(tmp_path, "def example_inputs(): return (np.ones((2, 3), 'i4'),)"))
    assert args[0].dtype == torch.int32


def test_nothing_to_run_on_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nothing to run the model on"):
        data.example_inputs(_task(tmp_path, "def model(): pass"))


@pytest.mark.parametrize("kind", ["columns", "batches"])
def test_a_ranks_share_keeps_channels_last(kind: str) -> None:
    """A kernel for channels_last rounds otherwise than one for row-major images."""
    images = torch.arange(300.0).reshape(4, 3, 5, 5).to(memory_format=torch.channels_last)
    source: Any = {"columns": (images, torch.arange(4)), "batches": [(images, torch.arange(4))]}[kind]
    x, rows = next(Batches(source, batch_size=4, seed=None, rank=1, ranks=2).forever())
    assert rows.tolist() == [1, 3] and torch.equal(x, images[1::2])
    assert x.stride() == (75, 1, 15, 3)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.sampled_from(["arrays", "samples", "batches"]))
@settings(max_examples=40, deadline=None)
def test_ranks_share_the_batches_of_one_process(samples: int, size: int, ranks: int, kind: str) -> None:
    x = torch.arange(samples).float()[:, None]
    source: Any = {
        "arrays": (x, x),
        "samples": TensorDataset(x, x),
        "batches": list(zip(x.split(size), x.split(size), strict=True)),
    }
    whole = Batches(source[kind], batch_size=size, seed=3)
    shared = [Batches(source[kind], batch_size=size, seed=3, rank=r, ranks=ranks) for r in range(ranks)]
    for batch, *parts in zip(whole.one_epoch(), *(s.one_epoch() for s in shared), strict=True):
        counted = [s.counted for s in shared]
        assert sum(counted) == whole.counted == len(batch[0]) and max(counted) - min(counted) <= 1
        own = torch.cat([part[0][:n] for part, n in zip(parts, counted, strict=True)])
        assert sorted(own.flatten().tolist()) == sorted(batch[0].flatten().tolist())
        assert all(len(part[0]) == max(n, 1) for part, n in zip(parts, counted, strict=True))
        assert {(s.epoch, s.position) for s in shared} == {(whole.epoch, whole.position)}
