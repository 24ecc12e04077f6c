"""What shape inference claims of the models of onnx's own tests, beside what onnxruntime computes at varied sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.backend.test.loader import load_model_tests

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.analysis import shape_inference
from layerline.graph.analysis.symbolic_sizes import sizes
from layerline.graph.io.canonicalize import prepare
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.io.opset import OLDEST, opset_of
from layerline.pipeline.errors import StageError
from tests.forms import proto

Arrays = dict[str, Any]
# Every so many-th model: enough to see each operator, in a minute.
STEP = 6
# onnxruntime gives 1 where the window is larger than what it slides over, which has no size in ONNX.
WINDOWED = ("pool", "Pool")


def _varied(feed: Arrays) -> Iterator[Arrays]:
    """The feed as it is, with each axis cut down to 1, and with the same axis of every input one longer."""
    yield feed
    for name, array in feed.items():
        for axis in range(array.ndim):
            yield {**feed, name: array.take([0], axis)}
    for axis in range(4):
        longer = dict(feed)
        for name, array in feed.items():
            if axis < array.ndim:
                longer[name] = np.concatenate([array, array.take([0], axis)], axis)
        yield longer


def _symbolic(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose inputs have a symbol for each size and that declares nothing of other values."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.Clear()
            dim.dim_param = f"{value.name}_{axis}"
    del copy.graph.value_info[:]
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    return copy


def _wrong(claim: int | str, actual: int, names: dict[str, int]) -> bool:
    """Whether a size is another than claimed; the first size by a name that was made up says what the name means."""
    if isinstance(claim, int):
        return claim != actual
    dim = ir.SymbolicDim(claim)
    try:
        unknown = dim.free_symbols() - names.keys()
    except ValueError:  # sympy's ceiling, which onnx_ir writes and does not read
        return False
    if unknown == {claim}:
        names[claim] = actual
    return not unknown and dim.evaluate(names) != actual


@pytest.mark.slow
def test_every_claimed_size_is_the_one_that_the_runtime_computes() -> None:
    wrong: list[object] = []
    checked = 0
    cases = [case for case in load_model_tests(kind="node") if not any(word in case.name for word in WINDOWED)]
    for case in cases[::STEP]:
        feeds = [
            dict(zip([i.name for i in proto(case.model).graph.input], data[0], strict=True)) for data in case.data_sets
        ]
        arrays = [isinstance(value, np.ndarray) and value.size > 0 for feed in feeds for value in feed.values()]
        if not all(arrays) or not feeds or opset_of(case.model) < OLDEST:
            continue
        try:
            prepared, _ = prepare(_symbolic(case.model))
            model = as_ir(prepared)
            shape_inference.infer(model)
            claims = {o.name: sizes(o) for n in model.graph for o in n.outputs if o.name and sizes(o) is not None}
            session = OnnxRuntime(few_runs=True).open(prepared, tuple(claims))
        except StageError:
            continue
        for feed in _varied(feeds[0]):
            try:
                outputs = session.run(feed)
            except StageError:
                continue
            names = {f"{name}_{axis}": n for name, array in feed.items() for axis, n in enumerate(array.shape)}
            for name, claim in claims.items():
                actual = np.shape(outputs[name])
                checked += 1
                fits = claim is not None and len(claim) == len(actual)
                if not fits or any(map(_wrong, claim or (), actual, repeat(names))):
                    wrong.append((case.name, name, claim, actual))
    assert not wrong, wrong[:5]
    assert checked > 1000
