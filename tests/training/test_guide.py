"""The guide's snippets run as they stand, and its table of fields has them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerline.training.config import aliases

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "training.md").read_text("utf-8") + (DOCS / "training-reference.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the guide takes as given."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    return {
        "model": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        "teacher": nn.Linear(6, 3),
        "deep": nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))),
        "normed": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        "criterion": nn.CrossEntropyLoss(),
        "batches": [(x, y), (x[:5], y[:5]), (x[:7], y[:7])],
        "torch": torch,
        "x": x,
        "y": y,
    }


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_every_snippet_runs(number: int, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(SNIPPETS[number], names)
    assert "Traceback" not in capsys.readouterr().out


def test_the_two_shapes_of_the_guide_mean_the_same(names: dict[str, Any]) -> None:
    exec(SNIPPETS[1], names)
    assert aliases.load(names["one"]).model_dump(exclude={"scheduler"}) == aliases.load(names["other"]).model_dump(
        exclude={"scheduler"}
    )


@pytest.mark.parametrize("path", sorted(aliases.MOVES))
def test_every_other_spelling_is_in_the_guide(path: str) -> None:
    section, _, field = path.rpartition(".")
    named = path in GUIDE or (section == "training" and f"`monitor.{field}`" in GUIDE)
    assert named and f"`{aliases.MOVES[path]}`" in GUIDE


def test_every_field_of_ranks_is_explained() -> None:
    from layerline.training.config.sections import DistributedConfig

    for name in DistributedConfig.model_fields:
        assert f"`{name}`" in GUIDE or f"`distributed.{name}`" in GUIDE
