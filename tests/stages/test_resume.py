"""`pipe resume --prove`: it is silent where resuming is exact, and names what was forgotten where it isn't."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerline import ModelOptimizer, cli
from layerline.pipeline.errors import ConfigError, StageError, TaskError
from layerline.pipeline.report import Report
from layerline.stages.train import Train
from layerline.training.data.batches import Batches
from layerline.training.loop.accumulation import Window
from layerline.training.loop.ema import EmaPolicy
from layerline.training.optimizers.lr import Rate
from layerline.training.run import proof_process
from layerline.training.state import checkpoint, prove_resume, safetensors_io
from tests.stages.test_train import TASK, _work

CONFIG: dict[str, Any] = {"epochs": 4, "batch_size": 4, "device": "cpu", "training": {"accumulate_steps": 4}}
# What a task must not do: state that no checkpoint knows of.
OWN_STATE = TASK.replace("    x, y = batch\n", "    x, y = batch\n    x = x + calls\n")
OWN_DRAWS = (
    TASK
    + """
own = np.random.default_rng(5)
Augmented.__getitem__ = lambda self, i: (own.random((1, 8), "f4"), i % 3)
"""
)
CLOCK = (
    TASK
    + """
Augmented.__getitem__ = lambda self, i: (np.frombuffer(os.urandom(8), "u1").astype("f4")[None], i % 3)
"""
)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, one after the other: the fresh processes of one proof take some seconds."""

    def run(job: dict[str, Any], folder: Path, progress: Callable[[int], object]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        proof_process._run(json.loads(json.dumps(job)), lambda fact: told.append(dict(fact)))
        for i in range(sum("steps" not in fact for fact in told)):
            progress(i + 1)
        return [fact for fact in told if fact]

    monkeypatch.setattr(prove_resume, "_run", run)


def proved(root: Path, task: str = TASK, steps: int = 3, **config: Any) -> Report:
    return Train(**{**CONFIG, **config}).prove_resume(_work(root, task), steps)


def first(report: Report) -> dict[str, Any]:
    (row,) = report.tables["First difference"]
    return dict(row)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"training": {}},
        {"workers": 2},
        {"training": {"accumulate_steps": 3, "mixed_precision": "bf16"}},
        {"training": {"ema_decay": 0}, "optimizer": {"name": "sgd", "momentum": 0.9}},
        {"precision": {"amp": "fp16"}, "training": {"accumulate_steps": 2}},
    ],
    ids=str,
)
def test_what_goes_on_bit_for_bit_is_said_to(config: dict[str, Any], tmp_path: Path) -> None:
    report = proved(tmp_path, **config)
    assert report.passed and not report.tables and not report.notes
    assert report.metrics["began_at_step"] == 0 and report.metrics["steps"] == 3
    assert int(report.metrics["compared"] or 0) > 30
    assert not any((tmp_path / "scratch").iterdir()) and not any((tmp_path / "out").iterdir()), "it only looks"


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_a_channels_last_model_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The convolution in the order of memory that the fused kernels must follow."""
    conv = "nn.Conv2d(2, 4, 3, padding=(0, 1)).to(memory_format=torch.channels_last)"
    seen = "x.unsqueeze(-1).expand(-1, 2, -1, 3).contiguous(memory_format=torch.channels_last)"
    task = TASK.replace("nn.Conv1d(1, 4, 3)", conv).replace("self.conv(x)", f"self.conv({seen}).mean(-1)")
    assert task.count("channels_last") == 2
    report = proved(tmp_path, task, optimizer={"name": name}, precision={"amp": "bf16"})
    assert report.passed and not report.tables


def _nothing(*_: Any) -> None: ...


FORGOTTEN: dict[str, tuple[object, str, str]] = {
    "data position": (Batches, "load_state_dict", "data/epoch "),
    "random state": (checkpoint, "_restore_rng", "rng/"),
    "averages": (EmaPolicy, "load", "ema/"),
    "weights": (checkpoint.names, "load", "online/"),
    "optimizer": (checkpoint.optimizer_state, "restore", "online/"),  # the weights that it moves tell first
    "learning rate": (Rate, "load_state_dict", "rate/"),
    "open window": (Window, "load_state_dict", "data/epoch "),  # its next step is made of other batches
}


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("what", FORGOTTEN)
def test_whatever_a_checkpoint_forgets_is_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of loading is taken away in turn."""
    where, attribute, shown = FORGOTTEN[what]
    monkeypatch.setattr(where, attribute, _nothing)
    schedule = {"scheduler": {"name": "plateau"}, "training": {"valid_interval": 2, "accumulate_steps": 4}}
    evaluated = TASK + "\ndef eval_data(): return np.ones((6, 1, 8), 'f4'), np.arange(6) % 3\n"
    report = proved(tmp_path, evaluated, batch_size=2, **(schedule if what == "learning rate" else {}))
    found = first(report)
    assert not report.passed and str(found["name"]).startswith(shown)
    assert (found["after"], found["step"], found["repeats"]) == (1, 4, True) and found["straight"] != found["resumed"]
    assert str(found["name"]) in str(report.failure()) and "at step 4 (1 after the checkpoint)" in str(report.failure())


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("task", "shown", "told", "repeats"),
    [
        (OWN_STATE, "online/conv.weight", "register_buffer()", True),
        (OWN_DRAWS, "data/epoch ", "seeded for each batch", True),
        (CLOCK, "data/epoch ", "resuming is not at fault", False),
    ],
    ids=["a count in loss()", "a generator of its own", "the clock"],
)
def test_what_hooks_keep_to_themselves_is_told(task: str, shown: str, told: str, repeats: bool, tmp_path: Path) -> None:
    report = proved(tmp_path, task)
    assert str(first(report)["name"]).startswith(shown) and first(report)["repeats"] is repeats
    assert told in report.failure().hint and Report.from_json(report.to_json()) == report


