"""Decides which calibration samples are used: what becomes of NaN and Inf, and of a sample of another magnitude.

Every format and every later pass asks here, so that a sample that is left out is left out of ranges, trials, repairs
and judgements alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from layerline.calib.calibration_survey import Survey
from layerline.calib.hold_out import LEAST, digest_of
from layerline.calib.named_arrays import Array, Positions
from layerline.calib.samples import Batch
from layerline.pipeline.errors import StageError

# A sample is an outlier if it reaches more than FAR times what all others do (four of the eight bits), and if there
# are no more like it than one in RARE samples.
FAR, RARE = 16.0, 16
LISTED = 10  # numbers of samples that a note lists

Outputs = Callable[[Mapping[str, Array]], Mapping[str, Array | list[Array]]]

Counts = tuple[int, int, int]  # elements that are NaN, +Inf and -Inf


class SampleScreen:
    """Passes on the samples that can be used. Those of a batch that can't be cut stay or go together.

    Args:
        survey: knows the model's inputs, and how a batch is cut.
        nonfinite: stop at a sample that holds or gives NaN or Inf, or leave it out.
        outputs: the float model.
        every: whether the float model is run on every batch, or only where an input holds NaN or Inf.
        drops_outliers: leaves outliers out; they are reported in any case.
    """

    def __init__(
        self, survey: Survey, nonfinite: Literal["stop", "skip"], outputs: Outputs, *, every: bool, drops_outliers: bool
    ) -> None:
        self._survey = survey
        self._nonfinite = nonfinite
        self._outputs = outputs
        self._every = every
        self._drops_outliers = drops_outliers
        self._dropped: set[bytes] = set()
        self._broken: list[int] = []
        self._elements: dict[str, int] = {}  # how many are NaN or Inf in these, by value
        self._waiting: list[tuple[Batch, int]] = []  # outliers, as far as that can be told
        self._peaks: dict[str, list[float]] = {}  # greatest finite |x| of each sample, by input
        self._tops: dict[str, float] | None = None  # greatest of those that were passed on

    @property
    def left_out(self) -> int:
        """The number of samples that were left out."""
        outliers = sum(batch.rows for batch, _ in self._waiting) if self._drops_outliers else 0
        return len(self._broken) + outliers

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes on what can be used, in the first pass over the data.

        Raises:
            StageError: a sample holds or gives NaN or Inf and these stop, or no sample is left.
        """
        opening: list[tuple[Batch, Positions]] = []
        first: dict[str, list[float]] = {}
        passed, pieces = 0, 0
        for batch, numbers in self._finite(batches):
            passed += batch.rows
            opening.append((batch, numbers))
            if self._tops is None:
                for name, peaks in self._peaks_of(batch).items():
                    first.setdefault(name, []).extend(peaks)
                pieces += len(self._survey.pieces(batch))
                if pieces < LEAST:
                    continue
                # An input that had one number a sample in some of these is not screened: too few tell its magnitude.
                self._tops = {name: _top(peaks) for name, peaks in first.items() if len(peaks) >= LEAST}
            for each, places in opening:
                yield from self._near(each, places)
            opening = []
        # Of fewer samples none can be told from the others.
        for batch, _ in opening:
            yield batch
        if not passed and self._broken:
            raise StageError(
                f"no calibration sample is left: all {len(self._broken)} hold or give NaN or Inf",
                hint="look for log, division or overflow in the model or in the preparation of the data",
            )

    def again(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes on the same samples in any later pass."""
        for batch in batches:
            rest: Batch | None = batch
            if self._dropped:
                kept = [digest_of(piece.feed) not in self._dropped for piece in self._survey.pieces(batch)]
                rest = self._selected(batch, np.array(kept))
            if rest is not None:
                yield rest

    def finite(self, batches: Iterable[Batch]) -> list[Batch]:
        """Other samples, without those that hold or give NaN or Inf where these are left out."""
        kept = self.again(batches)
        if self._nonfinite == "stop":
            return list(kept)
        usable: list[Batch] = []
        for batch in kept:
            rest = self._selected(batch, ~self._unusable(batch))
            if rest is not None:
                usable.append(rest)
        return usable

    def notes(self, positions: Callable[[int], int]) -> list[str]:
        """What was left out, in words.

        Args:
            positions: the place in the data of the sample that was read as the n-th.
        """
        notes: list[str] = []
        if self._broken:
            places = ", ".join(str(positions(number)) for number in self._broken[:LISTED])
            more = ", …" if len(self._broken) > LISTED else ""
            elements = " and ".join(f"{count} non-finite elements of {name}" for name, count in self._elements.items())
            what = f"with the {len(self._broken)} samples that hold or give them (counted from 0: {places}{more})"
            notes.append(f"{elements} were left out of ranges, choices and judgements, {what}")
        for batch, number in self._waiting:
            tops = self._tops or {}
            peaks = {name: numbers[0] for name, numbers in self._peaks_of(batch).items() if tops[name]}
            name = max(peaks, key=lambda each: peaks[each] / tops[each])
            seen = f"{name} reaches {peaks[name]:.4g}, and {np.median(self._peaks[name]):.4g} in the median of all"
            if self._drops_outliers:
                advice = "it is left out; if it is right, give more like it, or set calibrator: minmax"
            else:
                advice = "the ranges include it"
            what = f"calibration sample {positions(number)} (counted from 0) is an outlier"
            notes.append(f"WARNING: {what}: {seen}; {advice}")
        return notes

    def _finite(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Positions]]:
        """The batches without samples that hold or give NaN or Inf, and the numbers of their samples."""
        start = 0
        for index, batch in enumerate(batches):
            numbers = np.arange(start, start + batch.rows)
            start += batch.rows
            unusable = self._unusable(batch)
            if not unusable.any():
                yield batch, numbers
                continue
            pieces = self._survey.pieces(batch)
            rows = np.repeat(unusable, batch.rows // len(pieces))
            for place in np.flatnonzero(unusable):
                counts = self._culprits(pieces[place])
                if self._nonfinite == "stop":
                    raise _refusal(counts, index, int(numbers[rows][0]))
                for name, each in counts.items():
                    self._elements[name] = self._elements.get(name, 0) + sum(each)
                self._dropped.add(digest_of(pieces[place].feed))
            self._broken += numbers[rows].tolist()
            rest = self._selected(batch, ~unusable)
            if rest is not None:
                yield rest, numbers[~rows]

    def _unusable(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """By piece of a batch, whether it holds or gives NaN or Inf."""
        if not self._is_unusable(batch):
            return np.zeros(1, bool)
        # A sample can spoil others of its batch. Alone each one shows what it does by itself.
        return np.array([self._is_unusable(piece) for piece in self._survey.pieces(batch)])

    def _is_unusable(self, batch: Batch) -> bool:
        held = _counts(batch.feed)
        if not held and not self._every:
            return False
        made = _counts(self._outputs(batch.feed))
        # An input of -Inf that leaves finite outputs, and an output of -Inf, are masks.
        spoiled = any(nan or positive for nan, positive, _ in made.values())
        return spoiled or bool(held and made) or any(nan for nan, _, _ in held.values())

    def _culprits(self, piece: Batch) -> dict[str, Counts]:
        """The inputs that hold NaN or Inf or, if none does, the outputs."""
        return _counts(piece.feed) or _counts(self._outputs(piece.feed))

    def _near(self, batch: Batch, numbers: Positions) -> Iterator[Batch]:
        """Passes on what is no outlier so far; the others wait until there are too many of them to be outliers."""
        assert self._tops is not None
        near: npt.NDArray[np.bool_] = np.ones(1, bool)
        for name, peaks in self._peaks_of(batch).items():
            self._peaks.setdefault(name, []).extend(peaks)
            near = near & ((self._tops[name] == 0) | (np.array(peaks) <= FAR * self._tops[name]))
        if near.all():
            self._raise_tops(batch)
            yield batch
            return
        rest = self._selected(batch, near)
        if rest is not None:
            self._raise_tops(rest)
        if not self._drops_outliers:
            yield batch
        elif rest is not None:
            yield rest
        pieces = self._survey.pieces(batch)
        step = batch.rows // len(pieces)
        for index in np.flatnonzero(~near):
            self._waiting.append((pieces[index], int(numbers[index * step])))
        seen = max(len(peaks) for peaks in self._peaks.values())
        too_many = len(self._waiting) > max(1, seen // RARE)
        for waiting, _ in self._waiting:
            if too_many:
                self._raise_tops(waiting)
            if self._drops_outliers and not too_many:
                self._dropped.add(digest_of(waiting.feed))
            elif self._drops_outliers:
                self._dropped.discard(digest_of(waiting.feed))
                yield waiting
        if too_many:
            self._waiting = []

    def _raise_tops(self, batch: Batch) -> None:
        assert self._tops is not None
        for name, peaks in self._peaks_of(batch).items():
            self._tops[name] = max(self._tops[name], *peaks)

    def _peaks_of(self, batch: Batch) -> dict[str, list[float]]:
        """The greatest finite |x| of each piece, by screened floating-point input with more than one number a sample.

        Single numbers, such as a noise level, may well spread over many magnitudes.
        """
        count = batch.rows if self._survey.can_cut(batch) else 1
        peaks: dict[str, list[float]] = {}
        for name, array in batch.feed.items():
            if self._tops is not None and name not in self._tops:
                continue
            if array.dtype.kind == "f" and array.ndim and array.size > count:
                rows = array.reshape(count, -1)
                if not np.isfinite(rows).all():
                    rows = np.where(np.isfinite(rows), rows, 0)
                peaks[name] = np.maximum(rows.max(axis=1), -rows.min(axis=1)).astype(np.float64).tolist()
        return peaks

    def _selected(self, batch: Batch, kept: npt.NDArray[np.bool_]) -> Batch | None:
        """The pieces of a batch that are kept; None where none is."""
        if kept.all():
            return batch
        if not kept.any():
            return None
        return self._survey.select(batch, np.flatnonzero(kept))


def _refusal(counts: Mapping[str, Counts], batch: int, number: int) -> StageError:
    name, (nan, positive, negative) = next(iter(counts.items()))
    return StageError(
        f"{nan} NaN and {positive + negative} Inf elements in calibration batch {batch}, sample {number} "
        "(counted from 0)",
        where=name,
        hint="look for log, division or overflow there; `nonfinite: skip` leaves such samples out",
    )


def _counts(arrays: Mapping[str, Array | list[Array]]) -> dict[str, Counts]:
    """How many elements are NaN, +Inf and -Inf, of the arrays that hold any."""
    counts: dict[str, Counts] = {}
    for name, value in arrays.items():
        # onnxruntime gives a sequence as a list, and its elements may have different shapes.
        tensors = value if isinstance(value, list) else [value]
        nan, positive, negative = 0, 0, 0
        for tensor in tensors:
            each = _count(tensor)
            nan, positive, negative = nan + each[0], positive + each[1], negative + each[2]
        if nan or positive or negative:
            counts[name] = nan, positive, negative
    return counts


def _count(array: Array) -> Counts:
    """How many elements are NaN, +Inf and -Inf."""
    if array.dtype.kind != "f":
        return 0, 0, 0
    # The sum is finite where all elements are, unless it overflows, and needs no copy.
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()
    if np.isfinite(total):
        return 0, 0, 0
    return int(np.isnan(array).sum()), int(np.isposinf(array).sum()), int(np.isneginf(array).sum())


def _top(peaks: list[float]) -> float:
    """The greatest of the first peaks that is no outlier's."""
    ordered = sorted(peaks)
    for outliers in range(1, max(1, len(peaks) // RARE) + 1):
        below = ordered[-outliers - 1]
        if 0 < FAR * below < ordered[-outliers]:
            return below
    return ordered[-1]
