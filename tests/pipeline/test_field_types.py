"""Fields that contradict themselves are refused while pipe.yaml is read, by field and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerline.pipeline import stage_table
from layerline.pipeline.config.field_types import Dimension, Range
from layerline.pipeline.config.project import load
from layerline.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("low", "high", "multiple"), [(None, None, 8), (3, None, 8), (1, 8, 8), (9, 16, 8), (4, 4, 4), (None, 1, None)]
)
def test_sizes_that_exist(low: int | None, high: int | None, multiple: int | None) -> None:
    assert Dimension(min=low, max=high, multiple=multiple).max == high


@pytest.mark.parametrize(("low", "high", "multiple"), [(4, 2, None), (9, 15, 8), (None, 7, 8), (3, 3, 2)])
def test_sizes_that_do_not_exist(low: int | None, high: int | None, multiple: int | None) -> None:
    with pytest.raises(ValueError, match=r"is below min|lies between"):
        Dimension(min=low, max=high, multiple=multiple)


def test_a_range_may_be_a_pair() -> None:
    assert Range.model_validate([0, 7]) == Range(low=0, high=7)


@pytest.mark.parametrize(
    ("stage", "field", "told"),
    [
        ("import-onnx", "dims: {n: {size: 4, max: 8}}", "size 4 fixes it, so it has no max"),
        ("import-onnx", "dims: {n: {size: 4, min: 4, max: 4}}", "size 4 fixes it, so it has no min and no max"),
        ("import-onnx", "dims: {n: {size: 4, multiple: 2, name: m}}", "it has no name and no multiple"),
        ("import-onnx", "dims: {n: {min: 9, max: 15, multiple: 8}}", "no multiple of 8 lies between min 9 and max 15"),
        ("import-onnx", "ranges: {n: {low: 3, high: 2}}", "saw low 3 above high 2"),
        ("export", "ranges: {n: {low: 3, high: 2}}", "saw low 3 above high 2"),
        ("export", "ranges: {n: [3, 2]}", "saw low 3 above high 2"),
        ("export", "ranges: {n: [3]}", "expected the fields low, high"),
        ("export", "dynamic: {n: {0: {name: b, min: 4, max: 2}}}", "max 2 is below min 4"),
    ],
)
def test_a_contradiction_is_told_by_field_and_line(
    stage: str, field: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real stages
    stage_table.stage_class.cache_clear()
    first = "file: m.onnx" if stage == "import-onnx" else "opset: 20"
    (tmp_path / "pipe.yaml").write_text(f"{stage}:\n  {first}\n  {field}\n")
    with pytest.raises(ConfigError, match=told) as raised:
        load(tmp_path)
    assert raised.value.where.startswith("pipe.yaml:3:")
    assert raised.value.what.startswith(f"{stage}.{field.partition(':')[0]}.n")
