"""Masks as users feed them: samples that are shorter than the longest, padded on the right or the left, or not padded.

Bits drawn at random hide keys that no user hides, and never the rows that padding does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from layerline.backends.base import Array, Feed


def is_mask(name: str, array: Array) -> bool:
    """Whether an input says which positions of a batch of sequences there are: bits over two axes or more."""
    if array.ndim < 2 or not array.size or array.shape[-1] < 2:
        return False
    if array.dtype.kind == "b":
        return True
    return array.dtype.kind in "iu" and _of_bits(array) and ("mask" in name.lower() or "pad" in name.lower())


def fits(array: Array, low: int, high: int) -> bool:
    """Whether a range may be declared for bits that the example doesn't keep to: it says what else is fed."""
    return _of_bits(array) and 0 <= low <= high <= 1


def feeds(feed: Feed, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, dict[str, Array]]]:
    """The example with its masks padded, all at once: a label, and the feed. A mask with one declared value stays."""
    masks = {n: a for n, a in feed.items() if is_mask(n, a) and ranges.get(n, (0, 1)) == (0, 1)}
    if not masks:
        return
    names = ", ".join(masks)
    # Masks of one call have one batch, or a batch of one that is broadcast.
    batch = max(len(a) for a in masks.values())
    if batch > 1:
        # Samples take turns, so one feed shows both sides.
        yield f"{names} padded on the right and the left", _padded(feed, masks, ("right", "left"))
    else:
        yield f"{names} padded on the right", _padded(feed, masks, ("right",))
        yield f"{names} padded on the left", _padded(feed, masks, ("left",))
    full = _padded(feed, masks, ("",))
    if any((full[n] != feed[n]).any() for n in masks):
        yield f"{names} without padding", full


def _padded(feed: Feed, masks: Mapping[str, Array], sides: tuple[str, ...]) -> dict[str, Array]:
    return dict(feed) | {name: _pad(name, mask, sides) for name, mask in masks.items()}


def _pad(name: str, array: Array, sides: tuple[str, ...]) -> Array:
    """Each sample of another length along the last axis, padded on the sides in turn."""
    length, visible = array.shape[-1], np.zeros(array.shape, bool)
    for sample in range(len(array)):
        side = sides[sample % len(sides)]
        hidden = min((1 + sample) * length // (len(array) + 1), length - 1)
        first, last = {"right": (0, length - hidden), "left": (hidden, length)}.get(side, (0, length))
        visible[sample, ..., first:last] = True
    hides = array.dtype.kind == "b" and "pad" in name.lower()  # as torch has it in key_padding_mask
    return (visible ^ hides).astype(array.dtype)


def _of_bits(array: Array) -> bool:
    return array.dtype.kind in "biu" and bool(((array == 0) | (array == 1)).all())
