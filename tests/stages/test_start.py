"""Projects that start from a file: what `pipe init` writes runs at once, with the file's own names to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import modules
from layerline.pipeline.config import project as projects
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.init import from_files
from layerline.pipeline.run.outcome import Outcome
from layerline.pipeline.run.runner import Runner
from layerline.views.terminal import Silent
from tests.stages.foreign import conv, model

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, 2)
    def forward(self, image):
        return self.head(self.conv(image).relu().mean((2, 3)))

def build():
    return Net()

model = build
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)


def _samples(folder: Path, count: int = 40, **more: Any) -> Path:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((count, 3, 8, 8)).astype("f"), "label": rng.integers(0, 2, count)} | more
    np.savez(folder / "samples.npz", **{n: a for n, a in arrays.items() if a is not None})
    return folder / "samples.npz"


def _file(path: Path, content: bytes = b"") -> Path:
    path.write_bytes(content)
    return path


def _model(folder: Path, given: onnx.ModelProto | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(given or conv(), str(folder / "m.onnx"))
    return folder / "m.onnx"


def _run(root: Path, *stages: str, sets: tuple[str, ...] = ()) -> Outcome:
    before = Path.cwd()
    os.chdir(root)
    try:
        done = Runner(projects.load(root, sets), Silent()).run(stages or None)
    finally:
        os.chdir(before)
    assert done.passed, [str(r.error) for r in done.results if r.error]
    return done


def _artifact(root: Path, stage: str) -> Path:
    record = Runner(projects.load(root), Silent()).ledger.head(stage)
    assert record is not None
    return root / ".layerline" / "store" / record.digest


def test_a_model_with_samples_runs_through(tmp_path: Path) -> None:
    written = from_files.from_onnx(tmp_path / "p", _model(tmp_path), _samples(tmp_path))
    assert sorted(p.name for p in written) == ["m.onnx", "pipe.yaml", "samples.npz", "task.py"]
    done = {r.name: r for r in _run(tmp_path / "p", "quantize").results}
    assert list(done) == ["import-onnx", "fuse", "quantize"]
    figures = done["quantize"].record.metrics  # type: ignore[union-attr]
    assert figures["quantized_weights"] == 1 and 0 <= figures["accuracy"] <= 1  # type: ignore[operator]
    quantized = onnx_files.load(_artifact(tmp_path / "p", "quantize") / onnx_files.FILE)
    assert {"x"} == {i.name for i in quantized.graph.input} and {"y"} == {o.name for o in quantized.graph.output}
    assert "Conv_c" in set(modules(quantized).values()), "and the node's name is its path to the end"
    assert [r.state for r in _run(tmp_path / "p", "quantize").results] == ["cached"] * 3


def test_a_model_alone_runs_in_fp16(tmp_path: Path) -> None:
    from_files.from_onnx(tmp_path / "p", _model(tmp_path))
    assert "mode: fp16" in (tmp_path / "p" / "pipe.yaml").read_text()
    _run(tmp_path / "p", "quantize")


def test_states_and_numbers_come_whole(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, float[2,n,4] h, int64 rate) => (float[2,n,4] y)
        { c = Cast <to = 1> (rate)
          m = Mul (h, c)
          y = Add (x, m) }"""
    )
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "s.npz", x=rng.random((9, 4), "f"), h=rng.random((9, 2, 1, 4), "f"), rate=np.full(9, 3))
    from_files.from_onnx(tmp_path / "p", _model(tmp_path, given), tmp_path / "s.npz")
    _run(tmp_path / "p", "quantize", sets=("quantize.mode=fp16",))
    # Without the state, batches are batches, and the number stays a number.
    del given.graph.node[1], given.graph.input[1]
    given.graph.node[1].input[1] = "c"
    given.graph.output[0].type.tensor_type.shape.CopyFrom(given.graph.input[0].type.tensor_type.shape)
    np.savez(tmp_path / "t.npz", x=rng.random((9, 4), "f"), rate=np.full(9, 3))
    from_files.from_onnx(tmp_path / "q", _model(tmp_path, given), tmp_path / "t.npz")
    _run(tmp_path / "q", "quantize", sets=("quantize.mode=fp16",))


