"""What a newcomer does wrong is told in one sentence that names the call, the field and the way out."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError, TaskError, Unavailable
from layerline.pipeline.task import Task
from layerline.stages.train import Train, _proved
from layerline.training.config import aliases
from layerline.training.config.sections import Config, EmaConfig, OptimizerConfig
from layerline.training.loop.masks import Gradual, magnitude
from layerline.training.loop.step_engine import Lane
from layerline.training.run.train_loop import accepted
from layerline.training.state.prove_resume import Difference, ResumeProof

X = torch.ones(4, 3)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2))


def _mo(config: dict[str, Any] | None = None) -> tuple[nn.Module, ModelOptimizer]:
    model = _net()
    return model, ModelOptimizer(model, config)


class Plain:
    """The least that an optimizer can be."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())

    def step(self) -> None:
        for p in self._params:
            p.data.sub_(0.1 * (p.grad if p.grad is not None else 0))

    def zero_grad(self) -> None:
        pass


# Custom optimizers.


def test_the_plan_of_a_custom_optimizer_says_what_its_groups_say() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    own = torch.optim.SGD([{"params": model[0].parameters(), "weight_decay": 0.5, "lr": 0.2},
                           {"params": [model[1].weight]}], lr=0.1)  # fmt: skip
    plan = ModelOptimizer(model, {}, optimizer=own).plan()
    assert plan.groups == {
        "0.weight": ("decay", "group 0", 6), "0.bias": ("decay", "group 0", 2),
        "1.weight": ("no decay", "group 1", 4), "1.bias": ("not held", "", 2),
    }  # fmt: skip
    assert "weight_decay=0.5" in plan.optimizer and plan.optimizer.endswith("(custom)")
    assert any("first group" in n for n in plan.notes)


def test_an_optimizer_without_groups_is_planned_as_unknown() -> None:
    model = _net()
    plan = ModelOptimizer(model, {"optimizer": {"lr": 0.1}}, optimizer=Plain(model)).plan()
    assert {g for g, _, _ in plan.groups.values()} == {"unknown"} and plan.curve[0] == (0, 0.1)
    assert any("no param_groups" in n for n in plan.notes)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"name": "adam"}, "name"),
        ({"lr": 3}, "lr"),
        ({"name": "custom", "betas": [0.9, 0.9]}, "betas"),
        ({"no_decay": ["*"]}, "no_decay"),
        ({"weight_decay": 0.1}, "weight_decay"),
    ],
)
def test_a_field_that_a_custom_optimizer_does_not_read_is_refused(section: dict[str, Any], field: str) -> None:
    model = _net()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    for config in ({"optimizer": section}, Config(optimizer=OptimizerConfig(**section))):
        with pytest.raises(ConfigError, match=f"^optimizer.{field}: SGD is given, and does not read {field}"):
            ModelOptimizer(model, config, optimizer=own)
    ModelOptimizer(model, {"optimizer": {"name": "custom"}}, optimizer=own)
    ModelOptimizer(model, Config().replace(clip={"max_norm": 1.0}), optimizer=own)
    # Read by the other model's optimizer.
    other = {"a": model, "b": _net()}
    ModelOptimizer(other, {"optimizer": {"lr": 3}}, optimizer={"a": own})


# Rejected steps.


def test_the_first_rejected_step_is_told_once() -> None:
    model, mo = _mo()
    for i in range(6):
        mo.step(model(X).mean() * (math.nan if i % 2 else 1.0))
    assert mo.warnings == [
        "step 2 was rejected, since the loss is nan; nonfinite.triage: true says where such a thing begins"
    ]
    assert "triage" in accepted(mo.lanes[""]).hint


def test_triage_and_the_search_for_a_loss_scale_need_no_such_word() -> None:
    model, mo = _mo({"nonfinite": {"triage": True}})
    mo.step(model(X).mean() * math.nan)
    assert len(mo.warnings) == 1 and "it began in the loss function" in mo.warnings[0]
    assert "triage" not in accepted(mo.lanes[""]).hint
    model, mo = _mo({"precision": {"amp": "fp16"}})
    with mo.autocast():
        loss = model(X).float().mean() * 1e36
    assert not mo.step(loss) and mo.warnings == []


