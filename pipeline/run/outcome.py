"""What a run did, stage by stage, and who hears about it while it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from layerline.pipeline.errors import PipeError, exit_code, failure_fields
from layerline.pipeline.records.ledger import Record
from layerline.pipeline.run.plan import Step
from layerline.pipeline.stage import Log, Stage

State = Literal["ran", "cached", "failed", "blocked"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one stage in a run."""

    name: str
    state: State
    reason: str
    seconds: float = 0.0
    record: Record | None = None
    error: PipeError | None = None

    @property
    def passed(self) -> bool:
        return self.state in ("ran", "cached")

    @property
    def worked(self) -> bool:
        """Whether the stage did work in this run: a cached stage, or one whose failure is cached, did none."""
        return self.state == "ran" or (self.state == "failed" and self.seconds > 0)

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "key": record and record.key,
            "digest": record and record.digest,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "error": self.error and self.error.to_json(),
            "worst": record and record.worst and dict(record.worst),
            "metrics": dict(record.metrics if record else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did: its results in order, and the later stages it left out of date."""

    run: str
    results: tuple[Result, ...]
    out_of_date: tuple[Step, ...] = ()

    @property
    def passed(self) -> bool:
        return all(r.passed for r in self.results)

    @property
    def exit_code(self) -> int:
        """0 done, 1 a gate failed, 2 a usage error, 3 something this machine lacks."""
        if self.error is not None:
            return exit_code(self.error)
        return int(not self.passed)

    @property
    def error(self) -> PipeError | None:
        """Why the run failed: the error of the first stage that has one."""
        return next((result.error for result in self.results if result.error), None)

    def to_json(self) -> dict[str, Any]:
        stages = [result.to_json() for result in self.results]
        return {"run": self.run, "passed": self.passed, **failure_fields(self.error), "stages": stages}


class Listener(Log, Protocol):
    """Hears about a run as it happens."""

    def started(self, stage: Stage, reason: str) -> None:
        """A stage begins to work."""

    def finished(self, result: Result) -> None:
        """A stage is done, one way or another."""
