"""Which samples calibrate, where they are not just spread evenly: as many of each class, or those that differ most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from layerline.calib.collect import FeedRunner
from layerline.calib.named_arrays import Positions
from layerline.calib.samples import Batch
from layerline.pipeline.errors import TaskError

# Samples whose labels are read.
MOST_LABELS = 100_000
# So many candidates for each sample wanted run through the model.
CANDIDATES = 8
# Candidates a run, whatever the batch size of the calibration is: kernels sum in another order for another size.
CANDIDATE_BATCH = 16
_TAPS = 8


def spread_order(count: int) -> Positions:
    """A permutation of 0..count-1 in which every prefix is spread evenly: multiples of the golden ratio, by rank."""
    fractions = np.arange(count) * ((5**0.5 - 1) / 2) % 1
    return np.argsort(np.argsort(fractions))


def labels(batches: Iterable[Batch], hook: str) -> tuple[npt.NDArray[Any], str]:
    """The slice of each sample or, where the data names none, its label; and which of the two it is.

    Raises:
        TaskError: the data gives neither one number nor one text a sample.
    """
    parts: list[npt.NDArray[Any]] = []
    name = "slice"
    for batch in batches:
        part = batch.slices
        if part is None:
            name = "label"
            part = batch.target
        is_class = isinstance(part, np.ndarray) and part.dtype.kind in "biuUS" and part.size == batch.rows
        if not is_class:
            raise TaskError(
                f"{hook}() gives no class: expected a slice, or one integer or text a sample as the label",
                where="quantize.selection",
                hint="give (x, label) or a dict with 'slice', or use selection: coverage, which needs neither",
            )
        parts.append(part.reshape(-1))
    return np.concatenate(parts), name


def stratified(classes: npt.NDArray[Any], count: int) -> Positions:
    """Positions of `count` samples, the same number of each class; classes with fewer samples are kept whole.

    What rare classes leave is shared by the others. Within a class the samples are spread evenly. Where there are more
    classes than samples, classes spread evenly over their sorted names have one each.
    """
    _, members, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    quota = _equal_shares(sizes, count)
    chosen: list[Positions] = []
    for number in np.flatnonzero(quota):
        positions = np.flatnonzero(members == number)
        chosen.append(positions[np.arange(quota[number]) * positions.size // quota[number]])
    return np.sort(np.concatenate(chosen))


def _equal_shares(sizes: Positions, count: int) -> Positions:
    level = 0
    while np.minimum(sizes, level + 1).sum() <= count and level < sizes.max():
        level += 1
    shares = np.minimum(sizes, level)
    larger = np.flatnonzero(sizes > level)
    rest = min(count - int(shares.sum()), larger.size)
    shares[larger[np.arange(rest) * larger.size // max(rest, 1)]] += 1
    return shares


def statistics(
    open_session: Callable[[Sequence[str]], FeedRunner], batches: Iterable[Batch], names: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Mean and greatest magnitude of a few activations for each sample, standardised over the samples.

    Args:
        open_session: loads the model with the given inner values as further outputs.
        names: activations in the order of the network; up to eight of them, evenly spread, are looked at.

    Returns:
        Shape (samples, 2 * activations).
    """
    taps = names[:: max(1, -(-len(names) // _TAPS))]
    session = open_session(taps)
    rows: list[npt.NDArray[np.float64]] = []
    for batch in batches:
        arrays = {**batch.feed, **session.run(batch.feed)}
        columns: list[npt.NDArray[np.float64]] = []
        for name in taps:
            array = batch.real(arrays[name]).astype(np.float64)
            if not array.ndim or array.shape[0] != batch.rows:
                # It does not belong to single samples, and counts for all of the batch.
                array = np.broadcast_to(array.reshape(1, -1), (batch.rows, array.size))
            flat = array.reshape(batch.rows, -1)
            columns += [flat.mean(axis=1), np.abs(flat).max(axis=1, initial=0.0)]
        rows.append(np.stack(columns, axis=1))
    table = np.nan_to_num(np.concatenate(rows), posinf=0.0, neginf=0.0)
    spread = table.std(axis=0)
    standardised: npt.NDArray[np.float64] = (table - table.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return standardised


def k_center(features: npt.NDArray[np.float64], count: int) -> Positions:
    """Greedy k-center (Gonzalez 1985): starts nearest to the mean and adds the sample that is farthest from all chosen.

    The greatest distance of any sample to a chosen one is at most twice the least possible. Of equal distances the
    first sample is taken.

    Args:
        features: standardised, shape (samples, features).
        count: at most this many are chosen.

    Returns:
        Positions, in the order in which they were chosen.
    """
    chosen = [int(np.argmin(np.square(features).sum(axis=1)))]
    distance = np.full(len(features), np.inf)
    while len(chosen) < min(count, len(features)):
        distance = np.minimum(distance, np.square(features - features[chosen[-1]]).sum(axis=1))
        distance[chosen[-1]] = -1.0
        chosen.append(int(np.argmax(distance)))
    return np.array(chosen, np.int64)
