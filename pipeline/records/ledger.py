"""The ledger: which key gave which artifact, and what each run did. One small file each, written atomically.

A torn or truncated record is recovered from the newest run that holds it; the runs carry every record whole. Files of
the ledger may come from anywhere: each is checked for its form before it is used, and what fails counts as damaged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AllowInfNan, Field, StrictBool, StringConstraints, TypeAdapter, ValidationError

from layerline.pipeline.errors import PipeError, located
from layerline.pipeline.files import entries, is_partial, write_own
from layerline.pipeline.nearest import did_you_mean
from layerline.pipeline.report import Report
from layerline.pipeline.untrusted import printable, read_bytes, read_json

_LAST_SEQUENCE = 2**53
_RECORD_BYTES = 1 << 26
_SET_ASIDE = ".damaged"

# Keys, digests and ids of runs become names of files: no separator, no dot, nothing absolute.
Name = Annotated[str, StringConstraints(pattern=r"\A[0-9A-Za-z][0-9A-Za-z_-]{0,199}\z")]
_Figure = StrictBool | int | Annotated[float, AllowInfNan(False)] | str | None


def _summary(worst: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuses what views could not show as the worst layer."""
    if not isinstance(worst.get("layer"), str):
        raise ValueError("it names no layer")
    for measure in ("sqnr_db", "cosine", "own_sqnr_db"):
        value = worst.get(measure)
        if isinstance(value, list | dict):
            raise ValueError(f"{measure} is no number")
        float(value or 0)  # "inf", "-inf" and "nan" travel as text
    return worst


@dataclass(frozen=True, kw_only=True)
class Record:
    """One execution of a stage."""

    stage: str
    key: Name  # what it was run on
    digest: Name  # the artifact it left
    kind: str  # the artifact's kind
    report: Name  # SHA-256 of the report's JSON; the report's name in the ledger
    passed: StrictBool  # whether every gate and tolerance held
    seconds: Annotated[float, AllowInfNan(False)]  # wall-clock time of the stage alone
    created: str  # UTC time it finished, ISO 8601
    parts: Mapping[str, str] = field(default_factory=dict)  # each part of the key as text, for `pipe explain`
    notes: tuple[str, ...] = ()  # what the key could not follow, for `pipe explain`
    # the layer that differs most: layer, value, sqnr_db, cosine
    worst: Annotated[Mapping[str, Any], AfterValidator(_summary)] | None = None
    metrics: Mapping[str, _Figure] = field(default_factory=dict)  # the report's figures
    # of Layerline, Python and the system that ran it; those of other packages are parts of the key
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedError:
    """An error of a run, as the command line printed it."""

    error: str
    where: str | None = None
    hint: str | None = None


def printable_error(error: PipeError) -> RecordedError:
    """The error in the form that a run stores. Names are escaped: a file can hold no half surrogate pair."""
    what, where, hint = (printable(text, keep="\n") for text in (error.what, error.where, error.hint))
    return RecordedError(what, where or None, hint or None)


@dataclass(frozen=True)
class Run:
    """One `pipe run` that changed something: the record of every stage it ended with, in order.

    `ran` names the stages that were at work in it: those that left their record, or ended in an error. The records of
    others are of an earlier run, and so are their times. `sets` are the overrides (`key.path=value`) it was given.
    `sequence` counts the runs of the project: it orders them, since a clock can be set back. Runs that were written
    without it come first, by their ids. `errors` are those of stages that left no record.
    """

    id: Name
    passed: StrictBool
    records: tuple[Record, ...]
    ran: tuple[str, ...]
    sets: tuple[str, ...] = ()
    sequence: Annotated[int, Field(ge=0, le=_LAST_SEQUENCE)] = 0
    errors: Mapping[str, RecordedError] = field(default_factory=dict)

    @property
    def began(self) -> str:
        """UTC time by the clock of that day, ISO 8601; empty where the id doesn't hold one."""
        if _TIMED.match(self.id) is None:
            return ""
        day, clock = self.id.split("-")[:2]
        return f"{day[:4]}-{day[4:6]}-{day[6:]}T{clock[:2]}:{clock[2:4]}:{clock[4:]}Z"


