"""What holds for every backend: found by name, honest about what it lacks, the same numbers where it runs."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from layerline import backends
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.torch import Torch
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


class Net(nn.Module):
    """Parameters, buffers saved and not, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("gain", torch.full((1,), 2.0), persistent=False)

    def forward(self, x, shift):
        return torch.relu(self.norm(self.conv(x))) * self.gain + torch.tensor(3.0), shift * 2


def test_an_exported_program_runs_under_its_own_names() -> None:
    net, x, shift = Net().eval(), torch.randn(2, 3, 8, 8), torch.ones(2)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(net, (x, shift)), buffer)
    session = Torch().open(buffer.getvalue(), ["conv2d", "relu", "no_such_node"])
    seen = session.run({"x": x.numpy(), "shift": shift.numpy()})
    assert session.inputs == ["x", "shift"] and list(seen) == session.outputs
    with torch.no_grad():
        expected = (*net(x, shift), net.conv(x), net.norm(net.conv(x)).relu())
        for name, array in zip(session.outputs, expected, strict=True):
            np.testing.assert_allclose(seen[name], array.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(StageError, match="missing"):
        session.run({"x": x.numpy()})
    with pytest.raises(StageError, match="could not run"):
        session.run({"x": x.numpy()[0, :1], "shift": shift.numpy()})
    with pytest.raises(StageError, match="can't load"):
        Torch().open(b"no program")


def test_an_output_that_numpy_lacks_is_a_stage_error() -> None:
    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16()

    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Narrow(), (torch.ones(2),)), buffer)
    session = Torch().open(buffer.getvalue())
    with pytest.raises(StageError, match=r"could not run the program.*BFloat16"):
        session.run({session.inputs[0]: np.ones(2, np.float32)})
