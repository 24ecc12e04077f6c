"""Which calibration samples choices and repairs are not fitted on, so that they can be judged on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from layerline.calib.calibration_survey import Survey
from layerline.calib.named_arrays import Array
from layerline.calib.samples import Batch

# Of fewer than LEAST samples none is held out. Else half of the first LEAST are, a quarter of the first DENSE, and one
# in 32 of the others.
LEAST, DENSE = 8, 64
TOO_FEW = f"fewer than {LEAST} different samples (or batches, where their size is fixed) leave none to judge it on"


class HoldOut:
    """Splits samples into those that choices are fitted on and those that they are judged on. Ranges are of both.

    Args:
        fitted: keeps some of the former.
        judged: keeps some of the latter.
    """

    def __init__(self, fitted: Survey, judged: Survey) -> None:
        self.survey = fitted
        self.judged = judged
        self._is_held: dict[bytes, bool] = {}
        self._different: list[Batch] = []  # each different sample once, while there are fewer than LEAST

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes whole batches on, and keeps a few samples of both parts. `finish` has to follow."""
        for batch in batches:
            fitted, held = self._split(batch)
            if fitted is not None:
                self.survey.add(fitted)
            if held is not None:
                self.survey.note(held)
                self.judged.add(held)
            if len(self._is_held) >= LEAST:
                self._different = []
            yield batch

    def finish(self) -> None:
        """Of fewer than LEAST different samples choices are fitted on each one, however often it came."""
        if self._different and len(self._is_held) < LEAST:
            self.judged.clear()
            self.survey.clear()
            for batch in self._different:
                self.survey.add(batch)
        self._different = []

    def fitted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes on what choices are fitted on, in any pass after `through`."""
        for batch in batches:
            fitted, _ = self._split(batch)
            if not self.judged.rows:
                yield batch
            elif fitted is not None:
                yield fitted

    def _split(self, batch: Batch) -> tuple[Batch | None, Batch | None]:
        """The samples of a batch that choices are fitted on, and those held out; None where there are none."""
        held = np.array([self._holds(piece) for piece in self.judged.pieces(batch)])
        if held.all():
            return None, batch
        if not held.any():
            return batch, None
        return self.judged.select(batch, np.flatnonzero(~held)), self.judged.select(batch, np.flatnonzero(held))

    def _holds(self, piece: Batch) -> bool:
        """Whether this sample is judged on. One that comes again, in any pass, has the part that it had before."""
        index = len(self._is_held)
        # The place within a block moves on from block to block: data may alternate between classes.
        held = index % 32 == index // 32 % 32
        if index < LEAST:
            held = index.bit_count() % 2 == 1
        elif index < DENSE:
            held = index % 4 == index // 4 % 4
        key = digest_of(piece.feed)
        if key not in self._is_held:
            self._is_held[key] = held
            if index < LEAST:
                self._different.append(piece)
        return self._is_held[key]


def digest_of(piece: Mapping[str, Array]) -> bytes:
    """The same for samples with the same numbers and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(piece):
        digest.update(repr(np.shape(piece[name])).encode())
        digest.update(np.ascontiguousarray(piece[name]).tobytes())
    return digest.digest()
