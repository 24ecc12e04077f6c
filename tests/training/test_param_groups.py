"""Weight decay never reaches biases, norms and 1-D parameters, and each parameter is in one group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.model.canonical_names import named
from layerline.training.optimizers.param_groups import members


class LlamaRMSNorm(nn.Module):
    """A norm of the user's own, with a matrix for a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.norm = nn.LayerNorm((2, 3))
        self.rms = LlamaRMSNorm()
        self.attention = nn.MultiheadAttention(4, 2)
        self.step_size = nn.Parameter(torch.ones(()))
        self.shift = nn.Module()
        self.shift.bias = nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight


REASONS = {
    "emb.weight": "weight", "conv.weight": "weight", "conv.bias": "bias", "bn.weight": "norm", "bn.bias": "bias",
    "norm.weight": "norm", "norm.bias": "bias", "rms.scale": "norm", "attention.in_proj_weight": "weight",
    "attention.in_proj_bias": "bias", "attention.out_proj.weight": "weight", "attention.out_proj.bias": "bias",
    "step_size": "1-D", "shift.bias": "bias",
}  # fmt: skip


def test_every_parameter_has_one_place_and_a_reason() -> None:
    found = {m.name: m.reason for m in members(named(Net()))}
    assert found == REASONS
    assert all(m.decay == (m.reason == "weight") for m in members(named(Net())))


def test_embeddings_and_patterns_where_asked() -> None:
    found = {m.name: m.reason for m in members(named(Net()), ["embeddings", "attention.*"])}
    assert found["emb.weight"] == "embedding"
    assert found["attention.out_proj.weight"] == "no_decay attention.*"
    assert found["conv.weight"] == "weight"


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="matches no parameter"):
        members(named(Net()), ["atention.*"])


def test_decay_moves_weights_only() -> None:
    """One step on zero gradients: w *= 1 - lr * decay for weights, and nothing for the rest."""
    model = Net()
    mo = ModelOptimizer(model, {"optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.5}})
    before = {n: p.detach().clone() for n, p in named(model).params.items()}
    mo.step(sum((p * 0).sum() for p in model.parameters()))  # type: ignore[arg-type]
    for name, param in named(model).params.items():
        factor = 0.95 if REASONS[name] == "weight" else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor, rtol=1e-6, atol=0)


def test_tied_weights_are_stepped_once() -> None:
    model = Net()
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 1.0}})
    grouped = [p for g in mo.lanes[""].optimizer.param_groups for p in g["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))


def test_frozen_parameters_stay_out() -> None:
    model = Net()
    model.emb.requires_grad_(False)
    assert "emb.weight" not in {m.name for m in members(named(model))}
    with pytest.raises(ConfigError, match="requires a gradient"):
        ModelOptimizer(model.requires_grad_(False), {})


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(nn.Sequential(nn.Embedding(3, 2, sparse=True)), {})
    assert caught.value.where == "0.weight"


def test_parameters_gained_later_join() -> None:
    """A fake-quantisation scale that appears after construction is stepped, averaged, and never decays."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight * getattr(self, "scale", 1.0)

    model = Scaled()
    mo = ModelOptimizer(model, {"optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.5},
                                "training": {"ema_decay": 0.5}})  # fmt: skip
    mo.step(model(torch.ones(1, 2)).sum())
    model.scale = nn.Parameter(torch.ones(1))
    assert mo.join() == ["scale"] and mo.join() == []
    mo.step(model(torch.ones(1, 2)).sum())
    assert model.scale.item() == pytest.approx(0.9)
    assert mo.export()["scale"].item() == pytest.approx(0.95)


class Tied(nn.Module):
    """The head is registered before the embedding, so the weight is kept under its name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5, bias=False)
        self.body = nn.Linear(4, 4)
        self.emb = nn.Embedding(5, 4)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize(
    ("no_decay", "reason"),
    [
        ([], "weight"),
        (["embeddings"], "embedding"),
        (["emb.*"], "no_decay emb.*"),
        (["head.*"], "no_decay head.*"),
        (["body.weight", "emb.*"], "no_decay emb.*"),
    ],
)
def test_a_tied_weight_is_known_by_all_its_names(no_decay: list[str], reason: str) -> None:
    found = {m.name: m for m in members(named(Tied()), no_decay)}
    assert list(found) == ["head.weight", "body.weight", "body.bias"]
    assert found["head.weight"].reason == reason and found["head.weight"].decay is (reason == "weight")


def test_the_first_of_two_sparse_gradients_is_named() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            rows = [nn.functional.embedding(x, table, sparse=True) for table in (self.a, self.b)]
            return torch.stack(rows).sum()

    model = Tables()
    with pytest.raises(ConfigError, match="sparse") as caught:
        ModelOptimizer(model, {}).step(model(torch.tensor([1])))
    assert caught.value.where == "a"


def test_a_tied_sparse_embedding_is_refused_by_its_own_name() -> None:
    model = Tied()
    model.emb.sparse = True
    with pytest.raises(ConfigError, match="sparse") as caught:
        members(named(model))
    assert caught.value.where == "emb.weight"


def test_the_length_of_weight_normalisation_does_not_decay() -> None:
    new = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 2))
    old = nn.utils.weight_norm(nn.Linear(4, 3))
    own = nn.Module()
    own.size_g = nn.Parameter(torch.ones(2, 2))  # not a weight norm's
    spectral = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    model = nn.ModuleDict({"new": new, "old": old, "own": own, "spectral": spectral})
    assert {m.name: m.reason for m in members(named(model))} == {
        "new.bias": "bias", "new.parametrizations.weight.original0": "norm",
        "new.parametrizations.weight.original1": "weight",
        "old.bias": "bias", "old.weight_g": "norm", "old.weight_v": "weight", "own.size_g": "weight",
        "spectral.bias": "bias", "spectral.parametrizations.weight.original": "weight",
    }  # fmt: skip
