"""The example with a hand-written loop: it trains, goes on where it stopped, and its resume is proved."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop"


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def own_loop(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "own_loop", ignore=shutil.ignore_patterns("checkpoints", "*.csv")))


def test_it_trains_and_goes_on(own_loop: Path) -> None:
    text = _run(own_loop)
    assert "decay     weight" in text and "step 300: online" in text
    found = re.search(r"what would ship: (\d\.\d+)", text)
    assert found is not None and float(found[1]) > 0.9
    assert (own_loop / "metrics.csv").is_file()
    (own_loop / "checkpoints" / "step-00000300.safetensors").unlink()
    again = _run(own_loop)
    assert "going on from step-00000200" in again and again.splitlines()[-1] == text.splitlines()[-1]


@pytest.mark.slow  # starts python three times
def test_its_resume_is_proved(own_loop: Path) -> None:
    assert "are equal after 20 steps in a fresh process" in _run(own_loop, "--prove")
