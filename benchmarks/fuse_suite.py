"""onnx's own backend suite: every model that onnxruntime runs must still be right after `fuse` with all rules on.

    python benchmarks/fuse_suite.py [NAME…]

Prints what was wrong, if anything, and ends in one JSON line: passed (`undone`: right, because a rewrite was taken
back), declined by onnxruntime, random, refused by us, wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.fusion.fuse import fuse
from layerline.graph.fusion.rules import RULES
from layerline.graph.io.ir_convert import as_ir
from layerline.pipeline.errors import PipeError

KINDS = ("node", "pytorch-converted", "pytorch-operator", "simple")


def cases(names: set[str]) -> Iterator[tuple[str, Any]]:
    """Kind and test case of every model, or of those asked for."""
    for kind in KINDS:
        for case in load_model_tests(kind=kind):
            if not names or case.name in names:
                yield kind, case


def load(case: Any) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """The model, and the inputs of each data set."""
    model = case.model or onnx.load(str(Path(case.model_dir) / "model.onnx"))
    stored = {t.name for t in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in stored]
    if case.data_sets:
        names = [i.name for i in inputs]
        return model, [dict(zip(names, given, strict=True)) for given, _ in case.data_sets]
    folders = sorted(Path(case.model_dir).glob("test_data_set_*"))
    return model, [{i.name: _value(data / f"input_{n}.pb", i.type) for n, i in enumerate(inputs)} for data in folders]


def _value(path: Path, kind: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if which == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def verdict(case: Any, fired: Counter[str]) -> str:
    """`passed`, or what kept it from passing."""
    try:
        model, data = load(case)
        session = OnnxRuntime().open(model.SerializeToString())
        before = [session.run(feed) for feed in data]
    except Exception:  # noqa: BLE001 - whatever the runtime or the case's own files can't do is not ours
        return "declined by onnxruntime"
    if drawn(as_ir(model)):
        return "random"
    try:
        fused = fuse(model, data)
    except PipeError as error:
        return f"refused: {error}"
    fired.update(f.site.rule for f in fused.firings)
    after = OnnxRuntime().open(fused.model)
    for feed, expected in zip(data, before, strict=True):
        outputs = after.run(feed)
        for name, value in expected.items():
            if not _same(value, outputs.get(name)):
                return f"wrong: output {name}"
    return f"undone: {fused.undone[0].firing.site}" if fused.undone else "passed"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    if a is None or b is None:
        return a is b
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.dtype.kind in "fc":
        return np.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True)
    return np.array_equal(x, y)


def main(names: list[str]) -> None:
    start, count, fired = time.perf_counter(), Counter[str](), Counter[str]()
    for kind, case in cases(set(names)):
        said = verdict(case, fired)
        count[said.split(":")[0]] += 1
        if said not in ("passed", "declined by onnxruntime", "random"):
            print(f"{kind} {case.name}: {said}", flush=True)
    total = sum(count.values())
    print(
        json.dumps(
            {
                "models": total,
                **count,
                "wrong": count["wrong"],
                "rules": len(RULES),
                "fired": dict(fired),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
