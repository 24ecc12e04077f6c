"""How many samples are enough: the scales while calibration goes on, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from layerline.calib.calibrators import percentile_of
from layerline.calib.histogram import Counts, Histogram, bucket_floor
from layerline.pipeline.report import Row

# A scale that changes by more than this while the samples double is still moving.
MOVING = 0.01
# Calibration never stops before so many samples.
LEAST_SAMPLES = 32
_VALUES, _BLOCKS, _DRAWS = 32, 16, 200
_LEAST_BLOCKS = 4


class Convergence:
    """Follows the scales of all values whenever the number of samples has doubled.

    The interval of a scale is that of a bootstrap over blocks of batches. It is taken for a bounded number of values,
    spread evenly over the network, and of at most 16 blocks, which grow with the data: memory does not.

    Args:
        names: the values, in the order of the network.
        percentile: the threshold that is followed: per cent of the non-zero values; 100 follows the greatest.
        moving: the relative change above which a scale counts as moving.

    Attributes:
        rows: by number of samples: the median and the greatest relative change since the row before, the value that
            changed most, the share of values still moving, and the median half-width of the intervals, relative to the
            scale. None where there is nothing to compare with.
    """

    def __init__(self, names: Sequence[str], *, percentile: float, moving: float = MOVING) -> None:
        self._names = tuple(names)
        self._percentile = percentile
        self._moving = moving
        self.rows: list[Row] = []
        self._next = 1
        self._scales: npt.NDArray[np.float64] | None = None
        step = max(1, -(-len(self._names) // _VALUES))
        self._sums: dict[str, list[tuple[int, Counts]]] = {name: [] for name in self._names[::step]}
        self._batches = 0
        self._stride = 1

    def after_batch(self, histograms: Mapping[str, Histogram], samples: int) -> None:
        """Notes what a batch has changed."""
        self._batches += 1
        if self._batches % self._stride == 0:
            for name, sums in self._sums.items():
                sums.append(_trimmed(histograms[name].counts))
            if self._batches // self._stride == _BLOCKS:
                self._stride *= 2
                for name, sums in self._sums.items():
                    self._sums[name] = sums[1::2]
        if samples >= self._next:
            self._add(histograms, samples)
            self._next = 1 << samples.bit_length()

    def finish(self, histograms: Mapping[str, Histogram], samples: int) -> None:
        """Adds the row of all samples."""
        if self._names and samples and self.rows[-1]["samples"] != samples:
            self._add(histograms, samples)

    def settled(self) -> bool:
        """Whether no scale moved while the samples doubled twice."""
        enough = self._next > LEAST_SAMPLES and len(self.rows) > 2
        return enough and all(row["moving"] == 0 for row in self.rows[-2:])

    def _add(self, histograms: Mapping[str, Histogram], samples: int) -> None:
        scales = np.array([percentile_of(histograms[name], self._percentile) for name in self._names])
        row: Row = {"samples": samples, "values": len(self._names), "median_change": None, "greatest_change": None,
                    "value": "", "moving": None, "interval": self._interval(histograms)}  # fmt: skip
        if self._scales is not None and scales.size:
            before = np.where(self._scales > 0, self._scales, 1.0)
            change = np.abs(scales - self._scales) / before
            row["median_change"] = float(np.median(change))
            row["greatest_change"] = float(change.max())
            row["value"] = self._names[int(change.argmax())]
            row["moving"] = float((change > self._moving).mean())
        self._scales = scales
        self.rows.append(row)

    def _interval(self, histograms: Mapping[str, Histogram]) -> float | None:
        widths: list[float] = []
        for name, sums in self._sums.items():
            start, blocks = _blocks([*sums, _trimmed(histograms[name].counts)])
            if len(blocks) >= _LEAST_BLOCKS:
                widths.append(_half_width(start, blocks, self._percentile))
        if not widths:
            return None
        return float(np.median(widths))


def _trimmed(counts: Counts) -> tuple[int, Counts]:
    """The non-empty part of the buckets of non-zero values, and the bucket that it starts at."""
    used = np.flatnonzero(counts[1:]) + 1
    if not used.size:
        return 1, counts[:0].copy()
    first, last = int(used[0]), int(used[-1])
    return first, counts[first : last + 1].copy()


def _blocks(sums: Sequence[tuple[int, Counts]]) -> tuple[int, npt.NDArray[np.float64]]:
    """The counts of each block from running sums, shape (blocks, buckets), and their first bucket.

    Blocks without a value are left out.
    """
    start, counts = sums[-1]  # the last sum holds all others
    running = np.zeros((len(sums) + 1, counts.size))
    for row, (first, counts) in zip(running[1:], sums, strict=True):
        row[first - start : first - start + counts.size] = counts
    blocks = np.diff(running, axis=0)
    return start, blocks[blocks.any(axis=1)]


def _half_width(start: int, blocks: npt.NDArray[np.float64], percentile: float) -> float:
    """Half the 95 % interval of a percentile over draws of blocks, relative to that of all blocks."""
    share = percentile / 100
    below = np.cumsum(np.pad(blocks, ((0, 0), (1, 0))), axis=1)
    of_block = (below < share * below[:, -1:]).sum(axis=1)
    # The percentile of a mixture lies between those of its parts, so only these buckets matter.
    low, high = int(of_block.min()) - 1, int(of_block.max())
    times = np.random.default_rng(0).multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), size=_DRAWS)
    # The first row is of every block once.
    times = np.vstack([np.ones(len(blocks)), times])
    drawn = times @ below[:, low : high + 1]
    targets = share * (times @ below[:, -1])
    edges = bucket_floor(start + np.arange(low, high + 1))
    # Not np.interp: it takes the end of a stretch without values, where the percentile lies at its start.
    after = np.minimum((drawn < targets[:, None]).sum(axis=1), high - low)
    draws = np.arange(len(times))
    inside = (targets - drawn[draws, after - 1]) / (drawn[draws, after] - drawn[draws, after - 1])
    ends = edges[after - 1] + inside * (edges[after] - edges[after - 1])
    least, greatest = np.quantile(ends[1:], [0.025, 0.975])
    return float((greatest - least) / 2 / ends[0])
