"""What the single pass over calibration data keeps beside the histograms: a few samples, shapes and input peaks.

Ranges and whole plans are tried on the samples. Shapes and peaks show whether calibration data resembles the data that
the model is evaluated on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from layerline.calib.samples import Batch, Input

BATCHES, ROWS = 8, 4
"""Batches kept, and rows of each where batches can be cut. Smaller batches are kept until they hold as many rows
together. Memory and time therefore don't grow with the data."""


class Survey:
    """Keeps batches evenly spread over all that pass: every batch at first, later every 2nd, 4th, …

    Args:
        inputs: the model's inputs; where its batch axis is open, only the first rows of a batch are kept.

    Attributes:
        shapes: of each input, all that came.
        peaks: the greatest finite |x| of each floating-point input.
        rows: samples in all batches that came.
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        leading = {i.shape[0] for i in inputs if i.shape}
        self._open = len(leading) == 1 and isinstance(next(iter(leading)), str)
        self._inputs = frozenset(i.name for i in inputs if i.shape)
        self._kept: list[Batch] = []
        self._count = 0
        self._stride = 1
        self.rows = 0
        self.shapes: dict[str, set[tuple[int, ...]]] = {}
        self.peaks: dict[str, float] = {}

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes the batches on and keeps some of them."""
        for batch in batches:
            if self._count % self._stride == 0:
                self._kept.append(self._cut(batch))
            self._count += 1
            self.rows += batch.rows
            self._note(batch)
            if self._is_full():
                self._kept = self._kept[::2]
                self._stride *= 2
            yield batch

    def batches(self) -> list[Batch]:
        """The batches kept, in the order of the data."""
        return list(self._kept)

    def _is_full(self) -> bool:
        rows = sum(batch.rows for batch in self._kept)
        return len(self._kept) > BATCHES and rows > BATCHES * ROWS

    def _note(self, batch: Batch) -> None:
        for name, array in batch.feed.items():
            self.shapes.setdefault(name, set()).add(array.shape)
            if array.dtype.kind == "f":
                finite = array
                if not np.isfinite(array.sum()):
                    finite = array[np.isfinite(array)]
                peak = max(-float(finite.min(initial=0.0)), float(finite.max(initial=0.0)))
                self.peaks[name] = max(self.peaks.get(name, 0.0), peak)

    def _cut(self, batch: Batch) -> Batch:
        if not self._open or batch.filler or batch.rows <= ROWS:
            return batch
        if any(batch.feed[name].shape[0] != batch.rows for name in self._inputs):
            return batch
        feed = dict(batch.feed)
        for name in self._inputs:
            # A view would keep the whole batch in memory.
            feed[name] = batch.feed[name][:ROWS].copy()
        return Batch(feed, None, ROWS)
