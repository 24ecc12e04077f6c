"""The ledger: which key gave which artifact, and what each run did. One small file each, written atomically.

A torn or truncated record is recovered from the newest run that holds it; the runs carry every record whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from layerline.pipeline.errors import PipeError
from layerline.pipeline.files import write_atomic
from layerline.pipeline.report import Report


@dataclass(frozen=True, kw_only=True)
class Record:
    """One execution of a stage.

    Attributes:
        stage: its name.
        key: what it was run on.
        digest: the artifact it left.
        kind: the artifact's kind.
        report: SHA-256 of the report's JSON; the report's name in the ledger.
        passed: whether every gate and tolerance held.
        seconds: wall-clock time of the stage alone.
        created: UTC time it finished, ISO 8601.
        parts: each part of the key as text, for `pipe explain`.
        notes: what the key could not follow, for `pipe explain`.
        worst: the layer that differs most: layer, value, sqnr_db, cosine.
        metrics: the report's figures.
        versions: of Layerline, Python and the system that ran it; those of other packages are parts of the key.
    """

    stage: str
    key: str
    digest: str
    kind: str
    report: str
    passed: bool
    seconds: float
    created: str
    parts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    worst: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One `pipe run` that changed something: the record of every stage it ended with, in order.

    `ran` names the stages that were at work in it: those that left their record, or ended in an error. The records of
    others are of an earlier run, and so are their times. `sets` are the overrides (`key.path=value`) it was given.
    """

    id: str
    passed: bool
    records: tuple[Record, ...]
    ran: tuple[str, ...]
    sets: tuple[str, ...] = ()

    @property
    def began(self) -> str:
        """UTC time, ISO 8601."""
        day, clock = self.id.split("-")[:2]
        return f"{day[:4]}-{day[4:6]}-{day[6:]}T{clock[:2]}:{clock[2:4]}:{clock[4:]}Z"


class Ledger:
    """Records by key, reports by digest and runs by time, under one folder."""

    def __init__(self, root: Path) -> None:
        self._keys, self._reports, self._runs = root / "keys", root / "reports", root / "runs"

    def get(self, key: str) -> Record | None:
        """What the key gave, or None."""
        path = self._keys / f"{key}.json"
        if not path.is_file():
            return None
        record = _read_record(path)
        if record is not None and record.key == key:
            return record
        return next((r for run in self.runs() for r in run.records if r.key == key), None)

    def put(self, record: Record) -> None:
        """Files a record under its key, in place of an older one."""
        self._keys.mkdir(parents=True, exist_ok=True)
        write_atomic(self._keys / f"{record.key}.json", _to_json(record))

    def put_report(self, report: Report) -> str:
        """Files a report and returns its digest."""
        text = report.to_json()
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._reports.mkdir(parents=True, exist_ok=True)
        if not self.report_is_whole(digest):
            write_atomic(self._reports / f"{digest}.json", text)
        return digest

    def report(self, record: Record) -> Report:
        """The report of a record.

        Raises:
            PipeError: it is missing or damaged.
        """
        if not self.report_is_whole(record.report):
            raise PipeError(
                f"the report of stage {record.stage} is missing or damaged",
                hint=f"make it again with: pipe run {record.stage} --force",
            )
        return Report.from_json((self._reports / f"{record.report}.json").read_text("utf-8"))

    def report_is_whole(self, digest: str) -> bool:
        path = self._reports / f"{digest}.json"
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest

    def runs(self) -> Iterator[Run]:
        """Every run, newest first; torn files are passed over."""
        if not self._runs.is_dir():
            return
        for path in sorted(self._runs.glob("*.json"), reverse=True):
            with suppress(OSError, ValueError, KeyError, TypeError):
                raw = json.loads(path.read_text("utf-8"))
                records = tuple(_record(r) for r in raw["records"])
                # A file that doesn't say was written before runs did: it must not be lost to `pipe runs` and `pipe gc`.
                ran = raw.get("ran", [r.stage for r in records])
                yield Run(raw["id"], raw["passed"], records, tuple(ran), tuple(raw.get("sets", ())))

    def put_run(self, run: Run) -> None:
        """Files a run, or its next state while it goes on."""
        self._runs.mkdir(parents=True, exist_ok=True)
        write_atomic(self._runs / f"{run.id}.json", json.dumps(dataclasses.asdict(run), ensure_ascii=False, indent=1))

    def head(self, stage: str) -> Record | None:
        """The record the newest run ended with for a stage."""
        return next((r for run in self.runs() for r in run.records if r.stage == stage), None)

    def find_run(self, run_id: str, stage: str = "") -> Run:
        """The run whose id starts with `run_id`, or the "last" or "previous" one.

        With a stage, the last is the newest with a result of it, and the previous the newest with another result.

        Raises:
            PipeError: none does, or several do.
        """
        runs = list(self.runs())
        if stage and run_id in ("last", "previous"):
            runs = _of_results(runs, stage)
        position = {"last": 0, "previous": 1}.get(run_id)
        found = runs[position : position + 1] if position is not None else [r for r in runs if r.id.startswith(run_id)]
        if len(found) == 1:
            return found[0]
        if not runs and not stage:
            raise PipeError("there is no run yet", hint="pipe run all")
        if run_id == "previous" and len(runs) == 1:
            only = f"stage {stage} has had one result so far" if stage else "there is only one run"
            raise PipeError(only, hint=f"the newest run with it is {runs[0].id}" if stage else f"it is {runs[0].id}")
        known = ", ".join(r.id for r in runs[:5]) or "none"
        raise PipeError(
            f"{'no run' if not found else 'more than one run'} matches {run_id!r}", hint=f"newest runs: {known}"
        )

    def forget(self, keep: int, in_use: set[str]) -> list[Path]:
        """Files no longer needed when only the newest `keep` runs and the artifacts `in_use` stay; deletes nothing."""
        runs = list(self.runs())
        reports = {r.report for run in runs[:keep] for r in run.records}
        dropped = [self._runs / f"{run.id}.json" for run in runs[keep:]]
        for path in sorted(self._keys.glob("*.json")):
            record = self.get(path.stem)
            if record is not None and record.digest in in_use:
                reports.add(record.report)
            else:
                dropped.append(path)
        return dropped + [p for p in sorted(self._reports.glob("*.json")) if p.stem not in reports]


def _of_results(runs: Iterable[Run], stage: str) -> list[Run]:
    """The newest run of each row of equal results, newest first."""
    having = [(r.report, run) for run in runs for r in run.records if r.stage == stage]
    return [next(same)[1] for _, same in groupby(having, key=itemgetter(0))]


def new_run_id() -> str:
    """Sorts by time, to the microsecond: two quick runs must not change places; unique among processes."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    return f"{moment}-{nanoseconds // 1000:06d}-{secrets.token_hex(1)}"


def _to_json(record: Record) -> str:
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False, indent=1) + "\n"


def _record(raw: dict[str, Any]) -> Record:
    return Record(**{**raw, "notes": tuple(raw["notes"])})


def _read_record(path: Path) -> Record | None:
    try:
        return _record(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
