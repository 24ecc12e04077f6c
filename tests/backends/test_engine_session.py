"""The session around an engine, on an engine and a device that stand in for the real ones."""

from __future__ import annotations

import numpy as np
import pytest

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.tensorrt.engine_session import EngineSession
from layerline.backends.tensorrt.profiles import Sizes, resolve
from layerline.pipeline.errors import StageError
from tests.backends import models
from tests.backends.stand_ins import Engine, HostMemory

PROFILES = resolve({"x": ("batch", 3, 8, 8)}, {}, [{"batch": Sizes(1, 1, 4)}, {"batch": Sizes(1, 8, 32)}])


def session(proto=None, profiles=PROFILES) -> tuple[EngineSession, Engine, HostMemory]:
    engine = Engine((proto or models.conv()).SerializeToString(), profiles)
    memory = HostMemory()
    return EngineSession(engine, memory), engine, memory


def image(n: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 3, 8, 8)).astype(dtype)


@pytest.mark.parametrize(("n", "profile"), [(1, 0), (4, 0), (5, 1), (32, 1)])
def test_it_runs_every_size_with_the_profile_that_fits_best(n, profile) -> None:
    made, engine, memory = session()
    seen = made.run({"x": image(n)})
    expected = OnnxRuntime().open(models.conv().SerializeToString()).run({"x": image(n)})
    np.testing.assert_array_equal(seen["y"], expected["y"])
    assert engine.contexts[0].profile == profile
    assert memory.most == 2 and not memory.taken


def test_a_transposed_view_is_sent_in_its_own_order() -> None:
    made, _, _ = session()
    view = np.ascontiguousarray(image(2).transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert not view.flags.c_contiguous
    np.testing.assert_array_equal(made.run({"x": view})["y"], made.run({"x": image(2)})["y"])


def test_static_and_scalar_inputs_need_no_profile() -> None:
    scale = models.model(
        [models.node("Mul", ["x", "k"], ["y"])],
        [("x", models.F, [2, 3]), ("k", models.F, [])],
        [("y", models.F, [2, 3])],
    )
    made, _, _ = session(scale, ())
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(made.run({"x": x, "k": np.float32(3)})["y"], 3 * x)
    with pytest.raises(StageError, match=r"input x: .*\(3, 3\) fits no profile"):
        made.run({"x": np.ones((3, 3), np.float32), "k": np.float32(3)})


@pytest.mark.parametrize(
    ("feed", "told"),
    [
        ({"x": image(0)}, "input x: the shape .* has no elements"),
        (
            {"x": image(33)},
            r"input x: the shape \(33, 3, 8, 8\) fits no profile of the engine; the nearest is profile 1",
        ),
        ({"x": image(2)[0]}, "input x: the shape"),
        ({"x": image(2, np.float64)}, "input x: is float64; the engine takes float32"),
        ({"x": image(2, np.float16)}, "input x: is float16"),
        ({}, r"missing: \['x'\]"),
        ({"x": image(1), "z": image(1)}, r"unknown: \['z'\]"),
    ],
)
def test_a_wrong_feed_is_told_by_name_and_leaves_no_memory(feed, told) -> None:
    made, _, memory = session()
    with pytest.raises(StageError, match=told):
        made.run(feed)
    assert not memory.taken
    made.run({"x": image(3)})  # and the session lives on


@pytest.mark.parametrize(
    "refusing", ["set_optimization_profile_async", "set_input_shape", "set_tensor_address", "execute_async_v3"]
)
def test_whatever_tensorrt_refuses_is_an_error(refusing, monkeypatch) -> None:
    made, engine, memory = session()
    monkeypatch.setattr(engine.contexts[0], refusing, lambda *args: False)
    with pytest.raises(StageError, match=r"TensorRT d(oes|id) not"):
        made.run({"x": image(1)})
    assert not memory.taken


def test_an_output_whose_size_depends_on_the_data_is_refused(monkeypatch) -> None:
    made, engine, _ = session()
    monkeypatch.setattr(engine.contexts[0], "get_tensor_shape", lambda name: (-1, 4))
    with pytest.raises(StageError, match="output y: the size of this output depends on the data"):
        made.run({"x": image(1)})


def test_no_context_is_told(monkeypatch) -> None:
    monkeypatch.setattr(Engine, "create_execution_context", lambda self: None)
    with pytest.raises(StageError, match="no execution context"):
        session()
