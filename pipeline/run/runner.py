"""Brings stages up to date, one after the other. Finished work survives a kill at any point.

A stage works in `work/<key>` under a lock, so that several processes on one project make each artifact once. Its output
is sealed (hashed and synced), recorded in the ledger, and then renamed into the store. A kill in between leaves a
scratch folder from which the stage resumes, or a sealed output that the next run adopts.

Where a launcher (torchrun) started several ranks, rank 0 does all this. The other ranks run only the stages that train
together, when rank 0 says so, and what they write is thrown away.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from filelock import Timeout

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import PipeError, StageError, TaskError, Unavailable, as_pipe_error
from layerline.pipeline.files import own_folder, remove, write_own
from layerline.pipeline.hashing import copied
from layerline.pipeline.keys import env
from layerline.pipeline.records.ledger import Record, Run, new_run_id, printable_error
from layerline.pipeline.records.run_lock import at_work, lock
from layerline.pipeline.records.store import Artifact
from layerline.pipeline.report import Report
from layerline.pipeline.run import check as checking
from layerline.pipeline.run.outcome import Listener, Outcome, Result
from layerline.pipeline.run.plan import ORDER, SETS, Step, open_planner, order, shown
from layerline.pipeline.run.workplace import input_folders, temporary_work
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import Task
from layerline.pipeline.untrusted import launched

BROKEN_OFF = "an earlier run did not come to its end: it was killed, or its own code ended the process"
_FAILED_BEFORE = "failed before; nothing that it depends on has changed"


class Runner:
    """Runs a project's stages; the listener hears about each step."""

    def __init__(self, project: Project, listener: Listener) -> None:
        self.project = project
        self.listener = listener
        self.planner = open_planner(project)
        self.store = self.planner.store
        self.ledger = self.planner.ledger
        self._task = Task(project.root / project.task, project.root, self._same_code)
        self._announced: set[str] = set()
        self._named: tuple[str, ...] = ()
        self._sequence = 0
        # The artifacts that this run made or found, by kind.
        self._made: dict[str, Artifact | None] = {}

    def run(self, names: Sequence[str] | None = None, *, force: bool = False, run_id: str = "") -> Outcome:
        """Runs the named stages (None: all) and the stages that they need, if they are out of date.

        With `force` the named stages run even if they are fresh. A failure of a stage is in the outcome, not raised.
        The run is filed as `run_id`, or under a new id.
        """
        stages = self.project.needed_for(names)
        if launched()[0] > 0:
            return self._follow(stages)
        self._named = tuple(s.name for s in stages)
        run_id = filed_id = run_id or new_run_id()
        self._sequence = self.ledger.next_sequence()
        self._made = {}
        results: list[Result] = []
        later: tuple[Step, ...] = ()
        with at_work(self.project.state) as was_broken_off:
            if was_broken_off:
                self.listener.say(BROKEN_OFF)
            for name in self.ledger.set_aside():
                self.listener.say(f"the record of run {name} is damaged and was set aside; `pipe gc` removes it")
            try:
                for stage in stages:
                    failed = [result.name for result in results if result.state == "failed"]
                    if failed:
                        result = Result(name=stage.name, state="blocked", reason=f"{failed[0]} failed")
                    else:
                        forced = force and (names is None or stage.name in names)
                        result = self._advance(stage, forced=forced)
                    # The other ranks wait to hear of each stage that they may take part in.
                    self._announce(stage, runs=False)
                    results.append(result)
                    self.listener.finished(result)
                    # After each stage: a kill later on leaves a run with what was finished.
                    filed_id = self._remember(run_id, results)
                if not any(result.error and not result.record for result in results):
                    later = self._later(stages)
            finally:
                self.planner.hasher.save()
        return Outcome(run=filed_id, results=tuple(results), out_of_date=later)

    # One stage

    def _advance(self, stage: Stage, *, forced: bool) -> Result:
        """Brings one stage up to date. Its errors become part of the result."""
        started = time.monotonic()
        reason = ""
        try:
            step = self.planner.step(stage, self._made)
            reason = step.reason
            ran = False
            if forced and step.artifact:
                reason = "forced"
            if forced or step.artifact is None:
                step, ran = self._make(step, forced=forced, reason=reason)
            self._made[stage.gives] = step.artifact
            if ran:
                return self._result(step, "ran", reason)
            assert step.record is not None
            with suppress(OSError):  # a project that can't be written is still up to date
                self.ledger.put(step.record)
            return self._result(step, "cached", step.reason)
        except BrokenPipeError:  # whoever read our output has gone: no fault of the stage
            raise
        except (PipeError, OSError, MemoryError) as raised:
            seconds = time.monotonic() - started
            return Result(name=stage.name, state="failed", reason=reason, seconds=seconds, error=as_pipe_error(raised))

    def _result(self, step: Step, state: Literal["ran", "cached"], reason: str) -> Result:
        """The result of a stage that has a record, which may say that a gate failed."""
        record = step.record
        assert record is not None
        seconds = record.seconds
        if state == "cached":
            seconds = 0.0
        result = Result(name=step.stage.name, state=state, reason=reason, seconds=seconds, record=record)
        if record.passed:
            return result
        if state == "cached":
            result = replace(result, reason=_FAILED_BEFORE)
        return replace(result, state="failed", error=self.ledger.report(record).failure())

    def _make(self, step: Step, *, forced: bool, reason: str) -> tuple[Step, bool]:
        """Runs a stage, unless another process has made its artifact in the meantime; whether it ran."""
        assert step.key is not None
        own_folder(self.project.works, self.project.state)
        work = self.project.works / step.key
        with self._lock(work, step.stage):
            now = self.planner.step(step.stage, self._made)
            if now.artifact is not None and not forced:
                return replace(now, reason="made by another process"), False
            adopted = None
            if not forced:
                adopted = self._adopt(now, work)
            if adopted is not None:
                return replace(now, artifact=adopted, reason="finished by a run that was cut short"), False
            if step.stage.long:
                self._look_ahead()
            self._sign(work)
            self.listener.started(step.stage, reason)
            return self._execute(step, work), True

    @contextmanager
    def _lock(self, work: Path, stage: Stage) -> Iterator[None]:
        """Holds the lock of a working folder; waits for the process that has it."""
        work_lock = lock(work.with_suffix(".lock"))
        try:
            work_lock.acquire(timeout=0)
        except Timeout:
            self.listener.say(f"{stage.name}: another process is working on it; waiting")
            work_lock.acquire()
        try:
            yield
        finally:
            work_lock.release()

    def _adopt(self, step: Step, work: Path) -> Artifact | None:
        """The output of a run that was killed between recording it and moving it into the store."""
        if step.record is None or not self.ledger.report_is_whole(step.record.report):
            return None
        sealed = self.store.sealed(work / "out")
        if sealed is None or sealed.digest != step.record.digest:
            return None
        artifact = self.store.move_in(sealed)
        shutil.rmtree(work)
        return artifact

    def _sign(self, work: Path) -> None:
        """Writes into a working folder what `pipe resume` needs: its place among the others, and the overrides.

        Only under the lock: the process that held it before removes the folder when it is done.
        """
        works = self.project.works
        number = 1 + max((order(path.parent) for path in works.glob(f"*/{ORDER}")), default=0)
        write_own(work / ORDER, str(number), works, durable=False)
        write_own(work / SETS, json.dumps(self.project.sets), works, durable=False)

    def _execute(self, step: Step, work: Path) -> Step:
        """Runs the stage in its working folder, and files what it left: seal, record, move into the store."""
        stage_work = self._prepared(step, work)
        started = time.monotonic()
        self._announce(step.stage, runs=True)
        with self._task.border():
            report = step.stage.run(stage_work)
        seconds = time.monotonic() - started
        if not isinstance(report, Report):
            raise StageError(f"stage {step.stage.name} returned {type(report).__name__}, not a Report")
        change = self.planner.changed(step, self._task.imported)
        if change:
            raise _changed_while_read(change, step.stage, change.split(" ")[0])
        # In this order: a kill after the record leaves a sealed output, which the next run adopts.
        sealed = self.store.seal(stage_work.out, step.stage.gives, step.stage.side)
        record = self._record(step, sealed.digest, report, seconds)
        self.ledger.put(record)
        artifact = self.store.move_in(sealed)
        shutil.rmtree(work)
        return replace(step, record=record, artifact=artifact)

    def _prepared(self, step: Step, work: Path) -> Work:
        """What the stage is handed: an empty folder for its output, and what an earlier run left in its scratch one."""
        out, scratch = work / "out", work / "scratch"
        remove(out)
        out.mkdir()
        own_folder(scratch, work)
        for path in scratch.rglob("*"):
            # What a stage writes into its scratch folder must not land where a link leads.
            if path.is_symlink():
                remove(path)
        return Work(
            inputs=input_folders(step.stage, self._made),
            task=self._task,
            out=out,
            scratch=scratch,
            log=self.listener,
            copies=self._copied(step, work),
            parts=shown(step.parts),
        )

    def _copied(self, step: Step, work: Path) -> Path | None:
        """A folder with a copy of each file that the stage reads, hashed while it was copied; None if it reads none."""
        folder = work / "copies"
        remove(folder)
        for name in step.stage.files():
            own_folder((folder / name).parent, work)
            try:
                digest = copied(self.project.root / name, folder / name)
            except FileNotFoundError:
                digest = ""
            if digest != step.parts[f"file.{name}"]:
                raise _changed_while_read(f"{name} was changed", step.stage, name)
        if not step.stage.files():
            return None
        return folder

    def _record(self, step: Step, digest: str, report: Report, seconds: float) -> Record:
        assert step.key is not None
        # Only what was measured: an engine that could not be run has no worst layer.
        worst = [r for r in report.sorted(report.order)[:1] if r.sqnr_db is not None or not r.passed]
        return Record(
            stage=step.stage.name,
            key=step.key,
            digest=digest,
            kind=step.stage.gives,
            report=self.ledger.put_report(report),
            passed=report.passed,
            seconds=round(seconds, 3),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            parts=shown(step.parts),
            notes=step.notes,
            worst=worst[0].summary() if worst else None,
            metrics=report.plain_metrics(),
            versions=env.versions(),
        )

    # Before a stage

    def _same_code(self) -> None:
        """Code just imported must be the code the keys were made from; checked for all hooks, also of later stages."""
        fresh = open_planner(self.project)
        hooks: set[str] = set()
        for stage in self.project.stages:
            hooks.update(stage.hooks())
        for hook in sorted(hooks):
            try:
                same = self.planner.fingerprint(hook).digest == fresh.fingerprint(hook).digest
            except TaskError:
                continue  # the stage that needs the file reports that it doesn't parse
            if not same:
                raise TaskError(
                    f"what {hook}() reaches was edited while the run was starting",
                    where=self.project.task,
                    hint="run again; nothing was recorded",
                )

    def _look_ahead(self) -> None:
        """Before a stage that may take long, checks the stages of this run, so that no later stage fails after it."""
        if not self.project.check or launched()[1] > 1:
            return
        key = checking.digest(self.planner)
        if checking.passed_before(self.project, key):
            return
        with self._task.border():
            done = checking.check(self.project)
        # What this machine lacks matters to the long stage alone.
        long_stages = [stage.name for stage in self.project.stages if stage.long]
        stops = []
        for finding in done.errors:
            stages = self._named
            if finding.exit_code == Unavailable.exit_code:
                stages = tuple(long_stages[:1])
            if finding.stage in ("", *stages) and finding.stage in ("", *self._named):
                stops.append(finding)
        for finding in done.findings:
            if finding.state != "ok" and finding not in stops:
                self.listener.say(f"{finding.state}: {finding.error()}")
        if stops:
            raise checking.failure(stops)
        if not done.errors:
            checking.remember(self.project, key)

    # Ranks

    def _announce(self, stage: Stage, *, runs: bool) -> None:
        """Tells the other ranks, once for each stage, whether it runs."""
        if stage.together and stage.name not in self._announced and launched()[1] > 1:
            self._announced.add(stage.name)
            stage.announce(runs=runs)

    def _follow(self, stages: Sequence[Stage]) -> Outcome:
        """What a rank other than the first does."""
        results: list[Result] = []
        for stage in stages:
            if not stage.together:
                continue
            started = time.monotonic()
            error: PipeError | None = None
            try:
                if not stage.follow():
                    continue
                # Stages that run together take no input so far: what they would read lies in rank 0's store.
                parts = shown(self.planner.step(stage, {}).parts)
                with temporary_work(self._task, self.listener, {}, parts) as work, self._task.border():
                    stage.run(work)
            except (PipeError, OSError, MemoryError) as raised:
                error = as_pipe_error(raised)
            seconds = time.monotonic() - started
            result = Result(name=stage.name, state="ran", reason=f"as rank {launched()[0]}", seconds=seconds)
            if error:
                result = replace(result, state="failed", error=error)
            results.append(result)
        return Outcome(run="", results=tuple(results))

    # After a stage

    def _remember(self, run_id: str, results: Sequence[Result]) -> str:
        """Files the run, also one that ended in an error, and returns its id; that of the newest if both end alike."""
        records = tuple(result.record for result in results if result.record)
        errors = {r.name: printable_error(r.error) for r in results if r.error and not r.record}
        if not records and not errors:
            return run_id
        newest = next(self.ledger.runs(), None)
        if newest is not None and newest.id != run_id:
            is_repeated = all(record in newest.records for record in records)
            if errors:
                is_repeated = not newest.passed and (newest.records, newest.errors) == (records, errors)
            if is_repeated:
                return newest.id
        ran = tuple(result.name for result in results if result.worked)
        passed = len(results) == len(self._named) and all(result.passed for result in results)
        run = Run(run_id, passed, records, ran, self.project.sets, self._sequence, errors)
        try:
            self.ledger.put_run(run)
        except OSError:
            if not errors:  # else the same cause (a full disk) has made a stage fail, which is the error to report
                raise
        return run_id

    def _later(self, ran: Sequence[Stage]) -> tuple[Step, ...]:
        """Stages outside this run that are not fresh any more."""
        steps = []
        for stage in self.project.stages:
            if stage in ran:
                continue
            try:
                step = self.planner.step(stage, self._made)
            except PipeError as error:  # it would fail, which is no fault of this run
                step = Step(stage=stage, key=None, parts={}, reason=str(error).splitlines()[0])
            self._made[stage.gives] = step.artifact
            if step.artifact is None:
                steps.append(step)
        return tuple(steps)


def _changed_while_read(change: str, stage: Stage, name: str) -> PipeError:
    """The error of a stage whose input may differ from what its key says: no wrong result is filed."""
    return PipeError(
        f"{change} while stage {stage.name} was reading it; nothing was filed",
        where=name,
        hint="run again when nothing writes it; a hook may write a file that it reads only where it is missing",
    )
