"""Every command on files of strangers: a right result or one sentence, and nothing runs, hangs or is touched.

The short form of each test is the same every time; `make test-slow` draws new examples for minutes.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from tests.fuzz import strategies
from tests.fuzz.world import World
from tests.fuzz.zygote import Zygote

_FAST, _SLOW = 2, 60
_LIMITS = ("--set", "import-onnx.max_seconds=20", "--set", "import-onnx.max_memory_gb=0.5")
_READ = [
    ("status",), ("status", "--json"), ("runs",), ("runs", "--json"), ("explain", "import-onnx"),
    ("diff", "import-onnx"), ("diff", "fuse", "--json"), ("report", "-o", "p/r.html"), ("path", "fuse"),
    ("verify",), ("gc", "--dry-run"),
]  # fmt: skip
_NETS = b"from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 2))\n"
_IMPORT: dict[str, Any] = {
    "file": "m.onnx", "data": "s.npz", "opset": 20, "dims": {"n": {"min": 1, "max": 8, "multiple": 1}}, "ranges": {},
    "probes": 4, "tolerance": 1e-3, "max_seconds": 20, "max_memory_gb": 0.5, "values": {}, "external": [],
}  # fmt: skip
_QUANTIZE: dict[str, Any] = {"mode": "int8", "calibrator": "minmax", "skip": [], "ops": ["Conv"]}
_CONFIG: dict[str, Any] = {
    "name": "p", "task": "task.py", "data": ["*.npz"], "import-onnx": _IMPORT, "fuse": {}, "quantize": _QUANTIZE,
}  # fmt: skip
_KEYS = [*_CONFIG, *(f"import-onnx.{field}" for field in _IMPORT), *(f"quantize.{field}" for field in _QUANTIZE)]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose import and fusion have run twice."""
    world = World(tmp_path_factory.mktemp("finished"), zygote)
    model = world.given("m.onnx", strategies.MODELS[1].SerializeToString())
    world.given("s.npz", _samples())
    assert world.pipe("init", "p", "--from-onnx", model.name, "--data", "s.npz").code == 0
    for sets in (("--set", "import-onnx.tolerance=0.1"), ()):
        assert world.pipe("run", "fuse", "-C", "p", *sets).code == 0
    work = world.project / ".layerline" / "work" / ("ab" * 32)
    work.mkdir(parents=True)
    (work / "sets.json").write_text('["import-onnx.probes=2"]')
    return world.project


def _samples() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.ones((4, 4), "f"), label=np.zeros(4, "i8"))
    return file.getvalue()


@pytest.fixture(params=[pytest.param(_FAST, id="fast"), pytest.param(_SLOW, id="slow", marks=pytest.mark.slow)])
def examples(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def _fuzz(count: int, strategy: Any, case: Any, zygote: Zygote) -> None:
    """Calls `case(world, example)` for so many examples, each in a world of its own."""

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=count == _FAST, print_blob=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def every(example: Any) -> None:
        with tempfile.TemporaryDirectory() as root:
            case(World(Path(root) / "w", zygote), example)

    every()


def _model(world: World, content: bytes) -> None:
    for name, data in strategies.OUTSIDE.items():
        world.given(name, data)
    world.given("m.onnx", content)
    if world.pipe("init", "p", "--from-onnx", "m.onnx").code:
        assert not world.project.exists()
        return
    world.pipe("status", "-C", "p")
    if world.pipe("run", "import-onnx", "-C", "p", *_LIMITS).code == 0:
        for command in (("diff", "import-onnx"), ("report", "-o", "p/r.html"), ("verify",)):
            assert world.pipe(*command, "-C", "p").code == 0
        artifact = Path(world.pipe("path", "import-onnx", "-C", "p", *_LIMITS).out.strip())
        onnx.checker.check_model(str(artifact / "model.onnx"))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        onnxruntime.InferenceSession(str(artifact / "model.onnx"), options)
    assert world.pipe("gc", "-C", "p").code == 0


def test_models(examples: int, zygote: Zygote) -> None:
    _fuzz(examples, strategies.models(), _model, zygote)


def test_samples(examples: int, zygote: Zygote) -> None:
    def case(world: World, content: bytes) -> None:
        world.given("m.onnx", strategies.MODELS[1].SerializeToString())
        world.given("s.npz", content)
        if world.pipe("init", "p", "--from-onnx", "m.onnx", "--data", "s.npz").code == 0:
            with np.load(io.BytesIO(content)) as held:
                assert held["x"].shape[1:] == (4,)
            world.pipe("check", "-C", "p")
            world.pipe("run", "import-onnx", "-C", "p", *_LIMITS)

    _fuzz(examples, strategies.samples(), case, zygote)


def _weights(world: World, name: str, content: bytes) -> dict[str, Any] | None:
    """What `import-weights` takes out of a file; None where it refuses it."""
    world.given("nets.py", _NETS)
    world.given("s.npz", _arrays(input=np.ones((4, 4), "f")))
    world.given(name, content)
    code = world.pipe("init", "p", "--from-checkpoint", name, "--model", "nets:build", "--data", "s.npz").code
    if code or world.pipe("run", "import-weights", "-C", "p").code:
        return None
    artifact = Path(world.pipe("path", "import-weights", "-C", "p").out.strip())
    return load((artifact / "model.safetensors").read_bytes())


def _arrays(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_safetensors(examples: int, zygote: Zygote) -> None:
    def case(world: World, content: bytes) -> None:
        taken = _weights(world, "w.safetensors", content)
        if taken is not None:
            stored = load(content)  # what the library refuses is refused
            kept = {n.rpartition("/")[2]: a for n, a in taken.items()}
            assert all(np.array_equal(kept[n], stored[n].astype("f")) for n in strategies.WEIGHTS if n in stored)

    _fuzz(examples, strategies.safetensors(), case, zygote)


def test_checkpoints(examples: int, zygote: Zygote) -> None:
    _fuzz(examples, strategies.checkpoints(), lambda world, content: _weights(world, "w.pt", content), zygote)


def test_configuration(examples: int, zygote: Zygote, finished: Path) -> None:
    def case(world: World, example: tuple[bytes, str]) -> None:
        text, override = example
        world.start_from(finished)
        for command in (("status", "--set", override), ("run", "import-onnx", "--set", override)):
            world.pipe(*command, "-C", "p")
        (world.project / "pipe.yaml").write_bytes(text)
        for command in (("status",), ("explain", "fuse"), ("run", "import-onnx"), ("gc",)):
            world.pipe(*command, "-C", "p")

    drawn = st.tuples(strategies.yaml(_CONFIG), strategies.overrides(_KEYS))
    _fuzz(examples, drawn, case, zygote)


def test_records(examples: int, zygote: Zygote, finished: Path) -> None:
    """One file of the state is another: what it says is refused or shown, and the project can be run again."""
    state = finished / ".layerline"
    names = sorted(p.relative_to(state).as_posix() for p in state.rglob("*.json"))
    changed = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), st.none() | strategies.records((state / name).read_bytes()))
    )

    def case(world: World, example: tuple[str, bytes | None]) -> None:
        name, content = example
        world.start_from(finished)
        path = world.project / ".layerline" / name
        path.unlink()
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        for command in _READ:
            world.pipe(*command, "-C", "p")
        assert world.pipe("run", "fuse", "-C", "p").code == 0
        assert world.pipe("gc", "-C", "p", "--keep", "1").code == 0
        shutil.rmtree(world.project)

    _fuzz(examples, changed, case, zygote)
