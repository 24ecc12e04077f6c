"""train: the same bytes however often it was killed; mistakes told as the user's; a report of every parameter."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from layerline.pipeline.config import project
from layerline.pipeline.errors import ConfigError, StageError, TaskError, Unavailable
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.train import Train

TASK = """
import os, random, signal
import numpy as np, torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.head = nn.Linear(24, 3)
        self.unused = nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.head(self.drop(torch.relu(self.bn(self.conv(x)))).flatten(1))

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 22
    def __getitem__(self, i):
        x = np.sin(np.arange(8, dtype=np.float32) * (1 + i % 3))[None] + random.random() * 0.1
        return (x + np.random.rand() * 0.1 + torch.rand(()).item() * 0.1).astype(np.float32), i % 3

def model():
    return Net()

def train_data():
    return Augmented()

calls = 0
def loss(model, batch):
    global calls
    calls += 1
    at = os.environ.get("STRIKE", "").split(":")
    if at[0] == "raise" and calls == int(at[1]):
        raise RuntimeError("struck")
    if at[0] == "int" and calls == int(at[1]):
        os.kill(os.getpid(), signal.SIGINT)
    if at[0] == "kill" and calls == int(at[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    x, y = batch
    return F.cross_entropy(model(x), y)
"""
CONFIG: dict[str, Any] = {"epochs": 3, "batch_size": 4, "training": {"accumulate_steps": 4, "save_interval": 1,
                                                                      "log_interval": 1}}  # fmt: skip

VALID = (
    "batch_size, device, distillation, distributed, epochs, gpu, optimizer, precision, preset, pruning, scheduler, "
    "seed, steps, swa, training, workers"
)


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.drawn: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, done: int, total: int, **fields: Any) -> None:
        self.drawn.append({"done": done, "total": total, **fields})

    def row(self, figures: dict[str, float]) -> None:
        self.rows.append(figures)


def _work(root: Path, task: str = TASK, name: str = "out") -> Work:
    (root / "task.py").write_text(task)
    for folder in (name, "scratch"):
        (root / folder).mkdir(exist_ok=True)
    return Work(inputs={}, task=Task(root / "task.py"), out=root / name, scratch=root / "scratch", log=Quiet())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[bytes, Report]]:
    """What an undisturbed run gives, by configuration."""
    known: dict[str, tuple[bytes, Report]] = {}

    def run(**config: Any) -> tuple[bytes, Report]:
        key = repr(config)
        if key not in known:
            work = _work(tmp_path_factory.mktemp("straight"))
            report = Train(**config).run(work)
            known[key] = (work.out / "checkpoint.safetensors").read_bytes(), report
        return known[key]

    return run


def test_the_same_configuration_gives_the_same_bytes(tmp_path: Path, straight: Any) -> None:
    work = _work(tmp_path)
    Train(**CONFIG).run(work)
    assert (work.out / "checkpoint.safetensors").read_bytes() == straight(**CONFIG)[0]
    assert sorted(p.name for p in work.out.iterdir()) == ["checkpoint.safetensors", "metrics.csv"]
    other = _work(tmp_path, name="other")
    Train(**CONFIG, seed=1).run(other)
    assert (other.out / "checkpoint.safetensors").read_bytes() != straight(**CONFIG)[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strike", ["raise:4", "raise:8", "raise:18", "int:2", "int:7"])
def test_struck_down_and_rerun_it_ends_in_the_same_bytes(
    strike: str, workers: int, tmp_path: Path, straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRIKE", strike)
    with pytest.raises(KeyboardInterrupt if strike.startswith("int") else TaskError):
        Train(**CONFIG, workers=workers).run(_work(tmp_path))
    monkeypatch.delenv("STRIKE")
    work = _work(tmp_path)
    assert isinstance(work.log, Quiet)
    report = Train(**CONFIG, workers=workers).run(work)
    logged = (work.out / "metrics.csv").read_text().splitlines()[1:]
    # Those who watch the run also get the rows from before the break.
    assert [row["step"] for row in work.log.rows] == [int(line.split(",")[0]) for line in logged]
    expected, undisturbed = straight(**CONFIG)
    assert (work.out / "checkpoint.safetensors").read_bytes() == expected
    assert report.records == undisturbed.records, "the report does not depend on it either"
    resumed = strike not in ("raise:4",)  # struck in the first window: nothing was saved yet
    assert any("resumed at step" in n for n in report.notes) == resumed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.stages.test_train import CONFIG, Train, _work
Train(**{{**CONFIG, **{extra!r}}}).run(_work(Path({root!r})))
"""


def _spawn(root: Path, strike: str, **extra: Any) -> int:
    code = RUN.format(tests=str(Path(__file__).parents[2]), root=str(root), extra=extra)
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "STRIKE": strike}, check=False).returncode


