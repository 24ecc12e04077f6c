"""The stage from which on outputs hold NaN or Inf, and the first value of its model that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.calib.samples import Batch
from layerline.compare.value_pairs import computed_values
from layerline.graph.io import module_identity, onnx_files
from layerline.graph.quantization import convert
from layerline.pipeline.diagnosis.evidence import NonFinite
from layerline.pipeline.errors import PipeError
from layerline.pipeline.inputs.batches import leaves

Mask = npt.NDArray[np.bool_]


class NonFiniteWatch:
    """Looks at the outputs of all stages batch by batch, for NaN and Inf that the stage before does not have."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.feeds: dict[str, Feed] = {}
        """By stage, the first batch on which it makes an output NaN or Inf."""
        self._folders = folders
        self._counts: dict[str, int] = {}
        self._samples = 0

    def __call__(self, batch: Batch, outputs: Mapping[str, Any]) -> None:
        """Takes the outputs of every stage, in order, for one batch."""
        before: Mask | None = None
        for stage, arrays in outputs.items():
            nan = _samples_with(np.isnan, arrays)
            bad = nan | _samples_with(np.isinf, arrays)
            # Inf of the first stage is no fault: a model may mask its outputs with it.
            new = nan
            if before is not None and len(before) == len(bad):
                new = bad & ~before
            elif before is not None:
                new = np.zeros_like(bad)
            before = bad
            if new.any():
                self._counts[stage] = self._counts.get(stage, 0) + int(new.sum())
                self.feeds.setdefault(stage, batch.feed)
        if before is not None:
            self._samples += len(before)

    def by_stage(self) -> dict[str, NonFinite]:
        """What each stage did, in the order of the stages."""
        result: dict[str, NonFinite] = {}
        for stage in self._folders:
            if stage not in self._counts:
                continue
            path = _model_from(stage, self._folders)
            value, module = "", ""
            if path is not None:
                value, module = _first_value(path, self.feeds[stage])
            result[stage] = NonFinite(count=self._counts[stage], samples=self._samples, value=value, module=module)
        return result


def _samples_with(test: Any, arrays: Any) -> Mask:
    """Whether any element of a sample's outputs passes the test."""
    rows: list[npt.NDArray[Any]] = [array for array in leaves(arrays) if np.ndim(array)]
    if not rows:
        return np.zeros(0, bool)
    result = np.zeros(len(rows[0]), bool)
    for array in rows:
        if np.issubdtype(array.dtype, np.inexact) and len(array) == len(result):
            result |= test(array).reshape(len(array), -1).any(axis=1)
    return result


def _model_from(stage: str, folders: Mapping[str, Path]) -> Path | None:
    """The stage's ONNX file. A torch stage has none: the first one after it computes the same values."""
    names = list(folders)
    for name in names[names.index(stage) :]:
        path = folders[name] / onnx_files.FILE
        if path.is_file():
            return path
    return None


def first_nonfinite(names: Sequence[str], values: Mapping[str, npt.NDArray[Any]]) -> str:
    """The first of these values that holds NaN or Inf; empty if none does."""
    for name in names:
        array = values[name]
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            return name
    return ""


def _first_value(path: Path, feed: Feed) -> tuple[str, str]:
    """Name and module of the first value that is NaN or Inf on a feed; empty if none is."""
    model = onnx_files.read_model(path)
    names = computed_values(model.graph)
    try:
        values = OnnxRuntime().open(convert.runnable(model), names).run(feed)
    except PipeError:  # a value that can't be an output, such as a sequence
        return "", ""
    name = first_nonfinite(names, values)
    return name, module_identity.modules(model).get(name, "")
