"""Files that ship inside packages, as their makers wrote them, from the file to the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerline.pipeline.config import project as projects
from layerline.pipeline.init import from_files
from layerline.pipeline.run.outcome import Outcome
from layerline.pipeline.run.runner import Runner
from layerline.views.terminal import Silent

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)


def _floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("f")


def _ocr(name: str) -> str:
    return f"rapidocr_onnxruntime/models/{name}_infer.onnx"


def _silero(name: str) -> str:
    return f"silero_vad/data/silero_vad{name}.onnx"


STATE = {"input": _floats(12, 576) / 10, "state": _floats(12, 2, 1, 128)}
ONE = ("dims.batch=1", "dims.sequence=576")
FILES = {
    "angle of text": (_ocr("ch_ppocr_mobile_v2.0_cls"), {"x": _floats(12, 3, 48, 192)}, ()),
    "detector": (_ocr("ch_PP-OCRv4_det"), {"x": _floats(6, 3, 64, 96)}, ()),
    "recogniser": (_ocr("ch_PP-OCRv4_rec"), {"x": _floats(6, 3, 48, 96)}, ("dims.x_dim2=48",)),
    "pitch": (
        "swift_f0/model.onnx",
        {
            "audio": np.sin(np.arange(8000, dtype="f") / 8).reshape(4, 2000),
            "fmin": np.full(4, 46.9, "f"),
            "fmax": np.full(4, 2093.8, "f"),
        },
        (),
    ),
    "speech, a sequence": (
        _silero("_16k_sequence"),
        {"input": _floats(12, 576) / 10, "h": _floats(12, 1, 1, 128), "c": _floats(12, 1, 1, 128)},
        (),
    ),
    "speech, without If": (_silero("_op18_ifless"), {**STATE, "sr": np.full(12, 16000)}, ()),
    "speech, unrolled": (_silero("_openvino_16k"), STATE, ()),
    "speech, half": (_silero("_half"), STATE, ONE),
    "speech, an If in an If": (
        _silero(""),
        {**STATE, "sr": np.full(12, 16000)},
        ("values={sr: 16000}", "dims={input_dim0: 1, state_dim1: 1, input_dim1: 576}"),
    ),
}


def _find(path: str) -> Path:
    package = path.partition("/")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent.parent / path


def _run(root: Path, *sets: str) -> Outcome:
    engine = importlib.util.find_spec("tensorrt_rtx") is not None
    return Runner(projects.load(root, sets), Silent()).run(None if engine else ["quantize"])


@pytest.mark.parametrize("what", FILES)
def test_from_the_file_to_the_engine(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, samples, config = FILES[what]
    source = _find(path)
    np.savez(tmp_path / "samples.npz", **samples)
    from_files.from_onnx(tmp_path / "p", source, tmp_path / "samples.npz")
    if any(c.startswith("values") for c in config):  # a constant is no input any more
        text = (tmp_path / "p" / "task.py").read_text()
        (tmp_path / "p" / "task.py").write_text(text.replace("dict(file)", "{n: file[n] for n in ('input', 'state')}"))
    monkeypatch.chdir(tmp_path / "p")
    # The pitch is read around the greatest of many bins, beside bins masked with -inf: rounding moves the greatest.
    for mode in ("none",) if what == "pitch" else ("fp16", "int8"):
        done = _run(tmp_path / "p", f"quantize.mode={mode}", *(f"import-onnx.{c}" for c in config))
        assert done.passed, [f"{r.name}: {r.error}" for r in done.results if r.error]
    report = Runner(projects.load(tmp_path / "p"), Silent()).ledger
    first = report.report(next(r.record for r in done.results if r.record and r.name == "import-onnx"))
    assert len(first.records) > 3 and first.passed
