"""What holds for every backend: found by name, honest about what it lacks, the same numbers where it runs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from layerline import backends
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from tests.backends import models

ONNX = ["onnxruntime", "openvino", "tensorrt", "tensorrt-rtx"]


def opened(name: str, *args, **options):
    try:
        return backends.get(name).open(*args, **options)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted(backends.BACKENDS))
def test_each_is_found_and_says_in_one_sentence_what_it_lacks(name) -> None:
    told = ""
    try:
        assert backends.get(name).name == name
    except Unavailable as error:
        told = str(error)
    assert not told or (told.startswith(f"backend {name}: ") and "\n" not in told)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no backend is called 'onnxrt'\n  did you mean 'onnxruntime'\?"):
        backends.get("onnxrt")


@pytest.mark.parametrize("name", ONNX)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_outputs_and_taps_agree_with_numpy(tmp_path, name, as_bytes) -> None:
    if as_bytes and name.startswith("tensorrt"):
        pytest.skip("bytes are an engine to TensorRT")
    proto = models.model(
        [models.node("MatMul", ["x", "w"], ["m"]), models.node("Relu", ["m"], ["y"])],
        [("x", models.F, [2, 3])],
        [("y", models.F, [2, 4])],
        {"w": models.WEIGHT.ravel()[:12].reshape(3, 4)},
    )
    onnx.save(proto, str(tmp_path / "model.onnx"))
    session = opened(name, proto.SerializeToString() if as_bytes else tmp_path / "model.onnx", ["m", "no_such_value"])
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    seen = session.run({"x": x})
    product = x @ models.WEIGHT.ravel()[:12].reshape(3, 4)
    assert session.inputs == ["x"] and list(seen) == session.outputs == ["y", "m"]
    np.testing.assert_allclose(seen["m"], product, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(seen["y"], product.clip(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_wrong_names_and_unreadable_models_are_stage_errors(tmp_path, name) -> None:
    session = opened(name, models.conv().SerializeToString())
    with pytest.raises(StageError, match=r"unknown: \['z'\], missing: \['x'\]"):
        session.run({"z": np.zeros(1)})
    with pytest.raises(StageError, match="could not run"):
        session.run({"x": np.zeros((1, 5, 8, 8), np.float32)})
    with pytest.raises(StageError, match="could not run"):
        session.run({"x": np.array([object()])})
    (tmp_path / "model.onnx").write_bytes(b"no model")
    for taps in ([], ["x"]):
        with pytest.raises(StageError, match=r"model\.onnx: .*refuses the model"):
            opened(name, tmp_path / "model.onnx", taps)


def test_taps_of_a_model_with_external_data(tmp_path, monkeypatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.conv(), str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    x = {"x": np.ones((2, 3, 8, 8), np.float32)}
    expected = OnnxRuntime().open(models.conv().SerializeToString(), ["c"]).run(x)
    monkeypatch.chdir(tmp_path.parent)
    for place in (path, path.relative_to(tmp_path.parent)):
        seen = OnnxRuntime().open(place, ["c"]).run(x)
        np.testing.assert_array_equal(seen["c"], expected["c"])
