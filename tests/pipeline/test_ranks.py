"""Several ranks on one project: the first decides, records and publishes; the others only work along when told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from layerline.pipeline import stage_table
from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Work
from layerline.pipeline.untrusted import launched
from tests.pipeline import fakes
from tests.pipeline.fakes import Folder


class Source(fakes.Source):
    """Run by all ranks together; notes who announced, asked and ran."""

    together: ClassVar[bool] = True
    seen: ClassVar[list[Any]] = []
    answer: ClassVar[bool | Exception] = True

    def announce(self, *, runs: bool) -> None:
        self.seen.append(("announced", runs))

    def follow(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.seen.append("asked")
        return self.answer

    def run(self, work: Work) -> Report:
        self.seen.append(work.out)
        assert list(work.out.iterdir()) == [] and list(work.scratch.iterdir()) == []
        return super().run(work)


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fakes.STANDARD, "source", f"{__name__}:Source")
    stage_table.stage_class.cache_clear()
    monkeypatch.setattr(Source, "seen", [])


def _as_rank(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("WORLD_SIZE", "2")


def _files(folder: Folder) -> list[Path]:
    return sorted(folder.state.rglob("*")) if folder.state.exists() else []


def test_without_a_launcher_nobody_is_told_anything(folder: Folder) -> None:
    assert launched() == (0, 1)
    assert folder.run().passed and len(Source.seen) == 1


def test_the_first_rank_announces_once_whether_it_runs(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(0, monkeypatch)
    assert [r.state for r in folder.run().results] == ["ran"] * 3
    assert [s for s in Source.seen if isinstance(s, tuple)] == [("announced", True)]
    Source.seen.clear()
    assert [r.state for r in folder.run().results] == ["cached"] * 3
    assert Source.seen == [("announced", False)]
    Source.seen.clear()
    assert folder.run(["source"], force=True).passed
    assert [s for s in Source.seen if isinstance(s, tuple)] == [("announced", True)]


def test_it_announces_also_what_it_cannot_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(0, monkeypatch)
    folder.write("task.py", "def model(:")
    assert folder.run().results[0].state == "failed"
    assert Source.seen == [("announced", False)]


def test_another_rank_works_along_and_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(1, monkeypatch)
    done = folder.run()
    assert [(r.name, r.state, r.reason) for r in done.results] == [("source", "ran", "as rank 1")]
    assert done.passed and done.exit_code == 0 and _files(folder) == []
    asked, out = Source.seen
    assert asked == "asked" and not out.exists() and folder.root not in out.parents


def test_another_rank_rests_when_the_first_says_so(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(1, monkeypatch)
    monkeypatch.setattr(Source, "answer", False)
    done = folder.run()
    assert done.results == () and done.passed and _files(folder) == [] and Source.seen == ["asked"]


def test_another_ranks_failure_is_its_own_outcome(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_rank(1, monkeypatch)
    folder.edit("task.py", "return [1, 2, 3]", "raise ValueError('no data here')")
    (result,) = folder.run().results
    assert result.state == "failed" and "no data here" in str(result.error)
    for error, code in ((StageError("rank 0 is gone"), 1), (OSError(28, "No space left on device"), 3)):
        monkeypatch.setattr(Source, "answer", error)
        done = folder.run()
        assert done.exit_code == code and isinstance(done.results[0].error, StageError if code == 1 else Unavailable)


@pytest.mark.parametrize(
    ("rank", "size"), [("first", ""), ("²", "²"), ("9" * 5000, "9" * 5000), ("2", "2"), ("-1", "2"), ("0", "0")]
)
def test_a_launcher_that_makes_no_sense_ends_the_run(
    rank: str, size: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=r"environment: RANK is '.*' and WORLD_SIZE '.*'") as raised:
        folder.run()
    assert len(raised.value.what) < 150 and _files(folder) == []


def test_empty_variables_count_as_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert launched() == (0, 1)