def test_answers_that_are_numbers_make_an_error(tmp_path: Path) -> None:
    given = model("""<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y) { y = Exp (x) }""")
    x = np.ones((6, 4), "f")
    np.savez(tmp_path / "s.npz", x=x, label=np.exp(x))
    from_files.from_onnx(tmp_path / "p", _model(tmp_path, given), tmp_path / "s.npz")
    done = _run(tmp_path / "p", "quantize", sets=("quantize.mode=fp16",))
    assert abs(float(done.results[-1].record.metrics["minus_error"])) < 0.01  # type: ignore[union-attr,arg-type]


# External data (T41)


@pytest.mark.parametrize("location", ["weights.bin", "deep/inside/m.onnx.data"])
def test_external_data_moves_along(location: str, tmp_path: Path) -> None:
    (tmp_path / "a" / location).parent.mkdir(parents=True)
    path = tmp_path / "a" / "m.onnx"
    onnx.save(conv(), str(path), save_as_external_data=True, location=location, size_threshold=0)
    from_files.from_onnx(tmp_path / "b", path)
    copied = tmp_path / "b" / "model" / location
    assert copied.read_bytes() == (tmp_path / "a" / location).read_bytes()
    assert copied.stat().st_nlink == 1, "onnx refuses hard links"
    assert (tmp_path / "b" / "model" / "m.onnx").read_bytes() == path.read_bytes(), "a harmless file stays as it is"
    (tmp_path / "b").rename(tmp_path / "c")
    digest = _run(tmp_path / "c", "import-onnx").results[0].record.digest  # type: ignore[union-attr]
    data = tmp_path / "c" / "model" / location
    before = data.stat()
    changed = bytearray(data.read_bytes())
    changed[3] ^= 0x01
    data.write_bytes(changed)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = _run(tmp_path / "c", "import-onnx").results[0]
    assert again.state == "ran" and again.record is not None and again.record.digest != digest


def test_links_become_files(tmp_path: Path) -> None:
    """Download caches are full of symbolic links."""
    (tmp_path / "blobs").mkdir()
    onnx.save(conv(), str(tmp_path / "blobs" / "m.onnx"), save_as_external_data=True, location="w", size_threshold=0)
    (tmp_path / "snapshot").mkdir()
    for name in ("m.onnx", "w"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    from_files.from_onnx(tmp_path / "p", tmp_path / "snapshot" / "m.onnx")
    _run(tmp_path / "p", "import-onnx")


# Checkpoints


def _checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, content: Any = None) -> Path:
    (folder / "nets.py").write_text(NET)
    torch.save(content or {"state_dict": {f"module.{n}": t for n, t in Net().state_dict().items()}}, folder / "w.pt")
    monkeypatch.chdir(folder)
    return folder / "w.pt"


def test_a_checkpoint_with_samples_runs_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _checkpoint(tmp_path, monkeypatch)
    samples = _samples(tmp_path, x=None, image=np.random.default_rng(0).random((40, 3, 8, 8), "f"))
    written = from_files.from_checkpoint(tmp_path / "p", weights, "nets:build", samples)
    assert {p.name for p in written} == {"pipe.yaml", "task.py", "w.pt", "nets.py", "samples.npz"}
    done = _run(tmp_path / "p", "quantize")
    assert [r.name for r in done.results] == ["import-weights", "export", "fuse", "quantize"]
    assert (_artifact(tmp_path / "p", "import-weights") / "golden.safetensors").is_file()
    made = onnx_files.load(_artifact(tmp_path / "p", "export") / onnx_files.FILE)
    assert made.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("name", ["labels", "target"])
