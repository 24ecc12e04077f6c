"""Which weights go, worked out by hand; that they stay away in all that moves at a step; that it survives a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import Config
from layerline.training.loop.mask_choice import Gradual, channels, configured, cubic, magnitude, two_of_four
from layerline.training.loop.masks import Masks
from layerline.training.loop.step_engine import Lane
from tests.training.zeros import share_of_zeros


def _linear(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(len(rows[0]), len(rows))
    layer.weight.data = torch.tensor(rows)
    layer.bias.data = torch.ones(len(rows))
    return layer


def test_magnitude_by_hand() -> None:
    model = nn.Sequential(_linear([1.0, -4.0], [-3.0, 2.0]), nn.BatchNorm1d(2), _linear([0.1, -0.5], [0.2, 10.0]))
    per_layer = magnitude(model, 0.5)
    assert per_layer.keys() == {"0.weight", "2.weight"}  # no bias, no norm
    assert per_layer["0.weight"].tolist() == [[False, True], [True, False]]
    assert per_layer["2.weight"].tolist() == [[False, True], [False, True]]
    overall = magnitude(model, 0.5, scope="global")  # the four smallest of 0.1 0.2 0.5 1 2 3 4 10
    assert overall["0.weight"].tolist() == [[False, True], [True, True]]
    assert overall["2.weight"].tolist() == [[False, False], [False, True]]


def test_globally_each_layer_keeps_its_largest_weight() -> None:
    model = nn.Sequential(_linear([1e-3, 2e-3]), _linear([5.0], [6.0]))
    masks = magnitude(model, 1.0, scope="global")
    assert masks["0.weight"].tolist() == [[False, True]] and masks["1.weight"].tolist() == [[False], [True]]
    assert not magnitude(model, 1.0)["0.weight"].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -3.5]), min_size=1, max_size=40), st.floats(0, 1))
def test_exactly_the_asked_share_goes_and_nothing_that_goes_is_larger(values: list[float], sparsity: float) -> None:
    layer = _linear(values)
    mask, weights = magnitude(layer, sparsity)["weight"][0], layer.weight.detach()[0].abs()
    assert int((~mask).sum()) == round(sparsity * len(values))
    if mask.any() and not mask.all():
        assert weights[~mask].max() <= weights[mask].min()


def test_channels_by_hand() -> None:
    masks = channels(_linear([3.0, 4.0], [6.0, 0.0], [1.0, 1.0]), 1 / 3)
    assert masks["weight"].tolist() == [[True, True], [True, True], [False, False]]
    assert masks["bias"].tolist() == [True, True, False]
    assert channels(_linear([3.0, 4.0], [6.0, 0.0]), 1.0)["bias"].tolist() == [False, True]  # one stays


@pytest.mark.parametrize("kind", ["conv", "grouped", "transposed", "transposed grouped", "1d", "transposed 3d"])
def test_a_dropped_channel_gives_exactly_zero_and_the_others_what_they_gave(kind: str) -> None:
    torch.manual_seed(0)
    layer, size = {
        "conv": (nn.Conv2d(4, 6, 3), 2), "grouped": (nn.Conv2d(4, 6, 3, groups=2), 2),
        "transposed": (nn.ConvTranspose2d(4, 6, 3), 2),
        "transposed grouped": (nn.ConvTranspose2d(4, 6, 3, groups=2), 2),
        "1d": (nn.Conv1d(4, 6, 3), 1), "transposed 3d": (nn.ConvTranspose3d(4, 6, 2, groups=2), 3),
    }[kind]  # fmt: skip
    x = torch.randn(2, 4, *[5] * size)
    expected = layer(x)
    # The two channels whose own weights are made small must be the ones that go.
    small = [1, 4]
    grad = torch.autograd.grad(expected[:, small].sum(), layer.weight)[0] != 0
    with torch.no_grad():
        layer.weight[grad] *= 1e-3
    expected = layer(x)
    masks = channels(layer, 1 / 3)
    with torch.no_grad():
        layer.weight *= masks["weight"]
        layer.bias *= masks["bias"]
    assert masks["bias"].tolist() == [i not in small for i in range(6)]
    seen = layer(x)
    assert not seen[:, small].any()
    rest = [i for i in range(6) if i not in small]
    assert torch.equal(seen[:, rest], expected[:, rest])


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0), (10, 0), (15, 0.8 - 0.8 * 0.5**3), (20, 0.8), (99, 0.8), (11, 0.8 - 0.8 * 0.9**3)],
)
def test_cubic_by_hand(step: int, expected: float) -> None:
    assert cubic(step, begin=10, end=20, final=0.8) == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 50), st.integers(1, 50), st.floats(0, 0.99))
def test_cubic_never_falls(begin: int, length: int, final: float) -> None:
    shares = [cubic(t, begin=begin, end=begin + length, final=final) for t in range(begin + length + 2)]
    assert shares == sorted(shares) and shares[0] == pytest.approx(0) and shares[-1] == final


def _lane(**sections: Any) -> tuple[nn.Module, Lane]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    if sections.pop("half", False):
        model.half()
    return model, Lane(model, Config.model_validate({"optimizer": {"name": "adamw", "lr": 0.1}, **sections}))


def _loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 24).view(4, 6).to(next(model.parameters()).dtype)
    return (model(x).float() - 1).square().mean()


@pytest.mark.parametrize("sections", [{}, {"ema": {"decay": 0.9}}, {"half": True, "ema": {"decay": 0.9}}])
def test_masked_weights_stay_zero_in_weights_masters_and_average(sections: dict[str, Any]) -> None:
    model, lane = _lane(**sections)
    lane.masks = Masks(lane, masks := magnitude(model, 0.5))
    for _ in range(5):
        assert lane.step(_loss(model))
        for name, mask in masks.items():
            index = lane.names.index(name)
            held = [lane.params[index], lane.stepped[index]]
            held += [lane.ema.shadow[lane.ema.names.index(name)]] if lane.ema else []
            assert all(not h[~mask].any() and h[mask].all() for h in held)
    assert share_of_zeros(lane.masks.masks) == 0.5


def test_a_rejected_step_leaves_a_growing_mask_alone() -> None:
    model, lane = _lane(nonfinite={"policy": "skip"})
    lane.masks = pruner = Masks(lane, Gradual(final=0.5, begin=0, end=10, every=1))
    lane.step(_loss(model))
    before = share_of_zeros(pruner.masks)
    assert before == pytest.approx(round(0.5 * (1 - 0.9**3) * 48) / 64 + round(0.5 * (1 - 0.9**3) * 16) / 64)
    lane.step(_loss(model) * float("nan"))
    assert share_of_zeros(pruner.masks) == before


@pytest.mark.parametrize("method", ["layer", "global", "channels"])
def test_gradual_masks_grow_on_their_steps_only_and_never_give_back(method: Any) -> None:
    model, lane = _lane()
    lane.masks = pruner = Masks(lane, Gradual(final=0.5, begin=2, end=9, every=3, method=method))
    seen: list[float] = []
    gone = torch.zeros(0)
    for _ in range(11):
        lane.step(_loss(model))
        seen.append(share_of_zeros(pruner.masks))
        now = torch.cat([p.detach().flatten() == 0 for n, p in model.named_parameters() if n.endswith("weight")])
        assert not len(gone) or bool((now | ~gone).all())
        gone = now
    assert seen == sorted(seen) and seen[0] == 0.0 and seen[-1] == 0.5
    changes = [i + 1 for i in range(11) if seen[i] != (seen[i - 1] if i else 0.0)]
    assert set(changes) <= {2, 5, 8, 9}


def _resumable(path: Path, steps: int, *, load: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    mo = ModelOptimizer(model, {"optimizer": {"lr": 0.1}, "training": {"ema_decay": 0.9}})
    if load:
        mo.load_ckpt(path)
    else:
        mo.apply_mask(Gradual(final=0.5, begin=1, end=8, every=2))
    for _ in range(steps):
        mo.step(_loss(model))
    mo.save_ckpt(path)
    return mo.export()


def test_masks_and_their_schedule_are_in_the_checkpoint(tmp_path: Path) -> None:
    straight = _resumable(tmp_path / "a.safetensors", 10, load=False)
    _resumable(tmp_path / "b.safetensors", 5, load=False)
    resumed = _resumable(tmp_path / "b.safetensors", 5, load=True)
    assert all(torch.equal(t, resumed[n]) for n, t in straight.items())
    assert int((straight["0.weight"] == 0).sum()) == 24


def test_apply_mask_zeroes_at_once_and_takes_the_name_of_a_tied_weight() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    mo = ModelOptimizer(model, {})
    mo.apply_mask({"1.weight": torch.eye(3)})
    assert torch.equal(model[0].weight, torch.eye(3) * model[0].weight) and int((model[0].weight == 0).sum()) == 6


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"0.wieght": torch.ones(8, 6)}, r"0\.wieght: no parameter"),
        ({"0.weight": torch.ones(6, 8)}, r"0\.weight: the mask is \(6, 8\), the parameter \(8, 6\)"),
        ({"0.weight": torch.full((8, 6), 0.5)}, r"0\.weight: a mask holds 0 and 1 only"),
        ({"0.weight": torch.full((8, 6), float("nan"))}, r"0\.weight: a mask holds 0 and 1 only"),
    ],
)
def test_wrong_masks_are_named(masks: dict[str, Tensor], message: str) -> None:
    _, lane = _lane()
    with pytest.raises(ConfigError, match=message):
        Masks(lane, masks)


def test_wrong_questions() -> None:
    with pytest.raises(ConfigError, match=r"sparsity of 1\.5"):
        magnitude(nn.Linear(2, 2), 1.5)
    with pytest.raises(ConfigError, match="no Linear or convolution"):
        magnitude(nn.LayerNorm(3), 0.5)
    with pytest.raises(ConfigError, match="begins at 5, ends at 5"):
        Gradual(final=0.5, begin=5, end=5)
    with pytest.raises(ConfigError, match=r"grows to 1\.5"):
        Gradual(final=1.5, begin=0, end=5)
    bad = nn.Linear(2, 2)
    bad.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"weight: a weight that is not finite"):
        channels(bad, 0.5)


def test_masks_add_up_unless_they_replace() -> None:
    model = nn.Linear(4, 4)
    mo = ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.1}, "training": {"ema_decay": 0.5}})
    rows, columns = torch.ones(4, 4), torch.ones(4, 4)
    rows[0], columns[:, 1] = 0, 0
    both = (rows * columns).bool()

    def step() -> Tensor:
        mo.step((model(torch.randn(8, 4)) - 1).square().mean())
        return model.weight.detach() != 0

    mo.apply_mask({"weight": rows})
    mo.apply_mask({"weight": columns, "bias": torch.tensor([1, 0, 1, 1])})
    assert torch.equal(step(), both) and torch.equal(mo.export()["weight"] != 0, both) and model.bias[1] == 0
    mo.apply_mask(Gradual(final=0.75, begin=0, end=2, every=1))
    step()
    kept = step()
    assert int(kept.sum()) == 4 and not (kept & ~both).any() and model.bias[1] == 0
    mo.apply_mask({"weight": columns}, replace=True)
    assert torch.equal(step(), columns.bool()) and model.bias[1] != 0
    mo.apply_mask({}, replace=True)
    assert step().all()


def test_a_wrong_mask_changes_nothing() -> None:
    mo = ModelOptimizer(model := nn.Linear(4, 4), {})
    mo.apply_mask({"weight": torch.eye(4)})
    for replace in (True, False):
        with pytest.raises(ConfigError):
            mo.apply_mask({"weight": 1 - torch.eye(4), "nothing": torch.ones(1)}, replace=replace)
    assert torch.equal(model.weight != 0, torch.eye(4).bool())
    mo.step(model(torch.randn(8, 4)).square().sum())
    assert torch.equal(model.weight != 0, torch.eye(4).bool())


@pytest.mark.parametrize(("asked", "zeros"), [(0, 0), (3, 0), (10, 8), (20, 8)])
def test_a_schedule_that_has_begun_is_taken_up_where_it_would_be(asked: int, zeros: int, tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, ModelOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return model, ModelOptimizer(model, {"optimizer": {"name": "sgd", "lr": 0.01}})

    def train(pair: tuple[nn.Linear, ModelOptimizer], steps: int) -> Tensor:
        model, mo = pair
        for _ in range(steps):
            mo.step(model(torch.randn(8, 4, generator=torch.Generator().manual_seed(mo.global_step))).square().mean())
        return (model.weight == 0).sum()

    pair = make()
    train(pair, asked)
    pair[1].apply_mask(Gradual(final=0.5, begin=0, end=10, every=5))
    assert int((pair[0].weight == 0).sum()) == zeros
    again = make()
    again[1].load_ckpt(pair[1].save_ckpt(tmp_path / "a.safetensors"))
    assert train(pair, 10) == train(again, 10) == 8
    assert torch.equal(pair[0].weight, again[0].weight)


@pytest.mark.parametrize("masters", [True, False])
def test_masks_inside_the_average_hold_in_the_weights(masters: bool) -> None:
    model = nn.Linear(4, 4).half()
    config = {"training": {"ema_decay": 0.5}, "precision": {"master_weights": masters}, "optimizer": {"name": "sgd"}}
    mo = ModelOptimizer(model, config)
    mo.step(model(torch.randn(8, 4).half()).float().square().mean())
    with mo.ema():
        mo.apply_mask({"weight": torch.eye(4)})
        assert torch.equal(model.weight != 0, torch.eye(4).bool())
    assert torch.equal(model.weight != 0, torch.eye(4).bool())
    assert torch.equal(mo.export()["weight"] != 0, torch.eye(4).bool())


def test_two_of_four_by_hand() -> None:
    masks = two_of_four(_linear([1.0, -4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]))
    # Of equal weights the first two stay.
    assert masks["weight"].tolist() == [[False, True, True, False, True, True, False, False]]
    conv = nn.Conv2d(4, 2, 2)
    mask = two_of_four(conv)["weight"]
    assert mask.shape == conv.weight.shape and (mask.sum(1) == 2).all()  # at each place of the kernel
    kept, lost = conv.weight.detach().abs()[mask], conv.weight.detach().abs()[~mask]
    assert kept.sum() > lost.sum()
    assert two_of_four(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ConvTranspose2d(4, 4, 1))) == {}


def test_channels_take_the_norm_behind_along() -> None:
    model = nn.Sequential(_linear([3.0, 4.0], [1.0, 1.0]), nn.BatchNorm1d(2), nn.ReLU(), _linear([1.0, 2.0]))
    masks = channels(model, 0.5, skip=["3.*"], norms=True)
    assert {n: m.tolist() for n, m in masks.items()} == {
        "0.weight": [[True, True], [False, False]], "0.bias": [True, False],
        "1.weight": [True, False], "1.bias": [True, False],
    }  # fmt: skip


def test_the_section_pruning_masks_from_start_to_end() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    config = {"pruning": {"method": "channels", "share": 0.5, "start_step": 1, "every": 1},
              "scheduler": {"total_steps": 8}, "optimizer": {"lr": 0.01}}  # fmt: skip
    mo = ModelOptimizer(model, config)
    zeros = []
    for _ in range(5):
        mo.step(model(torch.randn(4, 8)).square().mean())
        zeros.append(int((model[0].weight == 0).all(1).sum()))
    # From step 1 to half-way, 4: 0.5 (1 - (2/3)^3) and 0.5 (1 - (1/3)^3) of 8 channels.
    assert zeros == [0, 3, 4, 4, 4]
    assert not (model[1].weight == 0).all(1).any()  # the model's outputs stay


@pytest.mark.parametrize(
    ("pruning", "said"),
    [({"share": 0.5}, "share needs method"), ({"method": "2:4", "share": 0.7}, "2:4 has a share"),
     ({"method": "magnitude", "start_step": 5, "end_step": 5}, "end_step lies after"),
     ({"method": "magnitude"}, "length of the run")],
)  # fmt: skip
def test_what_pruning_can_not_mean(pruning: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelOptimizer(nn.Linear(4, 4), {"pruning": pruning})


def test_two_of_four_is_chosen_once() -> None:
    gradual = configured(nn.Linear(4, 4), Config.model_validate({"pruning": {"method": "2:4", "start_step": 3}}))
    assert gradual is not None and (gradual.begin, gradual.end, gradual.method) == (3, 4, "2:4")


@pytest.mark.parametrize("how", ["state dict", "checkpoint"])
def test_masks_are_chosen_from_the_weights_that_are_loaded_before_the_first_step(how: str, tmp_path: Path) -> None:
    def model() -> nn.Linear:
        return _linear([4.0, 3.0, 2.0, 1.0])

    loaded = {"weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "bias": torch.zeros(1)}
    net = model()
    config = {"pruning": {"method": "2:4"}, "scheduler": {"total_steps": 10}}
    mo = ModelOptimizer(net, {**config, "training": {"ema_decay": 0.5}})
    mo.apply_mask({"weight": torch.tensor([[1, 1, 1, 0]])})
    if how == "state dict":
        net.load_state_dict(loaded)
    else:
        other = model()
        plain = ModelOptimizer(other, {"training": {"ema_decay": 0.5}, "scheduler": {"total_steps": 10}})
        other.load_state_dict(loaded)
        plain.save_ckpt(tmp_path / "a.safetensors")
        with pytest.warns(UserWarning, match="pruning"):
            mo.load_ckpt(tmp_path / "a.safetensors")
    # The given mask holds first: the two largest of what it leaves stay.
    assert net.weight.tolist() == [[0.0, 2.0, 3.0, 0.0]]
    assert mo.export()["weight"].tolist() == [[0.0, 2.0, 3.0, 0.0]]


def test_masks_of_the_first_weights_leave_a_checkpoints_weights_alone(tmp_path: Path) -> None:
    config = {"pruning": {"method": "2:4"}, "scheduler": {"total_steps": 10}}
    first = ModelOptimizer(net := _linear([1.0, 2.0, 3.0, 4.0]), config)
    first.step(net(torch.ones(1, 4)).sum())
    first.save_ckpt(tmp_path / "a.safetensors")
    second = ModelOptimizer(other := _linear([4.0, 3.0, 2.0, 1.0]), config)
    second.load_ckpt(tmp_path / "a.safetensors")
    assert torch.equal(net.weight, other.weight) and other.weight[0, 2:].all()
