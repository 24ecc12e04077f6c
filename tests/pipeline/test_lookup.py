"""The training log beside a checkpoint, which may come from anywhere; and the stage and run that a person names."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from layerline.pipeline.commands.lookup import read_log, stage_and_run
from layerline.pipeline.errors import ConfigError, PipeError


def test_a_row_holds_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,metric_deploy\n1,0.5,\n2,inf,0.25\n")
    assert read_log(path) == [{"step": 1.0, "loss": 0.5}, {"step": 2.0, "loss": math.inf, "metric_deploy": 0.25}]
    path.write_text("")
    assert read_log(path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"step,loss\n1,much\n",
        b"step\n1,2\n",
        b"step,loss\n1," + b"9" * 200_000 + b"x\n",
        b'step,loss\n1,"' + b"a" * 200_000 + b'"\n',
        b"step\n\xff\xfe\n",
        b"step,loss\n1,\x001\n",
        b"step,loss\n1,[[[[\n",
    ],
)
def test_a_damaged_log_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(PipeError, match="no table of numbers") as raised:
        read_log(path)
    assert raised.value.where == str(path)


def test_a_log_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PipeError, match="larger than 134217728 bytes"):
        read_log(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(PipeError, match="not a regular file"):
        read_log(tmp_path / "metrics.csv")


@pytest.mark.parametrize(
    ("text", "run", "chosen"),
    [
        ("quantize", None, ("quantize", None)),
        ("quantize", "last", ("quantize", "last")),
        ("quantize@previous", None, ("quantize", "previous")),
        ("quantize@2026", "last", ("quantize", "2026")),
    ],
)
def test_a_stage_may_name_its_run(text: str, run: str | None, chosen: tuple[str, str | None]) -> None:
    assert stage_and_run(text, run) == chosen


def test_a_stage_with_an_empty_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantize@ names no run") as refused:
        stage_and_run("quantize@", "last")
    assert refused.value.exit_code == 2 and "quantize@previous" in refused.value.hint
