"""Which calibration samples are kept from ranges and repairs, so that choices can be judged on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from layerline.calib.calibration_survey import Survey
from layerline.calib.named_arrays import Array
from layerline.calib.samples import Batch

# Of fewer than LEAST samples none is held out. Else every second of the first LEAST is, every fourth of the first
# DENSE, and every 32nd of the others.
LEAST, DENSE = 8, 64
TOO_FEW = f"fewer than {LEAST} different samples (or batches, where their size is fixed) leave none to judge it on"


class HoldOut:
    """Splits batches into what choices are fitted on, which passes, and what they are judged on.

    Args:
        judged: keeps the samples held out, in the first pass that has some.

    Attributes:
        read: samples read in the current pass, those held out among them.
    """

    def __init__(self, judged: Survey) -> None:
        self.judged = judged
        self.read = 0
        self._is_held: dict[bytes, bool] = {}

    def fitted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes on what choices are fitted on."""
        is_first = not self.judged.rows
        self.read = 0
        waiting: list[Batch] = []
        for batch in batches:
            self.read += batch.rows
            held = np.array([self._holds(piece) for piece in self._pieces(batch)])
            if not held.any():
                yield batch
                continue
            judged = batch
            if not held.all():
                judged = self.judged.select(batch, np.flatnonzero(held))
                yield self.judged.select(batch, np.flatnonzero(~held))
            if is_first:
                waiting.append(judged)
            if len(self._is_held) >= LEAST:
                list(self.judged.through(waiting))
                waiting = []
        # Of so few samples each one is needed for the ranges.
        yield from waiting

    def _pieces(self, batch: Batch) -> list[Mapping[str, Array]]:
        """The smallest parts of a batch that the model takes: its rows, or all of it."""
        if not self.judged.can_cut(batch):
            return [batch.feed]
        return [self.judged.select(batch, np.array([row])).feed for row in range(batch.rows)]

    def _holds(self, piece: Mapping[str, Array]) -> bool:
        """Whether this sample is judged on. One that comes again, in any pass, has the part that it had before."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(piece):
            digest.update(np.ascontiguousarray(piece[name]).tobytes())
        index = len(self._is_held)
        every = 32
        if index < LEAST:
            every = 2
        elif index < DENSE:
            every = 4
        return self._is_held.setdefault(digest.digest(), index % every == every - 1)
