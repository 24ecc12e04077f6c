"""What the single pass over calibration data keeps beside the histograms: a few samples, shapes and input peaks.

Ranges and whole plans are tried on the samples. Shapes and peaks show whether calibration data resembles the data that
the model is evaluated on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from layerline.calib.named_arrays import Input
from layerline.calib.samples import Batch

# Parts kept, and rows of each: batches are cut into such parts where they can be. Smaller batches are kept until they
# hold as many rows together. Memory and time therefore don't grow with the data.
PARTS, ROWS = 8, 4


class Survey:
    """Keeps parts of batches, evenly spread over all that pass: every part at first, later every 2nd, 4th, …

    Args:
        inputs: the model's inputs; where its batch axis is open, a part has a few rows, else it is a whole batch.

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
            self.add(batch)
            yield batch

    def add(self, batch: Batch) -> None:
        """Notes the batch's shapes and peaks, and keeps parts of it while there is room."""
        step = batch.rows
        if batch.rows > ROWS and self.can_cut(batch):
            step = ROWS
        for start in range(0, batch.rows, step):
            if self._count % self._stride == 0:
                part = batch
                if step < batch.rows:
                    part = self.select(batch, np.arange(start, min(start + ROWS, batch.rows)))
                self._kept.append(part)
            self._count += 1
            # Every second part goes, those that follow are kept half as often: what stays is spread evenly.
            if len(self._kept) > PARTS and sum(part.rows for part in self._kept) > PARTS * ROWS:
                self._kept = self._kept[::2]
                self._stride *= 2
        self.rows += batch.rows
        self.note(batch)

    def batches(self) -> list[Batch]:
        """The parts kept, in the order of the data."""
        return list(self._kept)

    def pieces(self, batch: Batch) -> list[Batch]:
        """The smallest parts of a batch that the model takes: its rows, or all of it."""
        if not self.can_cut(batch):
            return [batch]
        return [self.select(batch, np.array([row])) for row in range(batch.rows)]

    def clear(self) -> None:
        """Forgets the parts kept; shapes and peaks stay."""
        self._kept = []
        self._count, self._stride, self.rows = 0, 1, 0

    def note(self, batch: Batch) -> None:
        """Notes the shapes and peaks of a batch."""
        for name, array in batch.feed.items():
            self.shapes.setdefault(name, set()).add(array.shape)
            if array.dtype.kind == "f":
                # The sum is finite where all elements are, and needs no copy.
                finite = array
                if not np.isfinite(array.sum()):
                    finite = array[np.isfinite(array)]
                peak = max(-float(finite.min(initial=0.0)), float(finite.max(initial=0.0)))
                self.peaks[name] = max(self.peaks.get(name, 0.0), peak)

    def can_cut(self, batch: Batch) -> bool:
        """Whether the model takes any number of the batch's rows."""
        if not self._open or batch.filler:
            return False
        return all(batch.feed[name].shape[0] == batch.rows for name in self._inputs)

    def select(self, batch: Batch, rows: npt.NDArray[np.int64]) -> Batch:
        """Some rows of a batch that can be cut, without targets. Copies: a view would keep the whole in memory."""
        feed = dict(batch.feed)
        for name in self._inputs:
            feed[name] = batch.feed[name][rows]
        return Batch(feed, None, len(rows))
