"""T36 and T37: canonical names under any wrapper, tied tensors once, whatever the file looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError
from layerline.training.loop import batch_norm
from layerline.training.model import canonical_names
from layerline.training.state import checkpoint, safetensors_io


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential()
        self.backbone.add_module("conv", nn.Conv2d(1, 2, 3))
        self.backbone.add_module("bn", nn.BatchNorm2d(2))
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x).mean((2, 3)))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.emb(x))
        return out


class Decoy(nn.Module):
    """A user's own submodule called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


CANONICAL = sorted(Net().state_dict())


def _compiled(net: Net) -> nn.Module:
    return torch.compile(net)  # type: ignore[return-value]


def _inner(net: Net) -> nn.Module:
    net.backbone = torch.compile(net.backbone)  # type: ignore[assignment]
    return net


def _parallel(net: nn.Module) -> nn.Module:
    return nn.DataParallel(net)


WRAPS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda n: n,
    "compile": _compiled,
    "compile backbone": _inner,
    "parallel": _parallel,
    "parallel of compiled": lambda n: _parallel(_compiled(n)),
    "compiled parallel of compiled backbone": lambda n: torch.compile(_parallel(_inner(n))),  # type: ignore[return-value]
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_saved_names_are_canonical(wrap: str, tmp_path: Path) -> None:
    mo = ModelOptimizer(WRAPS[wrap](Net()), {"training": {"ema_decay": 0.9}})
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    tensors, _ = safetensors_io.load(path)
    assert sorted(n.removeprefix("online/") for n in tensors if n.startswith("online/")) == CANONICAL
    assert not any("_orig_mod" in n or "module." in n for n in tensors)
    assert sorted(mo.export()) == CANONICAL


@pytest.mark.parametrize("saved", WRAPS)
@pytest.mark.parametrize("target", ["plain", "compile backbone", "parallel of compiled"])
def test_old_prefixed_files_load(saved: str, target: str, tmp_path: Path) -> None:
    source = Net()
    state = WRAPS[saved](source).state_dict()
    torch.save(state, tmp_path / "old.pt")
    safetensors_io.save(tmp_path / "old.safetensors", state)
    for file in ("old.pt", "old.safetensors"):
        into = Net()
        if file == "old.pt":
            canonical_names.load(WRAPS[target](into), torch.load(tmp_path / file, weights_only=True))
        else:
            checkpoint.load_weights(WRAPS[target](into), tmp_path / file)
        plain = canonical_names.named(into).tensors
        assert all(torch.equal(t, canonical_names.named(source).tensors[n]) for n, t in plain.items())
        assert sorted(plain) == CANONICAL


