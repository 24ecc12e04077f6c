"""What the one pass over calibration data leaves beside the histograms: a few samples, the shapes, the greatest inputs.

Ranges are tried, and outputs measured, on the samples; shapes and inputs tell whether the data is like what the model
will be fed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from layerline.calib.samples import Batch, Input

BATCHES, ROWS = 8, 4
"""At most so many batches, and rows of each where they can be cut: memory and time don't grow with the data."""


class Survey:
    """Keeps batches evenly spread over all that pass, however many come: every one at first, later every 2nd, 4th, …

    Args:
        inputs: the model's inputs; where its batch axis is open, only the first rows of a batch are kept.

    Attributes:
        shapes: of each input, all that came.
        peaks: the greatest finite |x| of each floating-point input.
        rows: samples in all that came.
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        leading = {i.shape[0] for i in inputs if i.shape}
        self._open = len(leading) == 1 and isinstance(next(iter(leading)), str)
        self._inputs = frozenset(i.name for i in inputs if i.shape)
        self._kept: list[Batch] = []
        self._count, self._stride, self.rows = 0, 1, 0
        self.shapes: dict[str, set[tuple[int, ...]]] = {}
        self.peaks: dict[str, float] = {}

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; some are kept on the way."""
        for batch in batches:
            if self._count % self._stride == 0:
                self._kept.append(self._cut(batch))
            self._count, self.rows = self._count + 1, self.rows + batch.rows
            self._note(batch)
            if len(self._kept) > BATCHES:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
            yield batch

    def batches(self) -> list[Batch]:
        """What was kept, in the order of the data."""
        return list(self._kept)

    def _note(self, batch: Batch) -> None:
        for name, array in batch.feed.items():
            self.shapes.setdefault(name, set()).add(array.shape)
            if array.dtype.kind == "f":
                finite = array if np.isfinite(array.sum()) else array[np.isfinite(array)]
                peak = max(-float(finite.min(initial=0.0)), float(finite.max(initial=0.0)))
                self.peaks[name] = max(self.peaks.get(name, 0.0), peak)

    def _cut(self, batch: Batch) -> Batch:
        if not self._open or batch.filler or batch.rows <= ROWS:
            return batch
        if any(batch.feed[name].shape[0] != batch.rows for name in self._inputs):
            return batch
        # A copy: a view would keep the whole batch in memory.
        feed = {k: v[:ROWS].copy() if k in self._inputs else v for k, v in batch.feed.items()}
        return Batch(feed, None, ROWS)