@pytest.mark.parametrize(
    ("batch", "scale", "where", "hint"),
    [(math.nan, 1.0, "the batch", "look at these samples"), (1.0, math.nan, "loss", "in the loss function")],
)
def test_the_end_says_what_triage_found(batch: float, scale: float, where: str, hint: str) -> None:
    model, mo = _mo({"nonfinite": {"policy": "stop", "triage": True}})
    with pytest.raises(StageError) as caught:
        mo.step(model(X * batch).mean() * scale)
    error = caught.value
    assert error.where == where and hint in error.hint and error.what.count("the loss is nan") == 1
    assert error.what.endswith("run again, it repeats")


def test_rollback_without_a_checkpoint_says_how_to_have_one() -> None:
    model, mo = _mo({"nonfinite": {"policy": "rollback", "limit": 1}})
    assert any("monitor.save_interval" in n for n in mo.plan().notes)
    with pytest.raises(StageError, match="no checkpoint to roll back to") as caught:
        mo.step(model(X).mean() * math.nan)
    assert "save_interval" in caught.value.hint and "learning rate" not in caught.value.hint


# Validation and its log.


def test_valid_interval_without_a_metric_warns(caplog: pytest.LogCaptureFixture) -> None:
    model, mo = _mo({"training": {"valid_interval": 2}})
    with caplog.at_level(logging.WARNING, "layerline.training"):
        for _ in range(5):
            mo.step(model(X).mean())
    assert len(mo.warnings) == 1 and "mo.validate_with(metric)" in mo.warnings[0] == caplog.messages[0]
    model, mo = _mo({"training": {"valid_interval": 2}})
    mo.validate_with(lambda net: 1.0)
    for _ in range(4):
        mo.step(model(X).mean())
    assert mo.warnings == []
    assert [r[0] for r in mo.lanes[""].monitor.rows] == [2, 4]


@pytest.mark.parametrize("own", [True, False])
def test_a_metric_measured_after_an_automatic_save_is_in_it(own: bool, tmp_path: Path) -> None:
    config = {"training": {"save_interval": 2, "save_dir": str(tmp_path / "c"), "log_interval": 1, "valid_interval": 2}}
    model, mo = _mo(config)
    if not own:
        mo.validate_with(lambda net: 0.5)
    for _ in range(4):
        mo.step(model(X).mean())
        if own and mo.global_step % 2 == 0:
            mo.validate(lambda net: 0.5 + 0 * torch.rand(1))
    draws = torch.get_rng_state()
    again = _mo(config)[1]
    again.load_ckpt(tmp_path / "c")
    assert torch.equal(draws, torch.get_rng_state())
    monitor = again.lanes[""].monitor
    at = monitor.columns.index("metric_online")
    assert [(row[0], row[at]) for row in monitor.rows if row[0] % 2 == 0] == [(2, 0.5), (4, 0.5)]


def test_one_model_of_several_is_validated() -> None:
    g, d = _net(), _net()
    mo = ModelOptimizer({"g": g, "d": d}, {"training": {"valid_interval": 1}})
    seen: list[nn.Module] = []

    def metric(net: nn.Module) -> float:
        seen.append(net)
        return 1.0

    mo.validate_with(metric, only="d")
    mo.step(d(X).mean(), only="d")
    assert seen == [d]


# Several models.


