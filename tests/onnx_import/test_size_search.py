"""In which order sizes are tried."""

from __future__ import annotations

import itertools

from layerline.onnx_import.size_search import _likeliest


def test_combinations_come_by_the_sum_of_their_places() -> None:
    every = itertools.product(range(3), range(2), range(3))
    assert list(_likeliest([3, 2, 3])) == sorted(every, key=lambda places: (sum(places), places))


def test_more_open_sizes_than_the_stack_has_frames() -> None:
    first, second = itertools.islice(_likeliest([3] * 1200), 2)
    assert not any(first) and second == (*[0] * 1199, 1)