_FILE_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,199}\.json(\.damaged)?")
_TIMED = re.compile(r"\d{8}-\d{6}(-|$)", re.ASCII)
_RECORD, _RUN = TypeAdapter(Record), TypeAdapter(Run)
_Entry = TypeVar("_Entry", Record, Run)


class Ledger:
    """Records by key, reports by digest and runs by time, under one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._keys, self._reports, self._runs = root / "keys", root / "reports", root / "runs"
        self._read: dict[Path, tuple[tuple[int, ...], Run | str]] = {}

    def get(self, key: str) -> Record | None:
        """What the key gave, or None."""
        path = self._keys / f"{key}.json"
        if not os.path.lexists(path):
            return None
        record = _read(_RECORD, path)
        if isinstance(record, Record) and record.key == key:
            return record
        return next((r for run in self.runs() for r in run.records if r.key == key), None)

    def put(self, record: Record) -> None:
        """Files a record under its key, in place of an older or damaged one."""
        path = self._keys / f"{record.key}.json"
        if _read(_RECORD, path) != record:
            self._write(path, _to_json(record) + "\n")

    def put_report(self, report: Report) -> str:
        """Files a report and returns its digest."""
        text = report.to_json()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if not self.report_is_whole(digest):
            self._write(self._reports / f"{digest}.json", text)
        return digest

    def report(self, record: Record) -> Report:
        """The report of a record; PipeError where it is missing or damaged, with the file and what is wrong with it."""
        try:
            return Report.from_json(self._report_text(record.report))
        except (OSError, ValueError) as error:
            raise PipeError(
                f"the report of stage {record.stage} is missing or damaged: {fault(error)}",
                where=str(self._reports / f"{record.report}.json"),
                hint=f"make it again with: pipe run {record.stage} --force",
            ) from None

    def report_is_whole(self, digest: str) -> bool:
        try:
            self._report_text(digest)
        except (OSError, ValueError):
            return False
        return True

    def _report_text(self, digest: str) -> bytes:
        text = read_bytes(self._reports / f"{digest}.json", _RECORD_BYTES)
        if hashlib.sha256(text).hexdigest() != digest:
            raise ValueError("its content is not that of its name")
        return text

    def runs(self) -> Iterator[Run]:
        """Every run, newest first; damaged files are passed over."""
        yield from (run for _, run in self._sorted_runs())

    def put_run(self, run: Run) -> None:
        """Writes a run, also while it is still going on."""
        self._write(self._runs / f"{run.id}.json", _to_json(run))

    def next_sequence(self) -> int:
        """The number of a run that begins now: one more than the greatest there is."""
        return min(max((run.sequence for run in self.runs()), default=0) + 1, _LAST_SEQUENCE)

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Records and runs that can't be read, with what is wrong."""
        for path in entries(self._keys, "*.json"):
            record = _read(_RECORD, path)
            if isinstance(record, str):
                yield f"record {path.stem[:12]}", record
            elif record.key != path.stem:
                yield f"record {path.stem[:12]}", f"it holds the key {record.key[:12]}"
        for path in entries(self._runs, "*.json"):
            run = self._run(path)
            if isinstance(run, str):
                yield f"run {path.stem}", run

    def set_aside(self) -> list[str]:
        """Renames the damaged files of runs, so that nobody stumbles over them again; gives the names of those runs."""
        broken = [p for p in entries(self._runs, "*.json") if isinstance(self._run(p), str)]
        for path in broken:
            with suppress(OSError):  # gone already, or a project that can't be written
                path.rename(path.with_name(path.name + _SET_ASIDE))
        return [path.stem for path in broken]

    def _sorted_runs(self) -> list[tuple[Path, Run]]:
        read = [(path, self._run(path)) for path in entries(self._runs, "*.json")]
        runs = [(path, run) for path, run in read if isinstance(run, Run)]
        return sorted(runs, key=lambda pair: (pair[1].sequence, pair[1].id), reverse=True)

    def _run(self, path: Path) -> Run | str:
        """The run in a file, or what is wrong with it; read once for as long as the file stays the same."""
        try:
            s = path.stat()
        except OSError as error:
            return fault(error)
        stamp = (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        if path not in self._read or self._read[path][0] != stamp:
            run = _read(_RUN, path)
            if isinstance(run, Run) and run.id != path.stem:
                run = f"it holds the run {run.id}"
            self._read[path] = stamp, run
        return self._read[path][1]

    def _write(self, path: Path, text: str) -> None:
        write_own(path, text, self._root.parent)

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
        position = {"last": 0, "previous": 1}.get(run_id)
        if position is None:
            matching_runs = [run for run in runs if run.id.startswith(run_id)]
        else:
            if stage:  # the newest run of each row of equal results
                having = [(r.report, run) for run in runs for r in run.records if r.stage == stage]
                runs = [next(same)[1] for _, same in groupby(having, key=itemgetter(0))]
            matching_runs = runs[position : position + 1]
        if len(matching_runs) == 1:
            return matching_runs[0]
        if not runs and not stage:
            raise PipeError("there is no run yet", hint="pipe run all")
        if run_id == "previous" and len(runs) == 1:
            what = "there is only one run"
            if stage:
                what = f"stage {stage} has had one result so far"
            raise PipeError(what, hint=f"the newest run is {runs[0].id}")
        if matching_runs:
            several = ", ".join(run.id for run in matching_runs[:5])
            raise PipeError(f"more than one run matches {run_id!r}", hint=f"give more of its id: {several}")
        meant = did_you_mean(run_id, ["last", "previous", *(r.id for r in runs)])
        newest = ", ".join(r.id for r in runs[:5]) or "none"
        raise PipeError(f"no run matches {run_id!r}", hint=f"{meant} newest runs: {newest}".lstrip())

    def forget(self, keep: int, in_use: set[str]) -> list[Path]:
        """Files no longer needed when only the newest `keep` runs and the artifacts `in_use` stay; deletes nothing."""
        runs = self._sorted_runs()
        reports = {r.report for _, run in runs[:keep] for r in run.records}
        kept = {path for path, _ in runs[:keep]}
        dropped = [path for path in self._files(self._runs) if path not in kept]
        for path in self._files(self._keys):
            record = None
            if path.suffix == ".json":
                record = self.get(path.stem)
            if record is not None and record.digest in in_use:
                reports.add(record.report)
            else:
                dropped.append(path)
        return dropped + [p for p in self._files(self._reports) if p.suffix != ".json" or p.stem not in reports]

    def _files(self, folder: Path) -> list[Path]:
        """What lies there under a name that the ledger gives, whole or half written."""
        return [path for path in entries(folder) if _FILE_NAME.fullmatch(path.name) or is_partial(path.name)]


def new_run_id() -> str:
    """Sorts by time, to the microsecond: two quick runs must not change places; unique among processes."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    return f"{moment}-{nanoseconds // 1000:06d}-{secrets.token_hex(1)}"


def _to_json(entry: Record | Run) -> str:
    return json.dumps(dataclasses.asdict(entry), ensure_ascii=False, indent=1)


def _read(adapter: TypeAdapter[_Entry], path: Path) -> _Entry | str:
    """The record or run in a file, or what is wrong with it."""
    try:
        return adapter.validate_python(read_json(path, size=_RECORD_BYTES))
    except (OSError, ValueError) as error:
        return fault(error)


def fault(error: Exception) -> str:
    """What is wrong with a file that could not be read or is of another form, in words."""
    if isinstance(error, OSError):
        return f"it can't be read: {error.strerror}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return located(place, first["msg"])
    return f"it can't be read: {error}"