def test_a_call_that_needs_a_model_names_itself_and_reports_do_all(tmp_path: Path) -> None:
    mo = ModelOptimizer({"g": _net(), "d": nn.Linear(3, 1)}, {})
    for name, call in {
        "validate": lambda: mo.validate(lambda net: 1.0), "apply_mask": lambda: mo.apply_mask({}),
        "step": lambda: mo.step(X.sum()), "validate_with": lambda: mo.validate_with(lambda net: 1.0),
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^{name}: which of \['d', 'g'\]") as caught:
            call()
        assert caught.value.hint == f"mo.{name}(…, only=…)"
    plan = mo.plan()
    assert plan.model == "g" and [o.model for o in plan.others] == ["d"] and "\nd: AdamW(" in str(plan)
    assert list(mo.plan("d").groups) == ["weight", "bias"] and not mo.plan("d").others
    mo.export_metrics(tmp_path / "new" / "m.csv")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["m-d.csv", "m-g.csv"]


# Calls that fail.


def test_a_loss_that_went_backward_already() -> None:
    model, mo = _mo()
    loss = model(X).square().mean()
    loss.backward()
    with pytest.raises(ConfigError, match="gone through the graph of this loss already") as caught:
        mo.step(loss)
    assert "leave loss.backward() out" in caught.value.hint
    assert all(p.grad is None for p in model.parameters()) and mo.step(model(X).mean())


@pytest.mark.parametrize(("config", "seen"), [([1, 2], "list"), (3, "int"), ((), "tuple")])
def test_a_configuration_that_is_none(config: Any, seen: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: expected a dict.*got {seen}"):
        ModelOptimizer(_net(), config)


@pytest.mark.parametrize("models", [[_net()], {"g": _net(), "d": 3}, 3])
def test_models_that_are_none(models: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, got (list|int)"):
        ModelOptimizer(models, {})


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match=r"^register 'num': int has no state_dict\(\)"):
        _mo()[1].register("num", 3)


@pytest.mark.parametrize(
    ("metric", "seen"),
    [({"acc": 1.0}, "a dict"), (torch.ones(3), r"a tensor of shape \(3,\)"), (None, "a NoneType"), ("1", "a str")],
)
def test_a_metric_that_is_no_number(metric: Any, seen: str) -> None:
    model, mo = _mo({"ema": {"decay": 0.5}})
    with pytest.raises(ConfigError, match=f"^validate: the metric is one number, got {seen}"):
        mo.validate(lambda net: metric)
    assert model.training and mo.step(model(X).mean())


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="file"):
        _mo()[1].export_metrics(tmp_path / "file" / "x.csv")


@pytest.mark.parametrize("value", [[0.9], 0.9, [0.9, 0.9, 0.9]])
@pytest.mark.parametrize("field", ["betas", "lr_range"])
def test_a_pair_that_is_none(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.{field}: expected two numbers"):
        aliases.load({"optimizer": {field: value}})


def test_words_of_masks() -> None:
    with pytest.raises(ConfigError, match=r"no scope is called 'globl'(.|\n)*did you mean 'global'"):
        magnitude(_net(), 0.5, scope="globl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no method is called 'chanels'(.|\n)*'channels'"):
        Gradual(final=0.5, begin=0, end=9, method="chanels")  # type: ignore[arg-type]


# Configurations.


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("optimizer:\n  name: adam\n  lrr: 3\n", "c.yaml:3:3", "optimizer.lrr: no such field"),
        ("\noptimizer: {name: adam, eps: no}\n", "c.yaml:2:25", "optimizer.eps: "),
        ("optimizer:\n  name: adam\n  name: sgd\n", "c.yaml:3:3", 'not valid YAML: found duplicate key "name"'),
        ("training:\n  ema_warmup: true\n", "c.yaml:2:3", "training.ema_warmup: there is no average"),
        ("scheduler:\n  name: cosine\n", "c.yaml:1:1", "scheduler.total_steps: cosine needs the length"),
        ("optimizer:\n  momentum: 0.5\n", "c.yaml:2:3", "optimizer.momentum: adamw has no momentum"),
        ("a: [\n", "c.yaml:2:1", "not valid YAML"),
    ],
)
def test_a_file_is_told_with_its_line(text: str, where: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ModelOptimizer(_net(), tmp_path / "c.yaml")
    assert caught.value.where == where and caught.value.what.startswith(what)
    assert "ruamel" not in str(caught.value) and "yaml.dev" not in str(caught.value)


def test_an_average_that_is_off_has_no_warm_up() -> None:
    for config in ({"training": {"ema_start_step": 5}}, {"ema": {"warmup": 10}}, Config(ema=EmaConfig(warmup=True))):
        with pytest.raises(ConfigError, match="EMA is off"):
            _mo(config)  # type: ignore[arg-type]
    _mo({"ema": {"decay": 0, "warmup": True}})


def test_a_preset_is_named_where_it_asks_for_the_length() -> None:
    for preset in ("vision", "nlp-finetune"):
        with pytest.raises(ConfigError, match=f"scheduler.total_steps: .*, and the preset {preset} asks for it"):
            _mo({"preset": preset})
        with pytest.raises(ConfigError, match=f"warmup_ratio needs .*, and the preset {preset} asks for it"):
            _mo({"preset": preset, "scheduler": {"name": "constant"}})
    with pytest.raises(ConfigError) as caught:
        _mo({"scheduler": {"name": "cosine"}})
    assert "preset" not in caught.value.what


@pytest.mark.parametrize(
    ("fields", "place", "what"),
    [
        ({"scheduler": {"gamma": 0.5}}, ("scheduler", "gamma"), "cosine has no gamma"),
        ({"scheduler": {"name": "step"}}, ("scheduler", "step_size"), "step needs"),
        ({"optimizer": {"momentum": 0.9}}, ("optimizer", "momentum"), "adamw has no momentum"),
        ({"recipe": {"clip.max_norm": 1}, "clip": {"max_norm": 2}}, ("clip", "max_norm"), "both set clip.max_norm"),
        ({"recipe": {"clip": {"max_norm": -1}}}, ("recipe", "clip", "max_norm"), "greater than 0"),
        ({"recipe": {"clip.max_norm": -1}}, ("recipe", "clip.max_norm"), "greater than 0"),
        ({"recipe": 3}, ("recipe",), "expected a mapping"),
    ],
)
def test_the_train_stage_tells_before_it_runs(fields: dict[str, Any], place: tuple[str, ...], what: str) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        Train.model_validate(fields)
    (found,) = caught.value.errors()
    assert found["loc"] == place and what in found["msg"]


def test_a_recipe_may_be_written_in_sections() -> None:
    one, other = (Train.model_validate({"recipe": r}).recipe for r in ({"clip": {"max_norm": 2}}, {"clip.max_norm": 2}))
    assert one == other and one["clip.max_norm"] == 2
    assert "scheduler.warmup_ratio" not in Train.model_validate({"recipe": {"scheduler.name": "constant"}}).recipe


def test_validation_without_data_is_told_before_training(tmp_path: Path) -> None:
    from layerline.training.run import train_loop

    (tmp_path / "task.py").write_text("from torch import nn\ndef model(): return nn.Linear(1, 1)\n"
                                      "def train_data(): raise AssertionError\n")  # fmt: skip
    with pytest.raises(TaskError, match=r"eval_data: .*training\.valid_interval asks"):
        train_loop.prepare(Task(tmp_path / "task.py"), Config().replace(monitor={"valid_interval": 2}), epochs=1,
         steps=None,
                    batch_size=1, seed=0, workers=0, device=torch.device("cpu"))  # fmt: skip


# The proof.


def test_a_proof_over_rejected_steps_proves_nothing() -> None:
    proof = ResumeProof(0, "", 3, 7, 0)
    assert not proof.passed and "nothing is proved" in str(proof) and "triage" in proof.hint
    (gate,) = _proved(proof, asked=3, interrupted=False).gates
    assert not gate.passed and gate.hint == proof.hint


def test_a_proof_says_its_cause_and_that_it_was_cut_short() -> None:
    passed = ResumeProof(0, "", 3, 7, 6)
    assert passed.passed and not passed.hint
    assert _proved(passed, asked=3, interrupted=False).notes == ()
    assert _proved(passed, asked=100, interrupted=False).notes == (
        "100 steps were requested; each half of what the training has left is 3",
    )
    for name, repeats, hint in (("data/x", True, "train_data()"), ("online/w", True, "register"),
                                ("online/w", False, "not at fault")):  # fmt: skip
        failed = ResumeProof(0, "", 3, 7, 6, Difference(name, 4, 1, "a", "b", repeats))
        assert not failed.passed and hint in failed.hint
    assert "outside of its state_dict()" in Difference("online/w", 4, 1, "a", "b", True).hint


def test_a_lane_counts_what_it_rejects() -> None:
    lane = Lane(model := _net(), Config())
    lane.step(model(X).mean() * math.nan)
    assert (lane.steps, lane.skipped, lane.first_rejected) == (0, 1, 1)