def test_killed_for_real(tmp_path: Path, straight: Any) -> None:
    assert _spawn(tmp_path, "kill:15") == -signal.SIGKILL
    work = _work(tmp_path)
    report = Train(**CONFIG).run(work)
    assert (work.out / "checkpoint.safetensors").read_bytes() == straight(**CONFIG)[0]
    assert any("resumed at step" in n for n in report.notes)


@pytest.mark.slow  # starts python six times
def test_killed_again_and_again_with_workers(tmp_path: Path, straight: Any) -> None:
    for strike in ("kill:3", "kill:5", "kill:6", "kill:2", "kill:4"):
        assert _spawn(tmp_path, strike, workers=2) == -signal.SIGKILL
    work = _work(tmp_path)
    Train(**CONFIG, workers=2).run(work)
    assert (work.out / "checkpoint.safetensors").read_bytes() == straight(**CONFIG)[0]


TEACHER = """
def teacher():
    torch.manual_seed(7)
    return Net()
"""
ALL = {**CONFIG, "pruning": {"method": "channels", "share": 0.5, "end_step": 3, "every": 1}, "swa": {"share": 0.5},
       "distillation": {"alpha": 0.5, "temperature": 2.0}}  # fmt: skip


@pytest.mark.parametrize("strike", ["raise:10", "raise:18"])
def test_pruned_distilled_and_averaged_training_goes_on_bit_for_bit(
    strike: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "straight").mkdir()
    undisturbed = _work(tmp_path / "straight", TASK + TEACHER)
    Train(**ALL).run(undisturbed)
    monkeypatch.setenv("STRIKE", strike)
    with pytest.raises(TaskError, match="struck"):
        Train(**ALL).run(_work(tmp_path, TASK + TEACHER))
    monkeypatch.delenv("STRIKE")
    work = _work(tmp_path, TASK + TEACHER)
    report = Train(**ALL).run(work)
    assert any("resumed at step" in n for n in report.notes)
    ours, expected = (w.out / "checkpoint.safetensors" for w in (work, undisturbed))
    assert ours.read_bytes() == expected.read_bytes()
    stored = load_file(ours)
    for kind in ("online", "ema"):  # half of the four channels, and the two of the hidden norm
        assert (stored[f"{kind}/conv.weight"] == 0).all(2).sum() == 2
        assert (stored[f"{kind}/bn.weight"] == 0).sum() == (stored[f"{kind}/bn.bias"] == 0).sum() == 2
        assert (stored[f"{kind}/head.weight"] != 0).all()


def test_the_teacher_is_asked_for_only_where_it_is_used(tmp_path: Path) -> None:
    assert "teacher" in Train(**ALL).hooks() and "teacher" not in Train(**CONFIG).hooks()
    assert Train(**ALL).config().ema.decay is None  # the mean ships instead
    with pytest.raises(TaskError, match=r"distillation.alpha asks for it"):
        Train(**ALL).run(_work(tmp_path))
    with pytest.raises(TaskError, match=r"teacher\(\) gave int"):
        Train(**ALL).run(_work(tmp_path, TASK + "def teacher(): return 3"))


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, straight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIKE", "raise:13")
    with pytest.raises(TaskError, match="struck"):
        Train(**CONFIG).run(_work(tmp_path))
    monkeypatch.delenv("STRIKE")
    newest = max((tmp_path / "scratch" / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-3])
    work = _work(tmp_path)
    with pytest.warns(UserWarning, match="skipping a checkpoint"):
        Train(**CONFIG).run(work)
    assert (work.out / "checkpoint.safetensors").read_bytes() == straight(**CONFIG)[0]