def test_the_answers_have_any_of_their_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, answers = _checkpoint(tmp_path, monkeypatch), np.random.default_rng(0).integers(0, 2, 40)
    image = np.random.default_rng(0).random((40, 3, 8, 8), "f")
    samples = _samples(tmp_path, x=None, label=None, image=image, **{name: answers})
    from_files.from_checkpoint(tmp_path / "p", weights, "nets:build", samples)
    assert name not in (tmp_path / "p" / "pipe.yaml").read_text()
    done = _run(tmp_path / "p", "quantize")
    assert done.results[-1].record is not None and "accuracy_float" in done.results[-1].record.metrics
    single = _samples(tmp_path, x=None, label=None, image=image, **{name: np.array(1)})
    with pytest.raises(ConfigError, match=f"{name} is a single number, expected one answer for each sample"):
        from_files.from_checkpoint(tmp_path / "q", weights, "nets:build", single)


def test_the_answers_of_an_onnx_model_have_any_of_their_names_that_is_no_input(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, float[n,4] labels) => (float[n,4] y)
        { y = Add (x, labels) }"""
    )
    x, answers = np.eye(4, dtype="f")[[0, 2, 1, 3, 0, 2]], np.array([0, 2, 1, 3, 0, 1])
    np.savez(tmp_path / "s.npz", x=x, labels=np.zeros_like(x), target=answers)
    from_files.from_onnx(tmp_path / "p", _model(tmp_path, given), tmp_path / "s.npz")
    done = _run(tmp_path / "p", "quantize", sets=("quantize.mode=fp16",))
    assert done.results[-1].record is not None and done.results[-1].record.metrics["accuracy"] == pytest.approx(5 / 6)


def test_of_several_outputs_the_metric_of_a_checkpoint_takes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = _checkpoint(tmp_path, monkeypatch)
    image = np.random.default_rng(0).random((40, 3, 8, 8), "f")
    from_files.from_checkpoint(tmp_path / "p", weights, "nets:build", _samples(tmp_path, x=None, image=image))
    hooks: dict[str, Any] = {}
    text = (tmp_path / "p" / "task.py").read_text()
    exec(text[text.index("def metric") :], hooks)
    logits, answers = np.eye(4), np.array([0, 1, 2, 0])
    assert hooks["metric"](logits, answers) == hooks["metric"]((logits, image), answers) == {"accuracy": 0.75}


def test_without_samples_an_example_has_to_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_files.from_checkpoint(tmp_path / "p", _checkpoint(tmp_path, monkeypatch), "nets:Net", trust=True)
    text = (tmp_path / "p" / "task.py").read_text()
    assert "example_inputs() must be added" in text and "trust: true" in (tmp_path / "p" / "pipe.yaml").read_text()
    (tmp_path / "p" / "task.py").write_text(
        text + "\n\ndef example_inputs():\n    import torch\n    return (torch.rand(2, 3, 8, 8),)\n"
    )
    _run(tmp_path / "p", "import-weights")


@pytest.mark.parametrize("spec", ["torch.nn:Linear", "nets:model", "nets:Net.make"])
def test_factories_of_every_kind(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _checkpoint(tmp_path, monkeypatch)
    from_files.from_checkpoint(tmp_path / "p", weights, spec)
    compile((tmp_path / "p" / "task.py").read_text(), "task.py", "exec")
    assert (tmp_path / "p" / "nets.py").is_file() == spec.startswith("nets")


def test_a_package_comes_with_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _checkpoint(tmp_path, monkeypatch)
    for name in ("zoo/__init__.py", "zoo/small/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "nets.py").rename(tmp_path / "zoo" / "small" / "nets.py")
    from_files.from_checkpoint(tmp_path / "p", weights, "zoo.small.nets:build")
    assert (tmp_path / "p" / "zoo" / "small" / "nets.py").is_file()


# Mistakes


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    given = _model(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "m.onnx").touch()
    with pytest.raises(ConfigError, match="it is there already"):
        from_files.from_onnx(tmp_path / "p", given)
    assert not (tmp_path / "p" / "pipe.yaml").exists()
    with pytest.raises(ConfigError, match="a file, not a folder"):
        from_files.from_onnx(given, given)


def test_a_model_that_lies_in_the_project_stays(tmp_path: Path) -> None:
    given = _model(tmp_path / "p")
    assert {p.name for p in from_files.from_onnx(tmp_path / "p", given)} == {"pipe.yaml", "task.py"}
    _run(tmp_path / "p", "import-onnx")


def test_what_is_wrong_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _checkpoint(tmp_path, monkeypatch)
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff")
    (tmp_path / "bad.npz").write_bytes(b"no")
    wrong = [
        (lambda: from_files.from_onnx(tmp_path / "p", tmp_path / "none.onnx"), ConfigError, "no such file"),
        (lambda: from_files.from_onnx(tmp_path / "p", tmp_path / "bad.onnx"), StageError, "not a readable ONNX file"),
        (lambda: from_files.from_onnx(tmp_path / "p", _model(tmp_path), tmp_path / "bad.npz"), ConfigError,
         "plain arrays"),
        (lambda: from_files.from_onnx(tmp_path / "p", _model(tmp_path), _samples(tmp_path, z=np.zeros(40))),
         ConfigError,
         "no input 'z'"),
        (lambda: from_files.from_checkpoint(tmp_path / "p", weights, "nets"), ConfigError, "package.module:factory"),
        (lambda: from_files.from_checkpoint(tmp_path / "p", weights, "nowhere:build"), ConfigError,
         "no module 'nowhere'"),
        (lambda: from_files.from_checkpoint(tmp_path / "p", tmp_path / "none.pt", "nets:Net"), ConfigError,
         "no such file"),
        (lambda: from_files.from_checkpoint(tmp_path / "p", _file(tmp_path / "e.pt"), "nets:Net"), StageError,
         "0 bytes"),
        *((lambda f=f, s=s: f(_samples(tmp_path, 6, **s)), ConfigError, said) for f in (
            lambda data: from_files.from_onnx(tmp_path / "p", _model(tmp_path), data),
            lambda data: from_files.from_checkpoint(tmp_path / "p", weights, "nets:Net", data),
        ) for s, said in (
            ({"label": np.zeros(5)}, "saw x 6, label 5"),
            ({"label": np.array(1)}, "one answer for each sample"),
            ({"x": np.full((6, 3, 8, 8), np.nan, "f")}, r"x\[0, 0, 0, 0\] is nan"),
            ({"x": np.full((6, 3, 8, 8), 1e39)}, "expected float32"),
        )),
    ]  # fmt: skip
    for act, kind, said in wrong:
        with pytest.raises(kind, match=said):
            act()
        assert not (tmp_path / "p").exists()


def test_stages_before_the_import_do_not_belong(tmp_path: Path) -> None:
    from_files.from_onnx(tmp_path / "p", _model(tmp_path))
    with pytest.raises(ConfigError, match="the project starts at import-onnx, after this stage"):
        projects.load(tmp_path / "p", ("train.epochs=2",))
    with pytest.raises(ConfigError, match="already starts at"):
        projects.load(tmp_path / "p", ("import-weights.file=w.pt",))


@pytest.mark.parametrize(
    "words",
    [
        ["--from-onnx", "m.onnx", "--template", "mnist"],
        ["--from-onnx", "m.onnx", "--from-checkpoint", "w.pt", "--model", "a:b"],
        ["--from-checkpoint", "w.pt"],
        ["--model", "a:b"],
        ["--data", "s.npz"],
    ],
)
def test_options_that_contradict_each_other(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "layerline.cli", "init", "p", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "error" in done.stderr and not (tmp_path / "p").exists()


def test_without_samples_what_is_needed_first_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _checkpoint(tmp_path, monkeypatch)
    words = ["-m", "layerline.cli", "init", "p", "--from-checkpoint", str(weights), "--model", "nets:Net"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "next: add example_inputs() to p/task.py" in done.stdout
    assert "# dynamic:" in (tmp_path / "p" / "pipe.yaml").read_text() and projects.load(tmp_path / "p").stages
