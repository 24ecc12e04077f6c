"""Checkpointing changes what is kept and nothing else."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.model.recompute import Checkpointed, _Alone, _Segmented


class Block(nn.Module):
    """Takes keyword arguments, gives a tuple, draws from torch, numpy and python."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor, pair: tuple[float, float] = (1.0, 2.0)) -> tuple[Tensor, float]:
        self.calls += 1
        noise = float(np.random.rand()) + random.random()
        return x + self.drop(self.mlp(x)) * scale * pair[0] * noise, noise


class Net(nn.Module):
    def __init__(self, width: int = 8, layers: int = 6) -> None:
        super().__init__()
        stem = [m for _ in range(3) for m in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))]
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x, _ = block(x, scale=torch.tensor(0.5))
        return x


def segments(checkpointed: Checkpointed) -> list[tuple[str, ...]]:
    """The layers that are recomputed together, by path."""
    out: list[tuple[str, ...]] = []
    for path, body in checkpointed._bodies:
        names = {layer: f"{path}.{name}".lstrip(".") for name, layer in body.named_children()}
        forward = body.__dict__.get("forward")
        parts = [[layer] for layer in names if isinstance(layer.__dict__.get("forward"), _Alone)]
        if isinstance(forward, _Segmented):
            parts = forward.segments()
        out += [tuple(names[layer] for layer in part) for part in parts]
    return out


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _run(model: nn.Module, *, amp: bool = False) -> dict[str, Any]:
    _seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(torch.randn(16, 8)).float().square().mean()
    loss.backward()
    out = {f"grad {n}": p.grad for n, p in model.named_parameters()}
    out |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    out["draws"] = torch.tensor([torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)
    model.zero_grad()
    return out


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("every", [1, 2, 4, 100])
def test_gradients_statistics_and_draws_are_the_plain_models_bit_for_bit(every: int, amp: bool) -> None:
    _seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    Checkpointed(model, every)
    expected, seen = _run(plain, amp=amp), _run(model, amp=amp)
    assert expected.keys() == seen.keys()
    for name, value in expected.items():
        assert torch.equal(value, seen[name]), name


def test_segments() -> None:
    model = Net(layers=3)
    assert segments(Checkpointed(model, 4)) == [
        ("stem.0", "stem.1", "stem.2", "stem.3"),
        ("stem.4", "stem.5", "stem.6", "stem.7", "stem.8"),  # the last one works in place: it cannot be first
        ("blocks.0",), ("blocks.1",), ("blocks.2",),
    ]  # fmt: skip


def test_a_short_sequential_leaves_the_cut_to_the_bodies_inside_it() -> None:
    stages = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)]
    assert segments(Checkpointed(nn.Sequential(*stages), 2)) == [("0.0", "0.1"), ("0.2",), ("1.0", "1.1"), ("1.2",)]
    assert segments(Checkpointed(nn.Sequential(*copy.deepcopy(stages)), 1)) == [("0",), ("1",)]


def test_layers_are_run_twice_with_gradients_and_once_without() -> None:
    model = Net()
    Checkpointed(model)
    _run(model)
    assert [b.calls for b in model.blocks] == [2] * 6
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert [b.calls for b in model.blocks] == [3] * 6


def test_names_copies_pickles_and_taking_it_off() -> None:
    model = Net()
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    expected = _run(copy.deepcopy(model))
    on = Checkpointed(model)
    assert list(model.state_dict()) == names and [type(m) for m in model.modules()] == kinds
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    seen = _run(twin)
    assert all(torch.equal(v, seen[n]) for n, v in expected.items())
    file = io.BytesIO()
    torch.save(model, file)
    on.remove()
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert [b.calls for b in twin.blocks] == [2] * 6


