"""Masks as users feed them: which inputs are masks, and how they are padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerline.export import padded_masks

ONES = np.ones((2, 6), np.int64)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("attention_mask", ONES, True),
        ("key_padding", np.zeros((2, 6), np.int32), True),
        ("x", np.zeros((2, 1, 6, 6), bool), True),
        ("token_type_ids", ONES, False),
        ("mask", ONES * 2, False),
        ("mask", np.ones((2, 6), np.float32), False),
        ("mask", np.ones(6, bool), False),
    ],
)
def test_masks_are_bits_over_sequences(name: str, array: Any, expected: bool) -> None:
    assert padded_masks.is_mask(name, array) is expected


def test_samples_are_padded_on_both_sides_in_turn() -> None:
    ((label, feed),) = padded_masks.feeds({"ids": ONES * 7, "mask": ONES}, {})
    assert label == "mask padded on the right and the left" and (feed["ids"] == 7).all()
    assert feed["mask"].tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]] and feed["mask"].dtype == np.int64


def test_an_example_with_padding_is_also_fed_without() -> None:
    padded = np.array([[0, 0, 1, 1]])
    labels = {label: feed["mask"].tolist() for label, feed in padded_masks.feeds({"mask": padded}, {})}
    assert labels == {
        "mask padded on the right": [[1, 1, 0, 0]],
        "mask padded on the left": [[0, 0, 1, 1]],
        "mask without padding": [[1, 1, 1, 1]],
    }


def test_a_mask_of_what_is_padding_says_so_with_true() -> None:
    feeds = [f["key_padding_mask"] for _, f in padded_masks.feeds({"key_padding_mask": np.ones((1, 4), bool)}, {})]
    assert [f[0].tolist() for f in feeds] == [
        [False, False, True, True], [True, True, False, False], [False] * 4,
    ]  # fmt: skip


def test_a_declared_range_of_one_value_keeps_padding_out() -> None:
    assert list(padded_masks.feeds({"mask": ONES}, {"mask": (1, 1)})) == []
    assert padded_masks.fits(np.array([[0, 1]]), 1, 1) and not padded_masks.fits(np.array([[0, 2]]), 0, 1)