def test_every_data_form_trains(tmp_path: Path) -> None:
    forms = {
        "arrays": "def train_data(): return np.ones((9, 1, 8)), np.arange(9) % 3",
        "tensors": "def train_data(): return torch.ones(9, 1, 8), torch.arange(9) % 3",
        "batches": "def train_data(): return [(torch.ones(3, 1, 8), torch.arange(3)) for _ in range(3)]",
        "loader": "def train_data(): return torch.utils.data.DataLoader(Augmented(), batch_size=8, shuffle=True)",
    }
    for name, text in forms.items():
        (tmp_path / name).mkdir()
        work = _work(tmp_path / name, TASK + text)
        report = Train(epochs=2, batch_size=3).run(work)
        assert report.passed and report.metrics["steps"] == 6


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("def model(): return 3", TaskError, "gave int"),
        ("def loss(model, batch): return 3", TaskError, "loss.. gave int"),
        ("def loss(model, batch): return model(batch[0])", TaskError, "shape"),
        ("def loss(model, batch): return torch.ones(())", TaskError, "with a gradient"),
        ("def loss(model, batch): return batch[2]", TaskError, r"loss.. raised IndexError"),
        ("def train_data(): return iter([1])", TaskError, "cannot be replayed"),
        ("def loss(model, batch): return model(batch[0]).sum() * float('nan')", StageError,
         "the loss is nan at step 1"),
        ("def model():\n    n = Net()\n    n.head.weight.data[0, 0] = float('inf')\n    return n", StageError,
         "at step 1.*gradient"),
    ],
)  # fmt: skip
def test_mistakes_are_told(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    work = _work(tmp_path, TASK + "\n" + text)
    with pytest.raises(error, match=message):
        Train(epochs=2, batch_size=4).run(work)
    assert not list(work.out.iterdir())


def test_training_to_nan_names_step_and_parameter(tmp_path: Path) -> None:
    text = "def loss(model, batch): return (model.conv.weight - model.conv.weight.detach()).sqrt().sum()"
    with pytest.raises(StageError) as caught:
        Train(epochs=9, batch_size=4).run(_work(tmp_path, TASK + text))
    assert caught.value.where == "conv.weight" and "step 1" in str(caught.value)


def test_an_iterable_without_length_needs_steps(tmp_path: Path) -> None:
    text = (
        "class Endless:\n    def __iter__(self):\n        yield torch.ones(3, 1, 8), torch.arange(3)\n"
        "def train_data(): return Endless()"
    )
    with pytest.raises(TaskError, match="steps"):
        Train(epochs=2).run(_work(tmp_path, TASK + text))
    assert Train(steps=5).run(_work(tmp_path, TASK + text)).metrics["steps"] == 5


def test_the_window_ends_with_the_epoch_even_of_unknown_length(tmp_path: Path) -> None:
    """5 micro-batches an epoch in windows of 4: two steps an epoch, the second of one micro-batch (T34)."""
    text = (
        "class Five:\n    def __iter__(self):\n        return iter([(torch.ones(3, 1, 8), torch.arange(3))] * 5)\n"
        "def train_data(): return Five()"
    )
    work = _work(tmp_path, TASK + text)
    Train(steps=4, training={"accumulate_steps": 4}).run(work)
    from layerline.training.state import safetensors_io

    _, meta = safetensors_io.load(work.out / "checkpoint.safetensors")
    assert meta["extras"]["data"] == {"epoch": 2, "position": 0}


def test_the_report_compares_each_parameter_with_its_start(straight: Any) -> None:
    _, report = straight(**CONFIG)
    by_name = {r.name: r for r in report.records}
    assert list(by_name) == ["unused", "conv.weight", "conv.bias", "bn.weight", "bn.bias", "head.weight", "head.bias"]
    assert by_name["unused"].extra["dead"] and by_name["unused"].rel_l2 == 0.0
    weight = by_name["conv.weight"]
    assert weight.module == "conv" and weight.shape == (4, 1, 3) and weight.rel_l2 is not None and weight.rel_l2 > 0
    assert not weight.extra["dead"] and 0 < float(weight.extra["update_ratio"] or 0) < 1
    assert report.passed and report.metrics["steps"] == 6 and any("never changed" in n for n in report.notes)
    assert Report.from_json(report.to_json()) == report


def test_progress_and_csv(tmp_path: Path) -> None:
    work = _work(tmp_path)
    Train(**CONFIG).run(work)
    assert isinstance(work.log, Quiet)
    last = work.log.drawn[-1]
    assert (last["done"], last["total"]) == (6, 6) and {"loss", "lr", "grad_norm", "samples_s"} <= last.keys()
    rows = list(csv.DictReader((work.out / "metrics.csv").open()))
    assert [r["step"] for r in rows] == ["1", "2", "3", "4", "5", "6"]
    logged = [(int(row["step"]), f"{row['loss']:.9g}") for row in work.log.rows]
    assert logged == [(int(r["step"]), r["loss"]) for r in rows]


def test_validation_inside_training_is_only_asked_for(tmp_path: Path) -> None:
    assert Train().hooks() == ("model", "train_data", "loss")
    asked = Train(steps=4, batch_size=4, training={"valid_interval": 2, "log_interval": 1})
    assert asked.hooks() == ("model", "train_data", "loss", "eval_data", "metric")
    text = (
        "CALLS = []\n"
        "def eval_data():\n"
        "    CALLS.append(1)\n"
        "    return [(np.ones((6, 1, 8), 'f4'), np.arange(6) % 3)]\n"
        "def metric(o, t): return {'top1': float(len(CALLS))}"
    )
    work = _work(tmp_path, TASK + text)
    asked.run(work)
    rows = list(csv.DictReader((work.out / "metrics.csv").open()))
    assert [r["deploy_gap"] for r in rows] == ["", "0", "", "0"]
    assert [r["metric_deploy"] for r in rows] == ["", "1", "", "1"], "eval_data() is called once, and iterated anew"


def test_both_shapes_and_the_defaults_have_one_form() -> None:
    one = Train(optimizer={"lr": "2e-3"}, training={"accumulate_steps": 2})
    two = Train(optimizer={"lr": 0.002}, gpu={"gradient_accumulation_steps": "2"})
    assert one == two and one.model_dump() == two.model_dump()
    assert Train(**one.model_dump()) == one, "its own dump means the same"
    config = Train().config()
    assert (config.optimizer.name, config.scheduler.name, config.clip.max_norm) == ("adamw", "cosine", 1.0)
    assert config.ema.decay == 0.999 and config.ema.warmup is True
    off = Train(training={"ema_decay": 0, "grad_clip_norm": 0}, scheduler={"name": "constant"}).config()
    assert not off.ema.on and off.clip.max_norm is None and off.scheduler.warmup_ratio is None
    assert Train(scheduler={"warmup_steps": 7}).config().scheduler.warmup_ratio is None


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"optimizer": {"weigth_decay": 1}}, ("optimizer", "weigth_decay"), "did you mean 'optimizer.weight_decay'"),
        ({"optimizer": {"lr": "fast"}}, ("optimizer", "lr"), "expected a number"),
        ({"optimizer": "adamw"}, ("optimizer",), "expected a mapping, for example optimizer: {name: adamw}"),
        ({"optimizer": {"name": "adamwx"}}, ("optimizer", "name"), "unknown value 'adamwx'; did you mean 'adamw'?"),
        ({"training": {"accumulate_steps": 2}, "gpu": {"gradient_accumulation_steps": 3}},
         ("gpu", "gradient_accumulation_steps"), "training.accumulate_steps"),
        ({"scheduler": {"name": "plateau"}}, ("training", "valid_interval"), "plateau follows validation"),
        ({"epoch": 3}, ("epoch",), "unknown field; did you mean 'epochs'?"),
        ({"optimiser": {}}, ("optimiser",), "unknown field; did you mean 'optimizer'?"),
        ({"zzz": 3}, ("zzz",), f"unknown field; valid names: {VALID}"),
        ({"seed": -1}, ("seed",), "greater than"),
        ({"seed": 2**63}, ("seed",), "less than"),
        ({"workers": -1}, ("workers",), "greater than"),
        ({"epochs": 0}, ("epochs",), "greater than"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_told_at_its_place(fields: dict[str, Any], place: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Train(**fields)
    (error,) = caught.value.errors()
    assert error["loc"] == place and message in error["msg"]


def test_the_file_shows_a_wrong_field_once_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("train:\n  optimizer: {name: adamwx}\n")
    with pytest.raises(ConfigError) as caught:
        project.load(tmp_path)
    assert caught.value.what == "train.optimizer.name: unknown value 'adamwx'"
    assert caught.value.hint == "did you mean 'adamw'?" and caught.value.where.startswith("pipe.yaml:2:")


def test_a_device_that_is_not_there_is_the_machines_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        Train(device="cuda").run(_work(tmp_path))


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_any_seed_trains(seed: int, tmp_path: Path) -> None:
    assert Train(steps=1, seed=seed).run(_work(tmp_path)).passed


@pytest.mark.parametrize(
    ("bad", "good", "seen"),
    [
        ("calls >= 1", False, "0 accepted, 4 rejected, the last 4 in a row"),
        ("calls >= 3", False, "2 accepted, 2 rejected, the last 2 in a row"),
        ("calls == 4", False, "3 accepted, 1 rejected, the last 1 in a row"),
        ("calls == 2", True, "3 accepted, 1 rejected"),
        ("calls < 1", True, "4 accepted, 0 rejected"),
    ],
)
def test_a_run_must_end_in_accepted_steps(bad: str, good: bool, seen: str, tmp_path: Path) -> None:
    text = f"""
calls = 0
def loss(model, batch):
    global calls
    calls += 1
    return model(batch[0]).sum() * (float("nan") if {bad} else 1.0)
"""
    work = _work(tmp_path, TASK + text)
    report = Train(steps=4, batch_size=4).run(work)
    gate = next(g for g in report.gates if g.name == "steps accepted")
    assert (gate.passed, gate.seen) == (good, seen) and report.passed == good
    first = {"calls >= 1": 1, "calls >= 3": 3, "calls == 4": 4}.get(bad)
    assert good or f"first rejected step is {first}:" in gate.hint
    assert Report.from_json(report.to_json()).gates == report.gates
    assert isinstance(work.log, Quiet)
    said = [s for s in work.log.said if "rejected: loss or gradients" in s]
    assert len(said) == (bad != "calls < 1") and set(said) <= set(report.notes)


def test_configuring_imports_no_torch() -> None:
    code = "import sys; from layerline.stages.train import Train; Train(optimizer={'lr': 1})"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_a_second_interrupt_strikes_at_once(tmp_path: Path) -> None:
    text = "def loss(model, batch):\n    for _ in range(2): os.kill(os.getpid(), signal.SIGINT)\n    return None"
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Train(**CONFIG).run(_work(tmp_path, TASK + text))
    assert time.monotonic() - start < 30 and not (tmp_path / "scratch" / "checkpoints").exists()


RAGGED = """
import numpy as np, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, ids):
        return self.o(self.e(ids))
def model():
    return Net()
def train_data():
    ids = np.random.default_rng(0).integers(0, 11, (16, 12))
    labels = np.roll(ids, -1, 1)
    labels[::2, 1:] = -100
    labels[3] = -100
    return ids, labels
"""
OWN_LOSS = """
def loss(model, batch):
    ids, labels = batch
    out = model(ids).movedim(-1, 1)
    return torch.nn.functional.cross_entropy(out, labels, reduction="sum"), (labels != -100).sum()
"""


@pytest.mark.parametrize("own", ["", OWN_LOSS], ids=["default loss", "(sum, weight)"])
def test_batches_with_unequally_many_labels_train_as_one(own: str, tmp_path: Path) -> None:
    weights = []
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        work = _work(tmp_path, RAGGED + own, name=f"out{batch}")
        shutil.rmtree(work.scratch)
        work.scratch.mkdir()
        training = {"ema_decay": 0, "grad_clip_norm": 0, "accumulate_steps": accumulate}
        Train(
            steps=8, batch_size=batch, training=training, optimizer={"name": "sgd", "lr": 0.5},
            scheduler={"name": "constant"},
        ).run(work)  # fmt: skip
        state = load_file(work.out / "checkpoint.safetensors")
        weights.append(torch.cat([t.flatten() for n, t in sorted(state.items()) if n.startswith("online/")]))
    assert weights[0].isfinite().all()
    for other in weights[1:]:
        assert (weights[0] - other).norm() < 1e-5 * weights[0].norm()


@pytest.mark.parametrize("own", ["", OWN_LOSS], ids=["default loss", "(sum, weight)"])
def test_batches_that_do_not_fit_are_halved_and_train_as_one(own: str, tmp_path: Path) -> None:
    """Where labels are left out of the loss, the parts weigh by those that count."""
    narrow = RAGGED.replace("def forward(self, ids):", "def forward(self, ids):\n        self.check(ids)") + own
    check = """
    def check(self, ids):
        if self.training and len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def forward("""
    weights = []
    for task in (RAGGED + own, narrow.replace("\n    def forward(", check, 1)):
        work = _work(tmp_path, task, name=f"out{len(weights)}")
        shutil.rmtree(work.scratch)
        work.scratch.mkdir()
        Train(
            steps=6, batch_size=4, training={"ema_decay": 0, "grad_clip_norm": 0, "on_oom": "halve"},
            optimizer={"name": "sgd", "lr": 0.5}, scheduler={"name": "constant"},
        ).run(work)  # fmt: skip
        state = load_file(work.out / "checkpoint.safetensors")
        weights.append(torch.cat([t.flatten() for n, t in sorted(state.items()) if n.startswith("online/")]))
        told = [text for text in work.log.said if "4 samples do not fit into memory" in text]  # type: ignore[attr-defined]
        assert len(told) == len(weights) - 1
    assert (weights[0] - weights[1]).norm() < 1e-5 * weights[0].norm()


def test_a_halved_training_that_was_cut_short_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and BatchNorm: a pass that failed leaves neither random numbers nor statistics behind."""
    narrow = TASK.replace(
        "    x, y = batch\n",
        """    x, y = batch
    if len(x) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
""",
    )
    config = {**CONFIG, "training": {**CONFIG["training"], "on_oom": "halve"}}
    outs = []
    for name in ("straight", "struck"):
        (tmp_path / name).mkdir()
        if name == "struck":
            monkeypatch.setenv("STRIKE", "raise:14")
            with pytest.raises(TaskError, match="struck"):
                Train(**config).run(_work(tmp_path / name, narrow))
            monkeypatch.delenv("STRIKE")
        work = _work(tmp_path / name, narrow)
        report = Train(**config).run(work)
        assert any("resumed at step" in note for note in report.notes) is (name == "struck")
        outs.append((work.out / "checkpoint.safetensors").read_bytes())
    assert outs[0] == outs[1]


def test_a_frozen_part_in_eval_mode_keeps_its_statistics(tmp_path: Path) -> None:
    task = """
import numpy as np, torch
from torch import nn
def model():
    frozen = nn.BatchNorm1d(4).eval().requires_grad_(False)
    torch.nn.init.constant_(frozen.running_mean, 0.25)
    return nn.Sequential(frozen, nn.Linear(4, 4))
def train_data():
    x = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32) + 5
    return x, x.argmax(1)
"""
    work = _work(tmp_path, task)
    Train(steps=5, batch_size=8).run(work)
    state = load_file(work.out / "checkpoint.safetensors")
    assert torch.equal(state["online/0.running_mean"], torch.full((4,), 0.25))
