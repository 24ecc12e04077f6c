"""The fake stages stand in for the real ones in every test here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerline.pipeline import stage_table
from tests.pipeline import fakes


@pytest.fixture(autouse=True)
def fake_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fakes.install(monkeypatch.setattr)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no test here pulls the plug
    yield
    stage_table.stage_class.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> fakes.Folder:
    """A project that has not run yet."""
    return fakes.Folder(tmp_path / "project")