def test_a_second_backward_through_the_same_segments() -> None:
    model, plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double(), None
    plain = copy.deepcopy(model)
    Checkpointed(model, 2)
    x = torch.randn(5, 3, dtype=torch.float64)
    seconds = []
    for net in (plain, model):
        grads = torch.autograd.grad(net(x).square().sum(), list(net.parameters()), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), list(net.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*seconds, strict=True))


def test_nothing_to_cut_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no nn.Sequential or nn.ModuleList"):
        Checkpointed(nn.Linear(2, 2))


def _kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, besides parameters and the batch."""
    there = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad  # the graph lives until here: a freed address could come again
    return sum(size for address, size in kept.items() if address not in there)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 8))
def test_what_is_kept_is_one_input_per_segment(layers: int, every: int, batch: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    x = torch.randn(batch, 4)
    # A plain linear layer keeps its input; the first one's is the batch itself.
    assert _kept(model, x) == (layers - 1) * batch * 16
    Checkpointed(model, every)
    segments = -(-layers // every)
    assert _kept(model, x) == (segments - 1) * batch * 16


def test_the_configuration_switches_it_on_and_the_segments_can_be_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ModelOptimizer(Net(), {}).checkpointed == []
    model = Net(layers=2)
    mo = ModelOptimizer(model, {"gpu": {"checkpointing": True, "checkpoint_interval": 3}})
    (on,) = mo.checkpointed
    assert segments(on)[0] == ("stem.0", "stem.1", "stem.2") and segments(on)[-1] == ("blocks.1",)
    on.remove()
    assert "forward" not in model.stem.__dict__
    with pytest.raises(ConfigError, match=r"memory\.checkpointing: the model has no"):
        ModelOptimizer(nn.Linear(2, 2), {"gpu": {"checkpointing": True}})


class Ramp(nn.Module):
    """A buffer steers the forward pass: written in place, replaced, or a number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "replaced":
            self.n = self.n + 1
        else:
            self.n += 1
        out: Tensor = self.layer(x) * (self.n.item() if self.how == "number" else self.n.clone())
        return out


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("how", ["in place", "replaced", "number", "spectral", "mode"])
@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
def test_the_second_run_begins_with_the_buffers_of_the_first(kind: Any, how: str, every: int) -> None:
    """Also where a module is called several times, and where its mode changes before the backward pass."""

    def make() -> nn.Module:
        _seed(0)
        made: dict[str, Callable[[], nn.Module]] = {
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "mode": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        }
        layers = [made.get(how, lambda: Ramp(how))() for _ in range(3)]
        return kind(layers) if kind is nn.ModuleList else kind(*layers)

    def gradients(model: nn.Module) -> list[Tensor]:
        _seed(1)
        total = torch.zeros(())
        for x in torch.randn(3, 5, 4):
            for layer in model.children() if kind is nn.ModuleList else [model]:
                x = layer(x)
            total = total + x.square().mean()
        model.eval()
        total.backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    plain, model = make(), make()
    Checkpointed(model, every)
    for a, b in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(a, b)


def test_layers_may_change_afterwards() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    on = Checkpointed(model, 2)
    model[1] = nn.Identity()
    model.append(nn.Linear(2, 7))
    plain = nn.Sequential(*model.children())
    x = torch.ones(1, 2)
    assert model(x).shape == (1, 7) and torch.equal(model(x), plain(x))
    assert segments(on) == [("0", "1"), ("2", "3"), ("4",)]
    del model[0]
    assert torch.equal(model(x), nn.Sequential(*model.children())(x)) and segments(on)[-1] == ("2", "3")
    on.remove()
    assert "forward" not in model.__dict__


def test_the_layers_of_a_list_may_change_afterwards() -> None:
    model = Net(layers=2)
    on = Checkpointed(model, 4)
    model.blocks[0] = Block(8)
    model.blocks.append(Block(8))
    assert [s for s in segments(on) if s[0].startswith("blocks")] == [("blocks.1",)]
    model(torch.randn(4, 8)).sum().backward()
    assert [block.calls for block in model.blocks] == [1, 2, 1]
