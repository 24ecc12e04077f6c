"""What doesn't fit is refused before anything is changed, by the names of both; what fits goes on bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, PipeError, StageError

NAMES = ("sgd", "rmsprop", "adam", "adamw", "adafactor", "lamb", "lion")
X = torch.randn(8, 5, generator=torch.Generator().manual_seed(3))


def _net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7) if norm else nn.Tanh(), nn.Linear(7, 3))


def _train(mo: ModelOptimizer, steps: int) -> None:
    for _ in range(steps):
        mo.step(mo.model(X).square().mean())


def _everything(mo: ModelOptimizer) -> dict[str, Any]:
    lane = mo.lanes[""]
    out: dict[str, Any] = {n: t.clone() for n, t in lane.model.state_dict().items()} | {"step": mo.global_step}
    out |= {f"ema {n}": t for n, t in mo.export().items()}
    out |= {
        f"grad {n}": None if p.grad is None else p.grad.clone() for n, p in zip(lane.names, lane.stepped, strict=True)
    }
    states = lane.optimizer.state_dict()["state"]
    out |= {f"{p} {k}": v.clone() if torch.is_tensor(v) else v for p, s in states.items() for k, v in s.items()}
    return out | {"window": (lane.window.micro, lane.window.weight), "draw": torch.get_rng_state()}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, Tensor) else v == b[k] for k, v in a.items()
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> dict[str, Path]:
    out = {}
    for name in NAMES:
        mo = ModelOptimizer(_net(), {"optimizer": {"name": name}})
        _train(mo, 2)
        out[name] = mo.save_ckpt(tmp_path_factory.mktemp("saved") / f"{name}.safetensors")
    return out


@pytest.mark.filterwarnings("ignore:resuming with another configuration")
@pytest.mark.parametrize(("old", "new"), list(zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True)))
def test_another_optimizer_is_refused_by_the_names_of_both(old: str, new: str, written: dict[str, Path]) -> None:
    mo = ModelOptimizer(_net(), {"optimizer": {"name": new}})
    before = _everything(mo)
    with pytest.raises(StageError, match=f"written with {old}; the optimizer here is {new}\n"):
        mo.load_ckpt(written[old])
    assert _same(before, _everything(mo))


@pytest.mark.filterwarnings("ignore:resuming with another configuration")
def test_custom_optimizers_are_told_apart(written: dict[str, Path], tmp_path: Path) -> None:
    def own(make: Any) -> ModelOptimizer:
        model = _net()
        return ModelOptimizer(model, {}, optimizer=make(model.parameters(), lr=0.1))

    path = own(torch.optim.NAdam).save_ckpt(tmp_path / "a.safetensors")
    with pytest.raises(StageError, match=r"custom optimizer NAdam; the optimizer here is the custom optimizer RAdam"):
        own(torch.optim.RAdam).load_ckpt(path)
    with pytest.raises(StageError, match="the custom optimizer NAdam; the optimizer here is adamw"):
        ModelOptimizer(_net(), {}).load_ckpt(path)
    with pytest.raises(StageError, match="written with adam; the optimizer here is the custom optimizer Adam"):
        own(torch.optim.Adam).load_ckpt(written["adam"])
    model = _net()
    grouped = torch.optim.NAdam([{"params": [p]} for p in model.parameters()], lr=0.1)
    mo = ModelOptimizer(model, {}, optimizer=grouped)
    before = _everything(mo)
    with pytest.raises(StageError, match=r"groups have \[4\] parameters in the checkpoint, here \[1, 1, 1, 1\]"):
        mo.load_ckpt(path)
    assert _same(before, _everything(mo))


@pytest.mark.filterwarnings("ignore:resuming with another configuration")
def test_momentum_that_begins_later(written: dict[str, Path]) -> None:
    """sgd's buffer begins with the next gradient, as in torch; rmsprop has no such beginning."""
    mo = ModelOptimizer(_net(), {"optimizer": {"name": "sgd", "momentum": 0.9}})
    with pytest.warns(UserWarning, match=r"optimizer\.momentum was None, is 0\.9"):
        mo.load_ckpt(written["sgd"])
    _train(mo, 1)
    mo = ModelOptimizer(_net(), {"optimizer": {"name": "rmsprop", "momentum": 0.9}})
    with pytest.raises(StageError, match="written without momentum"):
        mo.load_ckpt(written["rmsprop"])


class Picky:
    """Takes no state but its own."""

    def __init__(self, kind: str = "a") -> None:
        self.kind, self.seen = kind, [1]

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        if state["kind"] != self.kind:
            raise ValueError("another kind")


