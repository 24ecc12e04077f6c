"""Calibration itself: runs the float model on the samples and keeps a histogram of every wanted value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy.typing as npt

from layerline.calib.convergence import MOVING, Convergence
from layerline.calib.histogram import Histogram, shortest
from layerline.calib.samples import Batch
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Row

FILE = "ranges.json"

Array = npt.NDArray[Any]
T = TypeVar("T")
# Values tapped in one run of the first batch, whose size is not known yet.
GROUP = 128
# Bytes of the values tapped in one run of the other batches. Most models then need one run a batch.
GROUP_BYTES = 1 << 29


class FeedRunner(Protocol):
    """A loaded model; what `layerline.backends` calls a session."""

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]: ...


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What calibration saw."""

    histograms: dict[str, Histogram]  # by value name
    samples: int  # how many samples they are of
    # non-finite elements that were skipped, a sentence a value; and that calibration stopped early.
    notes: tuple[str, ...] = ()
    convergence: tuple[Row, ...] = ()  # the scales against the number of samples; see `Convergence.rows`.
    stopped: bool = False  # whether calibration stopped early

    def to_json(self) -> str:
        """Canonical: one line a value, with its finite range (null where it has none) and what it is of."""
        lines: list[str] = []
        for name, histogram in sorted(self.histograms.items()):
            extremes = [shortest(histogram.low), shortest(histogram.high)] if histogram.count else None
            counts = {"count": histogram.count, "nan": histogram.nan, "inf": histogram.inf}
            lines.append(f"{json.dumps(name)}: {json.dumps({'range': extremes, **counts})}")
        return f'{{"samples": {self.samples}, "values": {{\n' + ",\n".join(lines) + "\n}}\n"


def collect(
    open_session: Callable[[Sequence[str]], FeedRunner],
    batches: Iterable[Batch],
    names: Sequence[str],
    *,
    nonfinite: Literal["stop", "skip"] = "stop",
    percentile: float = 99.99,
    stop_early: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Ranges:
    """Histograms of the named values over all batches, in one pass and without keeping an activation.

    Args:
        open_session: loads the model with the given inner values as further outputs.
        nonfinite: stop at the first NaN or Inf, or leave them out and say so.
        percentile: the threshold whose convergence is followed; 100 follows the greatest magnitude.
        stop_early: stop when no scale moved by more than this, relative, while the samples doubled twice.
        progress: told the number of samples done after each batch.

    Raises:
        StageError: NaN or Inf in an activation; names the tensor, the batch and how many.
    """
    groups = [list(names[i : i + GROUP]) for i in range(0, len(names), GROUP)]
    sessions = [open_session(group) for group in groups]
    histograms = {name: Histogram() for name in names}
    sizes: dict[str, int] = {}
    convergence = Convergence(names, percentile=percentile, moving=stop_early or MOVING)
    stopped = False
    samples = 0
    for index, batch in enumerate(batches):
        for group, session in zip(groups, sessions, strict=True):
            arrays = {**batch.feed, **session.run(batch.feed)}
            for name in group:
                sizes[name] = arrays[name].nbytes
                histograms[name].update(batch.real(arrays[name]))
        if index == 0 and len(groups) > 1:
            groups = list(packed(names, sizes.__getitem__, GROUP_BYTES))
            sessions = [open_session(group) for group in groups]
        if nonfinite == "stop":
            _require_finite(histograms, index)
        samples += batch.rows
        if progress is not None:
            progress(samples)
        convergence.after_batch(histograms, samples)
        stopped = stop_early is not None and convergence.settled()
        if stopped:
            break
    convergence.finish(histograms, samples)
    notes: list[str] = []
    for name, h in histograms.items():
        if h.nan + h.inf:
            amount = f"{h.nan + h.inf} non-finite elements of {name}"
            notes.append(f"{amount} were left out of its range ({h.nan} NaN, {h.inf} Inf)")
    if stopped and stop_early is not None:
        moved = f"no scale moved by more than {100 * stop_early:g} % while the samples doubled twice"
        notes.append(f"calibration stopped after {samples} samples: {moved}")
    return Ranges(
        histograms=histograms,
        samples=samples,
        notes=tuple(notes),
        convergence=tuple(convergence.rows),
        stopped=stopped,
    )


def packed(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in order, in groups of at most `most` bytes; one that is larger is a group of its own."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group = []
            total = 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def _require_finite(histograms: Mapping[str, Histogram], batch: int) -> None:
    for name, histogram in histograms.items():
        if histogram.nan + histogram.inf:
            raise StageError(
                f"{histogram.nan} NaN and {histogram.inf} Inf elements in calibration batch {batch} (counted from 0)",
                where=name,
                hint="look for log, division or overflow there; `nonfinite: skip` leaves them out of the range",
            )