@pytest.mark.usefixtures("near")
def test_a_difference_that_comes_late_has_its_step(tmp_path: Path) -> None:
    late = TASK.replace("    x, y = batch\n", "    x, y = batch\n    x = x + (calls == 9)\n")
    report = proved(tmp_path, late, steps=6, training={})
    assert (first(report)["step"], first(report)["after"]) == (9, 3)


def cut_short(root: Path, monkeypatch: pytest.MonkeyPatch, at: str, **config: Any) -> Train:
    monkeypatch.setenv("STRIKE", at)
    stage = Train(**{**CONFIG, **config, "training": {"accumulate_steps": 4, "save_interval": 1}})
    with pytest.raises(KeyboardInterrupt):
        stage.run(_work(root))
    monkeypatch.delenv("STRIKE")
    return stage


@pytest.mark.usefixtures("near")
def test_it_begins_where_a_training_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = cut_short(tmp_path, monkeypatch, "int:10")  # 2 steps an epoch of 6 batches: in the window of step 4
    kept = {p: p.read_bytes() for p in (tmp_path / "scratch").rglob("*") if p.is_file()}
    report = stage.prove_resume(_work(tmp_path), 9)
    assert report.passed and report.metrics["began_at_step"] == 3
    assert report.metrics["steps"] == 2, "5 steps are left of 8, so each half has 2"
    note, cut = report.notes
    assert cut == "9 steps were requested; each half of what the training has left is 2"
    assert note == "began from step-00000003.safetensors, the newest checkpoint of the interrupted training"
    assert kept == {p: p.read_bytes() for p in (tmp_path / "scratch").rglob("*") if p.is_file()}
    (newest,) = [p for p in kept if p.name == "step-00000003.safetensors"]
    newest.write_bytes(newest.read_bytes()[:-3])
    with pytest.warns(UserWarning, match="skipping a checkpoint"):
        assert "began from step-00000002" in stage.prove_resume(_work(tmp_path), 1).notes[0]


@pytest.mark.usefixtures("near")
def test_too_little_left_of_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = cut_short(tmp_path, monkeypatch, "int:23")
    report = stage.prove_resume(_work(tmp_path), 2)
    assert report.passed and report.metrics["began_at_step"] == 0
    assert report.notes == ("too few steps are left of the interrupted training",)


@pytest.mark.usefixtures("near")
def test_a_short_training_is_halved(tmp_path: Path) -> None:
    assert proved(tmp_path, steps=10).metrics["steps"] == 4
    with pytest.raises(StageError, match="no middle"):
        proved(tmp_path, epochs=1, batch_size=22)


@pytest.mark.usefixtures("near")
def test_a_batch_may_be_anything(tmp_path: Path) -> None:
    """Tensors in dicts and tuples are compared; what else a batch holds is the user's own matter."""
    text = (
        "\ndef train_data(): return [{'x': torch.ones(3, 1, 8), 'ids': ['a', 'b'], 'deep': (torch.ones(1), {1: 2}),"
        " 'label': torch.arange(3)}] * 5\n"
        "def loss(model, batch): return F.cross_entropy(model(batch['x']), batch['label'])\n"
    )
    assert proved(tmp_path, TASK + text, steps=2).passed


@pytest.mark.usefixtures("near")
def test_the_checkpoint_lies_in_an_open_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    load = ModelOptimizer.load_ckpt

    def spy(mo: ModelOptimizer, path: str) -> Path:
        loaded.append(safetensors_io.load(Path(path))[1]["lanes"][""]["window"]["micro"])
        return load(mo, path)

    monkeypatch.setattr(ModelOptimizer, "load_ckpt", spy)
    assert proved(tmp_path, steps=1, batch_size=2).passed and loaded.pop() == 2
    assert proved(tmp_path, steps=1).passed and loaded.pop() == 1, "one batch more would end the epoch, and the window"


def test_mistakes_in_a_hook_and_in_the_question_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a step at least"):
        proved(tmp_path, steps=0)
    with pytest.raises(TaskError, match="gave int") as caught:
        proved(tmp_path, TASK + "\nprint('said on the way')\ndef model(): return 3\n")
    assert caught.value.where == "model"


def state(folder: Path) -> dict[str, str]:
    files = (p for p in (folder / ".layerline").rglob("*") if p.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_command_on_a_training_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With processes that are fresh indeed."""

    def pipe(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pipe", *words, "-C", str(tmp_path)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capfd.readouterr().out

    (tmp_path / "task.py").write_text(TASK + "\nprint('a hook talks')\n")
    (tmp_path / "pipe.yaml").write_text(
        "train: {epochs: 9, batch_size: 4, device: cpu, training: {accumulate_steps: 4, save_interval: 1}}\n"
    )
    monkeypatch.setenv("STRIKE", "int:20")
    assert pipe("run", "train")[0] == 130
    monkeypatch.delenv("STRIKE")
    before = state(tmp_path)
    code, out = pipe("resume", "--prove", "--steps", "2", "--json")
    document = json.loads(out)
    assert code == 0 and document["passed"] and document["stage"] == "train"
    assert document["report"]["metrics"]["began_at_step"] == 6 and state(tmp_path) == before
    code, out = pipe("resume")
    assert code == 0 and "resuming at step 6 of 18" in out
