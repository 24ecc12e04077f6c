"""Which modules train() reaches: what was handed over in eval mode on purpose stays in it."""

from __future__ import annotations

from torch import nn

from layerline.training.run.shipping import train_mode


def _net() -> nn.Sequential:
    backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return nn.Sequential(backbone, nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_part_in_eval_mode_keeps_it_where_the_model_trains() -> None:
    net = _net()
    net[0].eval()
    assert train_mode(net) == []
    assert not any(m.training for m in net[0].modules())
    assert net.training and net[1].training and net[2].training


def test_a_single_norm_in_eval_mode_keeps_it() -> None:
    net = _net()
    net[0][1].eval()
    train_mode(net)
    assert not net[0][1].training
    assert net[0].training and net[0][2].training


def test_a_model_in_eval_mode_trains_with_a_warning_and_frozen_parts_stay() -> None:
    net = _net().eval()
    net[0].requires_grad_(False)
    (warning,) = train_mode(net)
    assert "eval mode" in warning and "0" in warning
    assert not any(m.training for m in net[0].modules())
    assert net.training and net[1].training


def test_a_whole_model_in_eval_mode_without_frozen_parts() -> None:
    net = _net().eval()
    (warning,) = train_mode(net)
    assert "frozen" not in warning
    assert all(m.training for m in net.modules())
