"""Shows samples whose answer flipped: as pictures where an input is an image, or as the task's show() has them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from layerline.backends.base import Array
from layerline.calib.samples import Batch
from layerline.parity.evaluate import Predictions
from layerline.pipeline.errors import TaskError
from layerline.pipeline.report import Scalar
from layerline.pipeline.task import Task
from layerline.pipeline.untrusted import printable

MOST = 12  # samples
SIDE = 64  # pixels of a picture's longer side; of a larger image every second, third, … pixel is shown
LEAST_SIDE, GREATEST_SIDE = 4, 4096  # of what counts as an image
CHARACTERS = 400  # of a text
_KEPT = ("sample", "metric", "became", "slice")
_CHANNELS = (1, 3)


def shown(
    flips: Sequence[Mapping[str, Scalar]], predictions: Predictions, batches: Iterable[Batch], task: Task
) -> list[dict[str, Scalar]]:
    """The first of the flipped samples that can be shown, with the answers of both models where these are classes.

    Args:
        flips: as `slice_metrics.flipped` gives them.
        batches: the samples that the predictions are of, in the same order.

    Raises:
        TaskError: show() failed, or returned neither text nor an image.
    """
    by_number = {int(flip["sample"] or 0): flip for flip in reversed(flips[:MOST])}
    rows: list[dict[str, Scalar]] = []
    first = 0
    for batch in batches:
        for number in sorted(by_number.keys() & set(range(first, first + batch.rows))):
            # Copies: a show() that writes into its argument must not change the samples that others measure on.
            sample = {name: array[number - first].copy() for name, array in batch.feed.items() if array.ndim}
            display = _display(sample, task)
            if display:
                answers = _answers(predictions, number)
                kept = {name: value for name, value in by_number[number].items() if name in _KEPT}
                rows.append({**kept, **answers, **display})
        first += batch.rows
    return rows


def _display(sample: Mapping[str, Array], task: Task) -> dict[str, Scalar]:
    """A picture or a text; nothing where no input is an image and the task has no show()."""
    if task.has("show"):
        argument: Any = sample
        if len(sample) == 1:
            (argument,) = sample.values()
        result = task.call("show", argument)
        if isinstance(result, str):
            return {"text": printable(" ".join(result.split()), CHARACTERS)}
        with task.blaming("show()"):  # a ragged list, or an array of another library on a device
            if hasattr(result, "detach"):
                result = result.detach().cpu()
            array = np.asarray(result)
        image = _image(array)
        if image is None:
            what = f"it returned {type(result).__name__}, expected text or an image; its shape is {array.shape}"
            hint = f"an image is (height, width), or with 1 or 3 channels; sides of {LEAST_SIDE} to {GREATEST_SIDE}"
            raise TaskError(what, where="show", hint=hint)
        return {"picture": _data_uri(image)}
    for array in sample.values():
        image = _image(array)
        if image is not None:
            return {"picture": _data_uri(image)}
    return {}


def _image(array: Array) -> Array | None:
    """An array as bytes of shape (height, width) or (height, width, 3); None where it is no image.

    Floats and wide integers are stretched between their least and greatest value: they may be normalised in any way.
    """
    if array.dtype.kind not in "fuib":
        return None
    if array.ndim == 3 and array.shape[0] in _CHANNELS:
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,)):
        return None
    height, width = array.shape[:2]
    if not LEAST_SIDE <= min(height, width) <= max(height, width) <= GREATEST_SIDE:
        return None
    stride = -(-max(height, width) // SIDE)
    pixels = array[::stride, ::stride]
    if pixels.dtype == np.uint8:
        return pixels
    pixels = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
    extent = pixels.max() - pixels.min()
    grey: Array = np.rint(255 * (pixels - pixels.min()) / (extent or 1.0)).astype(np.uint8)
    return grey


def _data_uri(image: Array) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def png(image: Array) -> bytes:
    """Bytes of shape (height, width) or (height, width, 3) as a PNG file."""
    height, width = image.shape[:2]
    kind = 2 if image.ndim == 3 else 0  # RGB or grey
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    lines = b"".join(b"\0" + row.tobytes() for row in image)  # 0: a line that is not filtered
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        parts += [struct.pack(">I", len(content)), name, content, struct.pack(">I", zlib.crc32(name + content))]
    return b"".join(parts)


def _answers(predictions: Predictions, number: int) -> dict[str, Scalar]:
    """The class that each model names, where the outputs are one score for each class."""
    answers: dict[str, Scalar] = {}
    for column, model in (("float", "float"), ("converted", "result")):
        outputs = predictions.outputs[model]
        if isinstance(outputs, np.ndarray) and outputs.ndim == 2 and outputs.shape[1] > 1:
            answers[column] = int(outputs[number].argmax())
    return answers
