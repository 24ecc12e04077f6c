"""Wrong fields of the stages themselves, told with line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerline.pipeline.config.project import load
from layerline.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("stage", "text", "told"),
    [
        ("export", "tolerance: 0.1", "export.tolerance: expected 'auto' or the fields rtol, atol, saw 0.1"),
        ("export", "tolerance: loose", "export.tolerance: expected 'auto' or the fields rtol, atol, saw 'loose'"),
        ("export", "tolerance: {rtol: x}", "export.tolerance.rtol: expected a number, saw 'x'"),
        ("export", "tolerance: {rtol: true}", "export.tolerance.rtol: expected a number, saw True"),
        ("export", "dynamic: {x: {0: 5}}", "export.dynamic.x.0: expected the fields name, min, max, multiple, saw 5"),
        (
            "engine",
            "profiles: [{n: {min: 1, opt: a, max: 3}}]",
            "engine.profiles.0.n.opt: expected an integer, saw 'a'",
        ),
        ("engine", "profiles: [{n: 4}]", "engine.profiles.0.n: expected the fields min, opt, max, saw 4"),
        ("engine", "profiles: [{n: [3, 2, 4]}]", "engine.profiles.0.n: expected min <= opt <= max, saw [3, 2, 4]"),
        (
            "engine",
            "profiles: [{x: [[1, 4], [2, 3], [4, 3]]}]",
            "engine.profiles.0.x: expected an integer, saw [1, 4]",
        ),
        ("quantize", "max_drop: true", "quantize.max_drop: expected a number, saw True"),
        (
            "quantize",
            "max_drop: {a: {}}",
            "quantize.max_drop.a: expected either drop (more is better) or rise (less is better), saw {}",
        ),
        (
            "quantize",
            "max_drop: {a: x}",
            "quantize.max_drop.a: expected a finite number that is at least 0, or a percentage such as 0.5%, saw 'x'",
        ),
        ("train", "optimizer: {groups: [{lr: 1}]}", "train.optimizer.groups.0.match: it is required, and missing"),
        ("quantize", "min_db: .nan", "quantize.min_db: expected a finite number, saw nan"),
        ("engine", "tolerance: .inf", "engine.tolerance: expected a finite number, saw inf"),
        ("train", "epochs: true", "train.epochs: expected an integer, saw True"),
    ],
)
def test_with_line_and_field(stage: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text(f"{stage}:\n  {text}\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith("pipe.yaml:2:")
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("train.lr=1", "train.optimizer.lr or train.swa.lr or quantize.qat.lr"),
        ("train.max_norm=1", "train.clip.max_norm or train.optimizer.grad_clip.max_norm"),
        ("train.calibrator=mse", "quantize.calibrator"),
        ("calibrator=mse", "quantize.calibrator"),
        ("calibratr=mse", "quantize.calibrator"),
        ("quantize.lr=1", "quantize.qat.lr or train.optimizer.lr or train.swa.lr"),
        ("optimizer.lr=1", "train.optimizer"),
        ("ema_decay=1", "quantize.qat.ema_decay or train.training.ema_decay"),
        ("profiles=[]", "engine.profiles"),
    ],
)
def test_a_field_at_another_place_is_told(text: str, meant: str, tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, [text])
    assert caught.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize("text", ["train: {1.5: 2}", "train: {true: 1}", "train: {null: 1}", "train: {[a]: 1}"])
def test_a_field_whose_name_is_no_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"pipe.yaml:1:1: train.*(unknown field|no such field)"):
        load(tmp_path)
