"""Small models as other people's tools write them, and a project to import them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from layerline.graph.io import onnx_files
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.import_onnx import ImportOnnx

CONV = """
<ir_version: 7, opset_import: ["" : 11]>
g (float[n,3,8,8] x) => (float[n,2] y)
{
  c = Conv <pads = [1,1,1,1]> (x, w, b)
  r = Relu (c)
  p = GlobalAveragePool (r)
  f = Flatten (p)
  y = Softmax <axis = 1> (f)
}
"""


class Quiet:
    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: Any) -> None: ...


def model(text: str, **weights: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """A model in onnx's own text form, with initializers."""
    out = parser.parse_model(text)
    out.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return out


def conv(opset: int = 11) -> onnx.ModelProto:
    """A small classifier with a dynamic batch."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((2, 3, 3, 3)).astype("f"), "b": np.ones(2, "f")}
    return model(CONV.replace("11]", f"{opset}]"), **weights)


def project(root: Path, given: onnx.ModelProto | None, **samples: Any) -> Path:
    """A project's folder with model.onnx and, where there are samples, samples.npz."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "task.py").touch()
    if given is not None:
        onnx.save(given, str(root / "model.onnx"))
    if samples:
        np.savez(root / "samples.npz", **samples)
    return root


def imported(root: Path, given: onnx.ModelProto | None, samples: Any = None, **config: Any) -> tuple[Report, Path]:
    """Runs import-onnx; its report and its artifact's folder."""
    project(root, given, **(samples or {}))
    if samples:
        config["data"] = "samples.npz"
    out, scratch = root / "out", root / "scratch"
    out.mkdir()
    scratch.mkdir()
    stage = ImportOnnx(file="model.onnx", **config)
    report = stage.run(Work(inputs={}, task=Task(root / "task.py"), out=out, scratch=scratch, log=Quiet()))
    return report, out


def same(given: onnx.ModelProto, folder: Path, feed: dict[str, Any]) -> None:
    """Both files give the same on onnxruntime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    readable = onnx.ModelProto()
    readable.CopyFrom(given)
    readable.ir_version = min(given.ir_version, 10)
    a = ort.InferenceSession(readable.SerializeToString(), options).run(None, feed)
    b = ort.InferenceSession(str(folder / onnx_files.FILE), options).run(None, feed)
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
