"""A task that replaces what Layerline reads and writes files by."""

from __future__ import annotations

import builtins
import io
from pathlib import Path

import pytest

from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task


@pytest.mark.parametrize("module", ["builtins", "io"])
def test_open_is_not_replaced(module: str, tmp_path: Path) -> None:
    before = builtins.open, io.open
    (tmp_path / "task.py").write_text(f"import {module}\n{module}.open = None\ndef model(): return 1\n")
    with pytest.raises(TaskError, match=f"importing it replaced {module}.open,") as error:
        Task(tmp_path / "task.py").call("model")
    assert (builtins.open, io.open) == before and "under another name" in error.value.hint
