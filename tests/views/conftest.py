"""A project whose stages are quick stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from layerline.pipeline import stage_table
from tests.pipeline import fakes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fakes.Folder]:
    """A project that has not run yet."""
    fakes.install(monkeypatch.setattr)
    yield fakes.Folder(tmp_path / "project")
    stage_table.stage_class.cache_clear()
