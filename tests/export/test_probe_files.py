"""Probe feeds: the same bytes for the same content, and sizes that reach both bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerline.compare import noise_floor
from layerline.export import probe_files
from layerline.pipeline.errors import StageError


def test_round_trip(tmp_path: Path) -> None:
    feeds = [
        {"x": np.ones((2, 3), np.float32), "n": np.array(3)},
        {"x": np.zeros((0, 3), np.float16), "n": np.array(True)},
    ]
    probe_files.save(tmp_path, feeds)
    first = (tmp_path / probe_files.FILE).read_bytes()
    probe_files.save(tmp_path, [dict(reversed(f.items())) for f in feeds])
    assert (tmp_path / probe_files.FILE).read_bytes() == first
    for want, got in zip(feeds, probe_files.load(tmp_path), strict=True):
        assert want.keys() == got.keys()
        for name in want:
            assert (got[name].shape, got[name].dtype) == (want[name].shape, want[name].dtype)
            np.testing.assert_array_equal(got[name], want[name])


def test_more_than_ten_feeds_keep_their_order(tmp_path: Path) -> None:
    probe_files.save(tmp_path, [{"x": np.array([i])} for i in range(12)])
    assert [int(f["x"][0]) for f in probe_files.load(tmp_path)] == list(range(12))


@pytest.mark.parametrize("content", [None, b"", b"not a file of tensors"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / probe_files.FILE).write_bytes(content)
    with pytest.raises(StageError, match="cannot read the probe feeds"):
        probe_files.load(tmp_path)


def test_drawn_integers_reach_both_ends() -> None:
    found = probe_files.drawn(np.zeros((4, 5), np.int32), -3, 7, np.random.default_rng(0))
    assert (found.min(), found.max(), found.dtype, found.shape) == (-3, 7, np.int32, (4, 5))
    assert probe_files.drawn(np.array(1), 0, 5, np.random.default_rng(0)).shape == ()


def test_resizing_cuts_and_repeats() -> None:
    x = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(probe_files.resized(x, 1, 2), [[0, 1], [3, 4]])
    np.testing.assert_array_equal(probe_files.resized(x, 0, 3), [[0, 1, 2], [3, 4, 5], [0, 1, 2]])


def test_floors(tmp_path: Path) -> None:
    assert noise_floor.load(tmp_path) == {}
    noise_floor.save(tmp_path, {"b": 1e-7, "a": 0.0})
    assert noise_floor.load(tmp_path) == {"a": 0.0, "b": 1e-7}
    assert noise_floor.tolerance(1e-3) == pytest.approx(8e-3)
    assert noise_floor.tolerance(0.0) == pytest.approx(8 * 4 * 2**-23)
