"""Flipped samples as pictures and texts, on images and answers written by hand."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerline.calib.samples import Batch
from layerline.parity import flipped_samples
from layerline.parity.evaluate import Predictions
from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task


def pixels(uri: str) -> Any:
    """The pixels of a data URI, read by the rules of PNG; the checksums must hold."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    parts, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(name + content),)
        parts[name] = content
        at += 12 + length
    width, height, depth, kind, *_ = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    channels = {0: 1, 2: 3}[kind]
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert depth == 8 and not lines[:, 0].any()
    image = lines[:, 1:].reshape(height, width, channels)
    return image[:, :, 0] if channels == 1 else image


def task(tmp_path: Path, text: str = "") -> Task:
    (tmp_path / "task.py").write_text(text)
    return Task(tmp_path / "task.py")


def show(inputs: Any, task: Task, numbers: tuple[int, ...] = (1,)) -> list[dict[str, Any]]:
    """The rows of flips of these samples; two models name class 0 and class 2. A batch is two samples and a filler."""
    count = len(inputs)
    batches = []
    for start in range(0, count, 2):
        rows = inputs[start : start + 2]
        batches.append(Batch({"x": np.concatenate([rows, rows[:1]])}, None, len(rows), filler=1))
    scores = {"float": np.eye(3)[[0] * count], "result": np.eye(3)[[2] * count]}
    flips = [{"sample": n, "metric": "accuracy", "became": "wrong", "slice": 7} for n in numbers]
    return list(flipped_samples.shown(flips, Predictions(scores, None), batches, task))


def test_an_image_becomes_a_picture_with_both_answers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(5, 1, 8, 6)).astype(np.float32)
    first, second = show(images, task(tmp_path), (1, 4))
    assert {key: first[key] for key in first if key != "picture"} == {
        "sample": 1, "metric": "accuracy", "became": "wrong", "slice": 7, "float": 0, "converted": 2,
    }  # fmt: skip
    for row, image in ((first, images[1, 0]), (second, images[4, 0])):
        low, high = image.min(), image.max()
        np.testing.assert_array_equal(pixels(row["picture"]), np.rint(255 * (image - low).astype(float) / (high - low)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_bytes_in_colour_stay_as_they_are_and_large_images_are_thinned(channels_last: bool, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(2, 100, 130, 3), dtype=np.uint8)
    given = images if channels_last else np.moveaxis(images, 3, 1)
    (row,) = show(given, task(tmp_path))
    np.testing.assert_array_equal(pixels(row["picture"]), images[1, ::3, ::3])


@pytest.mark.parametrize("shape", [(2,), (2, 5), (2, 5, 3, 3), (2, 2, 8, 8), (2, 3, 2, 8)])
def test_what_is_no_image_is_not_shown(shape: tuple[int, ...], tmp_path: Path) -> None:
    assert show(np.zeros(shape, np.float32), task(tmp_path)) == []


def test_constant_and_nonfinite_images_are_shown(tmp_path: Path) -> None:
    images = np.full((2, 1, 4, 4), np.nan, np.float32)
    (row,) = show(images, task(tmp_path))
    assert not pixels(row["picture"]).any()


def test_show_gives_a_text_or_an_image(tmp_path: Path) -> None:
    tokens = np.array([[1, 2], [3, 4]])
    (row,) = show(tokens, task(tmp_path, "def show(sample): return ' '.join(f'w{t}' for t in sample)"))
    assert row["text"] == "w3 w4"
    (row,) = show(tokens, task(tmp_path, "def show(sample): return '\\x1b' + 'x' * 9999"))
    assert row["text"].startswith("\\x1bxxx") and len(row["text"]) == flipped_samples.CHARACTERS
    (row,) = show(tokens, task(tmp_path, "import numpy\ndef show(sample): return numpy.eye(4)"))
    np.testing.assert_array_equal(pixels(row["picture"]), 255 * np.eye(4))
    with pytest.raises(TaskError, match="it returned int, expected text or an image"):
        show(tokens, task(tmp_path, "def show(sample): return 3"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[[1, 2], [3]]", "inhomogeneous"),
        ("numpy.zeros((5000, 4))", r"its shape is \(5000, 4\)"),
        ("numpy.zeros((8, 8, 4))", r"its shape is \(8, 8, 4\)"),
        ("{}", "it returned dict"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_show_can_not_return_is_named(returned: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message) as error:
        show(np.zeros((2, 3)), task(tmp_path, f"import numpy\ndef show(sample): return {returned}"))
    assert "show" in str(error.value)


def test_masks_and_tensors_with_gradients_are_images(tmp_path: Path) -> None:
    (row,) = show(np.zeros((2, 3)), task(tmp_path, "import numpy\ndef show(sample): return numpy.eye(4) > 0"))
    np.testing.assert_array_equal(pixels(row["picture"]), 255 * np.eye(4))
    text = "import torch\ndef show(sample): return torch.eye(4, requires_grad=True)"
    (row,) = show(np.zeros((2, 3)), task(tmp_path, text))
    np.testing.assert_array_equal(pixels(row["picture"]), 255 * np.eye(4))


def test_show_can_not_change_the_samples(tmp_path: Path) -> None:
    inputs = np.ones((2, 4, 4))
    batch = Batch({"x": inputs}, None, 2, filler=0)
    scores = {"float": np.eye(3)[[0, 0]], "result": np.eye(3)[[2, 2]]}
    flips = [{"sample": 1, "metric": "accuracy", "became": "wrong"}]
    hook = task(tmp_path, "def show(sample):\n    sample *= 0\n    return sample")
    assert len(flipped_samples.shown(flips, Predictions(scores, None), [batch], hook)) == 1
    assert inputs.min() == 1


def test_the_number_of_samples_is_bounded(tmp_path: Path) -> None:
    images = np.zeros((50, 1, 4, 4), np.float32)
    rows = show(images, task(tmp_path), tuple(range(49, 0, -1)))
    assert [row["sample"] for row in rows] == list(range(50 - flipped_samples.MOST, 50))
