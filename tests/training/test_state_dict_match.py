"""Checkpoints that hold no numbers to take, more than they are, or themselves: a sentence, or the right weights."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerline.pipeline.errors import StageError
from layerline.training.state import foreign_files, state_dict_match

NET = nn.Linear(4, 2)
STATE = NET.state_dict()


def _weights(path: Path, saved: Any) -> dict[str, torch.Tensor]:
    torch.save(saved, path / "w.pt")
    online, _ = state_dict_match.choose(foreign_files.read(path / "w.pt", trust=False)[0], NET)
    assert online is not None
    return dict(online.tensors)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (STATE["weight"].to("meta"), "on the meta device: it has a shape but no data"),
        (STATE["weight"].to_sparse(), "a sparse_coo tensor, expected a dense one"),
        (STATE["weight"].to_sparse_csr(), "a sparse_csr tensor, expected a dense one"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor, expected a dense one"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_numbers_of_their_own_are_named(tmp_path: Path, weight: Any, said: str) -> None:
    with pytest.raises(StageError) as error:
        _weights(tmp_path, {"model": {**STATE, "weight": weight}})
    assert error.value.what == f"it is {said}" and error.value.where == "model.weight"


def test_what_holds_itself_is_looked_into_once(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": dict(STATE), "list": []}
    tree["self"] = tree
    tree["list"].append(tree["list"])
    tree["model"]["again"] = tree["model"]
    weights = _weights(tmp_path, tree)
    assert torch.equal(weights["weight"], STATE["weight"])


def test_what_is_nested_without_an_end_is_refused() -> None:
    tree: Any = STATE
    for _ in range(5000):
        tree = {1: tree}
    with pytest.raises(StageError, match="nested more than 100 levels deep"):
        state_dict_match.choose(tree, NET)


def test_an_archive_that_unpacks_to_more_than_it_is_is_not_unpacked(tmp_path: Path) -> None:
    """10 MB of zeros in 10 kB; one that is only stored, as torch writes it, is read."""
    torch.save({"model": STATE, "rest": torch.zeros(2_500_000)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as stored, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    assert foreign_files.read(tmp_path / "w.pt", trust=False)[0]["rest"].numel() == 2_500_000
    size = (tmp_path / "packed.pt").stat().st_size
    assert size < 20_000
    for trust in (False, True):
        with pytest.raises(StageError, match=rf"unpack to 1000\d+ bytes, but the file has {size}"):
            foreign_files.read(tmp_path / "packed.pt", trust=trust)
