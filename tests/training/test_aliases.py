"""Both shapes that people write load as they are and mean the same; mistakes name the field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerline.pipeline.errors import ConfigError
from layerline.training.config import aliases
from layerline.training.config.sections import Config, EmaConfig, OptimizerConfig

ONE: dict[str, Any] = {
    "optimizer": {
        "name": "adamw", "lr": "2e-3", "betas": [0.9, 0.95], "eps": "1e-8", "weight_decay": 0.01,
        "grad_clip": {"max_norm": 1.0},
    },
    "scheduler": {"name": "cosine", "warmup_ratio": 0.03, "min_lr_ratio": 0.1, "total_steps": 1000},
    "training": {
        "grad_clip_norm": 1.0, "ema_decay": 0.999, "ema_start_step": 100, "mixed_precision": True,
        "accumulate_steps": 4,
        "log_interval": 50, "save_interval": 500, "valid_interval": 250,
    },
}  # fmt: skip
TWO: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01,
                  "grad_clip": {"max_norm": "1.0"}},
    "scheduler": {"name": "cosine_with_warmup", "warmup_ratio": 0.03, "min_lr": 2e-4, "min_lr_ratio": 0.1,
                  "total_steps": 1000},
    "training": {"ema_decay": 0.999, "ema_start_step": 100, "log_interval": 50, "save_interval": 500,
                 "valid_interval": 250},
    "precision": {"amp": True},
    "gpu": {"gradient_accumulation_steps": 4},
}  # fmt: skip


def test_both_shapes_mean_the_same() -> None:
    one, two = aliases.load(ONE), aliases.load(TWO)
    assert one.replace(scheduler={"min_lr": None}) == two.replace(scheduler={"min_lr": None})
    assert one.optimizer.lr == 2e-3
    assert one.clip.max_norm == 1.0
    assert one.precision.amp == "fp16"
    assert one.accumulate.steps == 4
    assert one.ema == EmaConfig(decay=0.999, start_step=100)


def test_the_second_shape_in_full() -> None:
    config = aliases.load({
        "optimizer": {"name": "lamb", "lr": 1e-3},
        "scheduler": {"name": "cosine_with_warmup", "warmup_ratio": 0.1, "total_steps": 10},
        "precision": {"amp": True, "master_weights": True, "loss_scale": 1024, "dynamic_loss_scale_window": 500,
                      "min_loss_scale": 2},
        "gpu": {"gradient_accumulation_steps": 2, "checkpointing": True, "checkpoint_interval": 3},
        "distributed": {"backend": "gloo", "gradient_bucket_size_mb": 10, "overlap_communication": True},
    })  # fmt: skip
    assert config.memory.checkpointing and config.memory.checkpoint_interval == 3
    assert (config.distributed.backend, config.distributed.bucket_mb, config.distributed.overlap) == ("gloo", 10, True)
    assert (config.precision.loss_scale, config.precision.dynamic_loss_scale_window) == (1024.0, 500)
    assert config.precision.min_loss_scale == 2.0


@pytest.mark.parametrize("text", ["2e-3", "2.0e-3", "0.002", ".002", "2E-3"])
def test_a_rate_in_yaml_is_a_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"optimizer: {{name: adamw, lr: {text}}}\n# an empty section\ntraining:\n")
    assert aliases.load(path).optimizer.lr == 0.002
    assert aliases.load(str(path)) == Config(optimizer=OptimizerConfig(name="adamw", lr=0.002))


def test_a_typed_object_is_taken_as_it_is() -> None:
    config = Config(optimizer=OptimizerConfig(name="lion", lr=1e-4))
    assert aliases.load(config) is config
    assert aliases.load({"optimizer": OptimizerConfig(name="lion", lr=1e-4)}) == config


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ({"optimizer": {"grad_clip": {"max_norm": 1.0}}, "training": {"grad_clip_norm": 0.5}},
         ("optimizer.grad_clip.max_norm", "training.grad_clip_norm")),
        ({"training": {"accumulate_steps": 4}, "gpu": {"gradient_accumulation_steps": 8}},
         ("training.accumulate_steps", "gpu.gradient_accumulation_steps")),
        ({"training": {"mixed_precision": "bf16"}, "precision": {"amp": True}},
         ("training.mixed_precision", "precision.amp")),
        ({"training": {"mixed_precision": False}, "precision": {"amp": True}},
         ("training.mixed_precision", "precision.amp")),
        ({"scheduler": {"warmup_ratio": 0.1, "warmup_steps": 50, "total_steps": 1000}},
         ("scheduler.warmup_ratio", "scheduler.warmup_steps")),
        ({"optimizer": {"lr": 1e-3}, "scheduler": {"min_lr": 1e-5, "min_lr_ratio": 0.1}},
         ("scheduler.min_lr", "scheduler.min_lr_ratio")),
        ({"distributed": {"gradient_bucket_size_mb": 10, "bucket_mb": 25}},
         ("distributed.gradient_bucket_size_mb", "distributed.bucket_mb")),
        ({"training": {"ema_decay": 0.99}, "ema": {"decay": 0.9}}, ("training.ema_decay", "ema.decay")),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_fields(written: dict[str, Any], fields: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        aliases.load(written)
    assert all(field in str(caught.value) for field in fields)


@pytest.mark.parametrize(
    "written",
    [
        {"training": {"accumulate_steps": 4}, "gpu": {"gradient_accumulation_steps": "4"}},
        {"training": {"mixed_precision": "fp16"}, "precision": {"amp": True}},
        {"scheduler": {"warmup_ratio": 0.05, "warmup_steps": 50, "total_steps": 1000}},
        {"optimizer": {"lr": "1e-3"}, "scheduler": {"min_lr": 1e-4, "min_lr_ratio": "0.1"}},
    ],
)
def test_saying_the_same_twice_is_no_contradiction(written: dict[str, Any]) -> None:
    aliases.load(written)


@pytest.mark.parametrize(
    ("written", "field", "nearest"),
    [
        ({"optimizer": {"weigth_decay": 0.1}}, "optimizer.weigth_decay", "optimizer.weight_decay"),
        ({"training": {"ema_decy": 0.1}}, "training.ema_decy", "training.ema_decay"),
        ({"gpu": {"gradient_accumulation": 4}}, "gpu.gradient_accumulation", "gpu.gradient_accumulation_steps"),
        ({"schedular": {"name": "cosine"}}, "schedular.name", "scheduler.name"),
        ({"optimizer": {"grad_clip": {"norm": 1}}}, "optimizer.grad_clip.norm", "optimizer.grad_clip.max_norm"),
        ({"presets": "vision"}, "presets", "preset"),
    ],
)
def test_an_unknown_field_names_the_nearest(written: dict[str, Any], field: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        aliases.load(written)
    assert caught.value.where == field
    assert nearest in caught.value.hint


@pytest.mark.parametrize(
    ("written", "field", "what", "hint"),
    [
        ({"optimizer": "adamw"}, "optimizer", "expected a mapping, for example optimizer: {name: adamw}", ""),
        ({"optimizer": "adamv"}, "optimizer", "for example optimizer: {name: adam}; saw 'adamv'", ""),
        ({"scheduler": "cosin"}, "scheduler", "for example scheduler: {name: cosine}", ""),
        ({"scheduler": 3}, "scheduler", "for example scheduler: {name: constant}", ""),
        ({"clip": 1.0}, "clip", "for example clip: {max_norm: …}", ""),
        ({"optimizer": {"name": "adamv"}}, "optimizer.name", "unknown value 'adamv'", "did you mean 'adam'?"),
        (
            {"optimizer": {"learning_rate": 1}},
            "optimizer.learning_rate",
            "no such field",
            "did you mean 'optimizer.lr'?",
        ),
        ({"learning_rate": 1}, "learning_rate", "no such field", "did you mean 'optimizer.lr'?"),
        (
            {"optimizer": {"groups": [{"match": "*", "wd": 0}]}},
            "optimizer.groups.0.wd",
            "unknown field",
            "did you mean 'weight_decay'?",
        ),
        ({"optimizer": {"groups": {"match": "*"}}}, "optimizer.groups", "a mapping is given", "a list of rules"),
        ({"scheduler": {"name": "zzz"}}, "scheduler.name", "unknown value 'zzz'", "valid names: constant, cosine"),
        (
            {"training": {"mixed_precision": "fp61"}},
            "training.mixed_precision",
            "unknown value",
            "mean 'fp16'?",
        ),
        ({"optimizer": {"zzz": 1}}, "optimizer.zzz", "no such field", "valid names: alpha, betas"),
        ({"optimizer": {"ema_decay": 1}}, "optimizer.ema_decay", "no such field", "mean 'training.ema_decay'?"),
        ({"zzz": {"a": 1}}, "zzz.a", "no such field", "valid names: accumulate"),
        ({"preset": "zzz"}, "preset", "no preset", "valid names: nlp-finetune, pretrain-lm, vision"),
    ],
)
def test_a_wrong_name_or_shape_is_told_with_what_is_right(
    written: dict[str, Any], field: str, what: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        aliases.load(written)
    error = caught.value
    assert error.where == field and what in error.what and hint in error.hint
    assert "?," not in str(error) and ("did you mean" in error.hint) == ("mean" in hint)


@pytest.mark.parametrize(
    ("written", "field"),
    [
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr"),
        ({"optimizer": {"lr": "nan"}}, "optimizer.lr"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1"),
        ({"training": {"ema_decay": 1.0}}, "training.ema_decay"),
        ({"gpu": {"gradient_accumulation_steps": 0}}, "gpu.gradient_accumulation_steps"),
        ({"scheduler": {"name": "cosin"}}, "scheduler.name"),
        ({"training": {"grad_clip_norm": "big"}}, "training.grad_clip_norm"),
    ],
)
def test_a_wrong_value_is_told_under_the_name_it_was_written(written: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        aliases.load(written)
    assert caught.value.where == field


def test_everything_is_off_until_asked() -> None:
    config = aliases.load({})
    assert config.clip.max_norm is None and not config.ema.on and config.accumulate.steps == 1
    assert config.precision.amp == "fp32" and config.scheduler.name == "constant"
    assert not config.memory.checkpointing and config.distributed.backend is None


@pytest.mark.parametrize(
    "written",
    [
        {"distributed": {"shard": "zero3"}},
        {"distributed": {"zero_stage": 2}},
        {"zero_optimization": {"stage": 1}},
        {"gpu": {"fsdp": True}},
        {"training": {"sharded_ddp": True}},
    ],
)
def test_names_that_ask_for_a_split_model_are_answered_by_fully_shard(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="call torch's fully_shard on the model"):
        aliases.load(written)


@pytest.mark.parametrize("off", [0, None, "0", 0.0])
def test_zero_turns_clipping_and_averaging_off(off: Any) -> None:
    config = aliases.load({"training": {"grad_clip_norm": off if off != "0" else 0, "ema_decay": off}})
    assert config.clip.max_norm is None and not config.ema.on


@pytest.mark.parametrize(("given", "used"), [(1e-3, 5e-5), ("1e-6", 1e-5), (3e-5, 3e-5), (None, 2e-5)])
def test_nlp_finetune_clamps_the_rate(given: Any, used: float) -> None:
    written: dict[str, Any] = {"preset": "nlp-finetune"}
    if given is not None:
        written["optimizer"] = {"lr": given}
    assert aliases.load(written).optimizer.base_lr == used


@pytest.mark.parametrize(
    ("scheduler", "preset"),
    [({}, True), ({"name": "constant"}, True), ({"name": "constant", "warmup_ratio": 0.1}, False)],
)
def test_a_length_that_the_preset_needs_is_asked_for_in_its_name(scheduler: dict[str, Any], preset: bool) -> None:
    with pytest.raises(ConfigError, match="needs the length of the run") as caught:
        aliases.load({"preset": "vision", "scheduler": scheduler}, whole=True)
    assert ("the preset vision asks for it" in caught.value.what) is preset


def test_presets_yield_to_what_is_written() -> None:
    config = aliases.load({"preset": "pretrain-lm", "scheduler": {"warmup_ratio": 0.1, "total_steps": 100}})
    assert (config.optimizer.name, config.scheduler.name) == ("lamb", "inverse_sqrt")
    assert config.scheduler.warmup_steps is None and config.scheduler.warmup_ratio == 0.1
    own = aliases.load({"preset": "vision", "optimizer": {"name": "adamw", "lr": 1e-3}})
    assert own.optimizer == OptimizerConfig(name="adamw", lr=1e-3) and own.scheduler.name == "cosine"


def test_the_normal_form_is_one_for_all_ways_of_saying_it() -> None:
    one = aliases.normal_form(ONE, {})
    two = aliases.normal_form({**TWO, "scheduler": {k: v for k, v in TWO["scheduler"].items() if k != "min_lr"}}, {})
    assert one == two
    assert aliases.load(aliases.nested(one)) == aliases.load(ONE)


def test_checking_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys; from layerline.training.config import aliases; aliases.load({}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("written", "section", "field", "value"),
    [
        ({"optimizer": {"name": "AdamW"}}, "optimizer", "name", "adamw"),
        ({"optimizer": {"name": "SGD"}}, "optimizer", "name", "sgd"),
        ({"scheduler": {"name": "Constant"}}, "scheduler", "name", "constant"),
        ({"scheduler": {"name": "Cosine_With_Warmup", "total_steps": 9}}, "scheduler", "name", "cosine"),
        ({"training": {"mixed_precision": "FP16"}}, "precision", "amp", "fp16"),
        ({"precision": {"amp": "BFloat16"}}, "precision", "amp", "bf16"),
        ({"precision": {"loss_scale": "Dynamic"}}, "precision", "loss_scale", "dynamic"),
        ({"nonfinite": {"policy": "Skip"}}, "nonfinite", "policy", "skip"),
        ({"distributed": {"backend": "GLOO"}}, "distributed", "backend", "gloo"),
        ({"preset": "Vision"}, "optimizer", "name", "sgd"),
    ],
)
def test_names_are_the_same_in_upper_and_lower_case(written: Any, section: str, field: str, value: Any) -> None:
    assert getattr(getattr(aliases.load(written), section), field) == value


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ({"optimizer": {"lr": True}}, "optimizer.lr"),
        ({"optimizer": {"betas": [True, 0.9]}}, "optimizer.betas"),
        ({"optimizer": {"weight_decay": True}}, "optimizer.weight_decay"),
        ({"training": {"accumulate_steps": True}}, "training.accumulate_steps"),
        ({"training": {"grad_clip_norm": True}}, "training.grad_clip_norm"),
        ({"training": {"ema_decay": True}}, "training.ema_decay"),
        ({"precision": {"loss_scale": True}}, "precision.loss_scale"),
    ],
)
def test_a_yes_is_no_number(written: Any, where: str) -> None:
    with pytest.raises(ConfigError, match="expected a number") as caught:
        aliases.load(written)
    assert caught.value.where == where


def test_a_yes_stays_a_yes_where_one_is_meant() -> None:
    config = aliases.load(
        {"training": {"ema_decay": 0.9, "ema_warmup": True}, "optimizer": {"momentum": 0.9, "nesterov": True}}
    )
    assert config.ema.warmup is True and config.optimizer.nesterov is True


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "optimizer:\n"])
def test_an_empty_file_asks_for_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert aliases.load(path) == aliases.load({})


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [({"name": "lion"}, 5e-5), ({"lr": 1.0, "lr_range": [1e-6, 1e-3]}, 1e-3), ({"lr": 1e-6}, 1e-5)],
)
def test_the_range_of_rates_holds_for_what_is_written(optimizer: Any, rate: float) -> None:
    assert aliases.load({"preset": "nlp-finetune", "optimizer": optimizer}).optimizer.base_lr == rate