def test_under_distributed_data_parallel() -> None:
    """DDP(compile(m)), the form in which most prefixed files were written."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        wrapped = nn.parallel.DistributedDataParallel(_compiled(net))
        assert all(k.startswith("module._orig_mod.") for k in wrapped.state_dict())
        assert sorted(canonical_names.named(wrapped).tensors) == CANONICAL
        canonical_names.load(Net(), wrapped.state_dict())
        canonical_names.load(wrapped, Net().state_dict())
    finally:
        dist.destroy_process_group()


def test_a_submodule_called_module_keeps_its_name() -> None:
    assert list(canonical_names.named(Decoy()).params) == ["module.weight", "module.bias"]
    wrapped = nn.DataParallel(Decoy())
    assert list(canonical_names.named(wrapped).params) == ["module.weight", "module.bias"]
    into = Decoy()
    canonical_names.load(into, wrapped.state_dict())
    canonical_names.load(into, Decoy().state_dict())


def test_a_strict_load_lists_all_that_is_wrong() -> None:
    state = Net().state_dict()
    state["head.wieght"] = state.pop("head.weight")
    state["head.bias"] = torch.zeros(5)
    with pytest.raises(StageError) as caught:
        canonical_names.load(Net(), state)
    text = str(caught.value)
    assert "missing head.weight" in text and "unknown head.wieght" in text and "head.bias is (5,)" in text


@pytest.mark.parametrize("clone", [False, True])
def test_tied_weights_are_one_tensor_and_an_alias(clone: bool, tmp_path: Path) -> None:
    model = Tied()
    known = canonical_names.named(model)
    assert list(known.params) == ["emb.weight"] and known.aliases == {"head.weight": "emb.weight"}
    mo = ModelOptimizer(model, {"training": {"ema_decay": 0.9}})
    tensors, meta = safetensors_io.load(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert [n for n in tensors if n.startswith(("online/", "ema/"))] == ["ema/emb.weight", "online/emb.weight"]
    assert meta["lanes"][""]["aliases"] == {"head.weight": "emb.weight"}
    # A state dict whose tied entries are clones says the same.
    state = {n: t.clone() if clone else t for n, t in model.state_dict().items()}
    into = Tied()
    canonical_names.load(into, state)
    assert into.head.weight is into.emb.weight and torch.equal(into.emb.weight, model.emb.weight)


def test_tied_names_with_different_values_are_refused() -> None:
    state = {n: t.clone() for n, t in Tied().state_dict().items()}
    state["head.weight"] += 1
    with pytest.raises(StageError, match=r"head\.weight and emb\.weight are tied"):
        canonical_names.load(Tied(), state)


def test_two_parameters_over_the_same_memory_count_as_tied() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.emb.weight.data)
    assert canonical_names.named(model).aliases == {"head.weight": "emb.weight"}


def test_equal_but_separate_tensors_are_not_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].load_state_dict(model[0].state_dict())
    assert canonical_names.named(model).aliases == {}


def test_non_persistent_buffers_and_empty_tensors_are_left_alone() -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.ones(3), persistent=False)
    model.register_buffer("a", torch.ones(0))
    model.register_buffer("b", torch.ones(0))
    known = canonical_names.named(model)
    assert list(known.buffers) == ["a", "b"] and known.aliases == {}


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight


def test_an_export_of_a_tied_model_loads_strictly() -> None:
    mo = ModelOptimizer(TiedHead(), {"training": {"ema_decay": 0.9}})
    weights = mo.export()
    assert sorted(weights) == ["emb.weight", "head.weight"]
    assert weights["emb.weight"] is weights["head.weight"]
    fresh = TiedHead()
    fresh.load_state_dict(weights, strict=True)
    assert torch.equal(fresh.head.weight, mo.model.emb.weight)  # type: ignore[union-attr]


def test_fabrics_wrapper_does_not_appear_in_names() -> None:
    """Lightning Fabric's class, as far as names are concerned: it keeps the module under `_forward_module`."""

    class _FabricModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._forward_module = inner

    _FabricModule.__module__ = "lightning.fabric.wrappers"
    mo = ModelOptimizer(_FabricModule(TiedHead()), {})
    assert "emb.weight" in mo.export()
    assert canonical_names.bare("_forward_module.emb.weight") == "emb.weight"


def test_a_module_under_two_names_of_one_parent_has_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.other = self.one

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.other(self.one(x))
            return out

    model = Twice()
    names = canonical_names.named(model)
    assert list(names.params) == ["one.0.weight", "one.0.bias", "one.1.weight", "one.1.bias"]
    assert names.aliases["other.0.weight"] == "one.0.weight"
    state = {name: torch.full_like(t, 2) for name, t in model.state_dict().items()}
    canonical_names.load(model, state)
    assert model.other[0].weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert batch_norm.batch_norms(model) == ["one.1"]
    parts = nn.ModuleDict({"a": model.one[1], "b": model.one[1]})
    assert batch_norm.to_group_norm(parts, groups=1) == ["a", "b"]
    assert isinstance(parts["b"], nn.GroupNorm) and parts["b"] is parts["a"]
