"""What torch.save resumes exactly is resumed exactly: every optimizer class, in every order of memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from layerline import ModelOptimizer
from tests.training.sweep import EXCEPTIONS, by_checkpoint, by_hand, classes, equal, loss_of

CLASSES = classes()
TYPICAL = ("torch.Adam", "torch.NAdam", "torch.Adagrad", "torch.Muon", "aggmo", "adashift", "kron",
           "soap", "lorarite", "conda", "magma", "scalableshampoo", "schedulefreeadamw")  # fmt: skip


def check(name: str, folder: Path) -> None:
    assert by_hand(name, CLASSES[name], folder / "by_hand.pt")
    assert by_checkpoint(name, CLASSES[name], folder / "a.safetensors") == (True, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TYPICAL)
def test_a_typical_class_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in CLASSES if n not in EXCEPTIONS and n not in TYPICAL])
def test_every_other_class_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_the_exceptions_are_still_exceptions(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception):  # noqa: B017  (each class has an error of its own)
        by_hand(name, CLASSES[name], tmp_path / "by_hand.pt")


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_few_bits_go_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """torchao keeps them as tensors of a class of its own, made of codes, scales and a table."""
    optim = pytest.importorskip("torchao.optim")

    def make() -> ModelOptimizer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Tanh(), nn.Flatten(), nn.Linear(576, 64), nn.Linear(64, 2))
        model[3].weight = nn.Parameter(torch.randn(576, 64).mul(0.05).t())
        model.to(memory_format=torch.channels_last)
        return ModelOptimizer(model, {}, optimizer=getattr(optim, kind)(model.parameters(), lr=0.01, block_size=128))

    with torch.compiler.set_stance("force_eager"):
        mo = make()
        for step in range(3):
            mo.step(loss_of(mo.model, step))
        again, twin = make(), copy.deepcopy(mo)
        again.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
        for each in (mo, again, twin):
            for step in range(3, 6):
                each.step(loss_of(each.model, step))
    held = [type(v).__name__ for s in again.lanes[""].optimizer.state.values() for v in s.values()]
    assert f"OptimState{kind.removeprefix('AdamW')}" in held
    assert equal(mo.model, again.model) and equal(mo.model, twin.model)
