"""Distances add up, whatever the type, the size or the order; nothing that differs looks equal."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.pipeline.report import decibels

FLOATS = hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32))


@given(FLOATS)
def test_a_tensor_is_no_distance_from_itself(a: np.ndarray) -> None:
    d = diff_arrays(a, a.copy())
    assert (d.peak, d.ee, d.one_sided) == (0.0, 0.0, 0)
    assert d.nonfinite_a == d.nonfinite_b == int((~np.isfinite(a)).sum())
    assert d.count + d.nonfinite_a + d.masked == a.size


# Which elements are masked is seen in the whole alone: numbers that could be masks are left to the tests of masks.
NO_MASKS = st.one_of(st.floats(-8192, 8192, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(hnp.arrays(np.float32, st.integers(0, 50), elements=NO_MASKS), st.integers(0, 50))
def test_parts_add_up_to_the_whole(a: np.ndarray, cut: int) -> None:
    b = np.roll(a, 1)
    whole, parts = diff_arrays(a, b), diff_arrays(a[:cut], b[:cut]) + diff_arrays(a[cut:], b[cut:])
    for name in ("count", "nonfinite_a", "nonfinite_b", "one_sided", "peak"):
        assert getattr(whole, name) == getattr(parts, name)
    assert whole.ee == pytest.approx(parts.ee, rel=1e-12)


@given(
    hnp.arrays(np.float64, 7, elements=st.floats(-8e3, 8e3)), hnp.arrays(np.float64, 7, elements=st.floats(-8e3, 8e3))
)
@example(np.r_[4.44847274e-156, np.zeros(6)], np.ones(7))
def test_measures_are_what_numpy_says(a: np.ndarray, b: np.ndarray) -> None:
    d, na, nb = diff_arrays(a, b), np.linalg.norm(a), np.linalg.norm(b)
    assert d.max_abs == np.abs(a - b).max()
    assert d.rel_l2 == pytest.approx(np.linalg.norm(a - b) / (na or 1.0), rel=1e-9)
    if min(na, nb) > 1e-3 * max(na, nb) > 1e-100:
        assert d.cosine == pytest.approx(float(a @ b) / (na * nb), abs=1e-9)


@settings(max_examples=20)
@given(st.integers(1, 40_000), st.integers(0, 2**31))
def test_size_does_not_matter(size: int, seed: int) -> None:
    a = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    assert diff_arrays(a, a * np.float32(1.5)).rel_l2 == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 9000, 20_000])
def test_one_bad_element_is_found_anywhere(value: float, place: int) -> None:
    a = np.ones(20_001, np.float32)
    b = a.copy()
    b[place] = value
    d = diff_arrays(a, b)
    assert (d.one_sided, d.nonfinite_b, d.count, d.peak) == (1, 1, 20_000, 0.0)
    assert diff_arrays(b, b).one_sided == 0


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (np.ones((3, 1)), np.ones((3, 3)), "shape (3, 1) against (3, 3)"),
        (np.ones(3), np.ones((1, 3)), "shape (3,) against (1, 3)"),
        (None, np.ones(3), "absent"),
        ([np.ones(3)], [np.ones(3), np.ones(3)], "a sequence of 1 against a sequence of 2"),
    ],
)
def test_what_cannot_be_compared_says_why(a: object, b: object, told: str) -> None:
    d = diff_arrays(a, b)
    assert told in d.mismatch
    assert (d.max_abs, d.rel_l2, d.cosine) == (math.inf, math.inf, None)
    assert (Distance() + d).mismatch == d.mismatch


def test_other_kinds_of_values() -> None:
    assert diff_arrays(np.array(["a", "b"], object), np.array(["a", "c"], object)).max_abs == 1.0
    assert diff_arrays(np.array([1 + 1j]), np.array([1 - 1j])).max_abs == 2.0
    assert diff_arrays(np.array([1.0], ml_dtypes.bfloat16), np.array([1.0])).max_abs == 0.0
    assert diff_arrays(None, None).max_abs == 0.0
    assert diff_arrays(np.array(True), np.array(False)).max_abs == 1.0


def test_decibels() -> None:
    assert decibels(100.0, 1.0) == 20.0
    assert decibels(1.0, 0.0) == math.inf
    assert decibels(0.0, 1.0) == -math.inf


@pytest.mark.parametrize("shape", [(), (3,), (2, 9), (4, 0)])
def test_complex_numbers_against_their_pairs(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    pairs = rng.standard_normal((*shape, 2))
    whole = pairs[..., 0] + 1j * pairs[..., 1]
    for a, b in ((whole, pairs), (pairs, whole), (whole.T.copy().T, whole)):
        found = diff_arrays(a, b)
        assert not found.mismatch and found.rel_l2 == 0.0 and found.count == pairs.size
    if shape:
        assert diff_arrays(whole, whole.conj()).max_abs == pytest.approx(2 * np.abs(pairs[..., 1]).max(initial=0.0))


MASKS = [-3.4028234663852886e38, -1e30, -9e15, -1e9, -1e6, -1e5, -65504.0, -1e4]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("share", [0.001, 0.5, 0.99])
def test_masked_elements_are_left_out(mask: float, share: float) -> None:
    rng = np.random.default_rng(3)
    scores = rng.standard_normal(20_000).astype(np.float32)
    noise = np.float32(0.1) * rng.standard_normal(20_000).astype(np.float32)
    keep = rng.random(20_000) > share
    keep[:2] = True, False
    add = np.where(keep, np.float32(0.0), np.float32(mask))
    measured = diff_arrays(scores + add, scores + noise + add)
    shown = diff_arrays(scores[keep], (scores + noise)[keep])
    assert measured.masked == (~keep).sum() and measured.count == keep.sum()
    assert measured.sqnr_db == pytest.approx(shown.sqnr_db, abs=1e-6) and measured.max_abs == shown.max_abs
    assert measured.flags == {"masked": measured.masked}


def test_a_mask_on_one_side_alone_counts() -> None:
    a = np.array([0.5, -1.0, -1e9, -1e9], np.float32)
    b = np.array([0.5, -1.0, -1e9, 0.3], np.float32)
    measured = diff_arrays(a, b)
    assert measured.masked == 1 and measured.rel_l2 == pytest.approx(1.0) and measured.max_abs == pytest.approx(1e9)


def test_a_mask_that_half_precision_clamps_is_one() -> None:
    a, b = np.array([0.5, -1.0, -3.4e38], np.float32), np.array([0.5, -1.5, -65504.0], np.float32)
    measured = diff_arrays(a, b)
    assert (measured.masked, measured.count) == (1, 2)
    assert measured.max_abs == 0.5 and measured.rel_l2 == pytest.approx(0.5 / math.sqrt(1.25))


@pytest.mark.parametrize(
    "values",
    [
        [1e38, -2e38, 3e38],  # nothing else to compare with
        [-20_000.0, 3.0, 4.0],  # far out, and no number that masks are made of
        [-1e4, 3000.0, 4.0],  # not far beyond the others
        [1e4, 3.0, 4.0],  # masks are negative, but for the greatest numbers
        [-1e4, -2e4, -5e4],
    ],
)
def test_great_numbers_that_are_no_masks_count(values: list[float]) -> None:
    a = np.array(values, np.float32)
    measured = diff_arrays(a, a * np.float32(1.0005))
    assert measured.masked == 0 and measured.rel_l2 == pytest.approx(5e-4, rel=1e-3)