@pytest.mark.parametrize("what", ["frozen", "shape", "name", "extra", "damaged part"])
def test_a_load_that_fails_changes_nothing(what: str, tmp_path: Path) -> None:
    config = {"training": {"ema_decay": 0.9, "accumulate_steps": 2}}
    saved = ModelOptimizer(_net(norm=True), config)
    good, bad = Picky(), Picky("b" if what == "extra" else "a")
    good.seen = [2]
    saved.register("good", good)
    saved.register("bad", bad)
    _train(saved, 5)
    path = saved.save_ckpt(tmp_path / "a.safetensors")
    model = _net(norm=True)
    if what == "frozen":
        model[0].requires_grad_(False)
    elif what == "shape":
        model[2] = nn.Linear(7, 4)
    elif what == "name":
        model.append(nn.Linear(3, 3))
    mo = ModelOptimizer(model, config)
    extras = [Picky(), Picky()]
    mo.register("good", extras[0])
    mo.register("bad", extras[1])
    _train(mo, 3)
    if what == "damaged part":
        from layerline.training.state import safetensors_io

        tensors, meta = safetensors_io.load(path)
        del meta["lanes"][""]["window"]
        safetensors_io.save(path, {n: t.clone() for n, t in tensors.items()}, meta)
    before = _everything(mo)
    with pytest.raises((PipeError, ValueError)):
        mo.load_ckpt(path)
    assert _same(before, _everything(mo)) and [e.seen for e in extras] == [[1], [1]]
    _train(mo, 3)


class Branches(nn.Module):
    """Gains a branch on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out + self.b(x) if hasattr(self, "b") else out


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_joined_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The late ones have taken fewer steps than those a fresh optimizer has in one group with them."""
    config = {"optimizer": {"name": name, "lr": 0.01, "weight_decay": 0.1}, "training": {"ema_decay": 0.9},
              "scheduler": {"name": "cosine", "total_steps": 12}}  # fmt: skip
    torch.manual_seed(0)
    mo = ModelOptimizer(Branches(), config)
    _train(mo, 4)
    mo.lanes[""].model.b = nn.Linear(5, 3)
    mo.join()
    _train(mo, 2)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    _train(mo, 4)
    model = Branches()
    model.b = nn.Linear(5, 3)
    again = ModelOptimizer(model, config)
    again.load_ckpt(path)
    second = again.save_ckpt(tmp_path / "b.safetensors")
    _train(again, 4)
    third = ModelOptimizer(model, config)
    third.load_ckpt(second)
    _train(third, 4)
    for each in (again, third):
        assert all(torch.equal(t, each.export()[n]) for n, t in mo.export().items())
        rates = [{g["lr"] for g in e.lanes[""].optimizer.param_groups} for e in (mo, each)]
        assert rates[0] == rates[1]


class Plain:
    """A custom optimizer that says nothing of its state."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                p -= 0.1 * p.grad

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


def test_an_optimizer_without_a_state_is_told_of_at_save_and_load(tmp_path: Path) -> None:
    def make() -> ModelOptimizer:
        model = _net()
        return ModelOptimizer(model, {}, optimizer=Plain(model))

    mo, again = make(), make()
    with pytest.warns(UserWarning, match=r"Plain has no state_dict\(\)"):
        path = mo.save_ckpt(tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="Plain begins without the state it had"):
        again.load_ckpt(path)
    assert "not in the checkpoint" in mo.warnings[0] and "begins without" in again.warnings[0]


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.CKPT", "x.bin", "deep/x.pt"])
def test_a_file_of_another_kind_is_no_folder(name: str, tmp_path: Path) -> None:
    mo = ModelOptimizer(_net(), {})
    with pytest.raises(ConfigError, match=r"a checkpoint is a \.safetensors file") as caught:
        mo.save_ckpt(tmp_path / name)
    assert caught.value.hint.endswith("x.safetensors") and not list(tmp_path.iterdir())


def test_folders_with_a_dot_and_files_in_the_way(tmp_path: Path) -> None:
    mo = ModelOptimizer(_net(), {})
    assert mo.save_ckpt(tmp_path / "run.v2").parent.name == "run.v2"
    (tmp_path / "x.pt").mkdir()
    assert mo.save_ckpt(tmp_path / "x.pt").parent.name == "x.pt"
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="a checkpoint is"):
        mo.save_ckpt(tmp_path / "taken")


def test_nothing_is_warned_of_where_all_fits(tmp_path: Path) -> None:
    mo = ModelOptimizer(_net(norm=True), {})
    _train(mo, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mo.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    assert not mo.warnings
