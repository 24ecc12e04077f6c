"""Heartbeats of all ranks, so that the error on a failed or endless collective names the rank and what it is doing.
Each rank posts its phase to the store in which the ranks met, at most twenty times a second, and a thread posts once a
second. The posts are read only when a collective fails or takes too long."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from layerline.pipeline.errors import PipeError, StageError, first_line

_LOG = logging.getLogger("layerline")
_BEAT_S = 1.0
_APART_S = 0.05
# Parts of the messages of gloo and NCCL errors. Other RuntimeErrors of a backward pass come from the model.
_MARKS = ("gloo", "NCCL", "c10d", "pair closure", "Connection closed by peer", "Connection reset by peer")
WORKING = ("the backward pass", "reducing gradients")


class Pulse:
    """Posts the phase of this rank to the store in which the ranks met, and reads those of the others. After `alarm_s`
    seconds in one collective the thread logs which rank is late (None: never). It is for backends whose collectives
    don't raise (NCCL) but abort the process after their own timeout."""

    def __init__(self, store: Any, rank: int, size: int, alarm_s: float | None = None) -> None:
        self.rank, self.size = rank, size
        self.step, self.phase, self.inputs = 0, "starting", ""
        self.since = time.monotonic()
        # A connection for each thread.
        self._store, self._beating = store.clone(), store.clone()
        self._alarm_s, self._beat, self._ended, self._posted = alarm_s, 0, "", 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="layerline-pulse", daemon=True)
        self._thread.start()
        # The interpreter stores an uncaught exception in sys.
        atexit.register(lambda: self.close(getattr(sys, "last_value", None)))

    def at(self, phase: str, step: int) -> None:
        """Records the phase that this rank begins."""
        self.phase, self.step, self.since = phase, step, time.monotonic()
        if self.since - self._posted > _APART_S and not self._stop.is_set():
            self._post(self._store)

    def close(self, error: BaseException | None = None) -> None:
        """Posts that this rank has ended, and why."""
        if self._stop.is_set():
            return
        self._ended = "without an error"
        if error is not None:
            message = error.what if isinstance(error, PipeError) else str(error)
            self._ended = f"with {type(error).__name__}: {first_line(message)[:300]}"
        self._stop.set()
        self._thread.join(timeout=2 * _BEAT_S)
        self._post(self._store)

    @contextmanager
    def guarded(self, phase: str, step: int) -> Iterator[None]:
        """A part of a step in which this rank waits for others."""
        self.at(phase, step)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS):
                raise StageError(
                    f"{phase} of step {step} failed after {time.monotonic() - self.since:.0f} s: {self.diagnose()}",
                    where=f"rank {self.rank}", hint=f"from torch: {first_line(str(error))[:300]}",
                ) from error  # fmt: skip
            raise

    def diagnose(self) -> str:
        """A message that names the ranks that are missing, stuck or gone."""
        store = self._beating if threading.current_thread() is self._thread else self._store
        try:
            first = self._others(store)
            time.sleep(2.5 * _BEAT_S)  # a living rank posts twice in this time
            now = self._others(store)
        except RuntimeError:
            if self.rank == 0:
                return "the store does not answer"
            return "rank 0 is gone: the store that it keeps does not answer"
        messages = [self._about(rank, first.get(rank), now[rank]) for rank in sorted(now)]
        text = "; ".join(filter(None, messages))
        return text or "all ranks are alive and at the same step: the connection between them is broken"

    def ended(self, ranks: Sequence[int]) -> str:
        """A message that names those of these ranks that have ended; "" for none."""
        ended = {rank: s for rank, s in self._others(self._store).items() if s is not None and s["ended"]}
        return "; ".join(self._about(rank, None, ended[rank]) for rank in ranks if rank in ended)

    def _about(self, rank: int, before: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
        """What is unusual about a rank; "" where nothing is."""
        if now is None:
            return f"rank {rank} never started"
        inputs = ""
        if now["inputs"] and self.inputs and now["inputs"] != self.inputs:
            inputs = f"; its input is {now['inputs']}, here {self.inputs}"
        place = f"{now['phase']} of step {now['step']}"
        if now["ended"]:
            had_fewer = "without" in now["ended"] and now["step"] <= self.step
            fewer = " (it had fewer batches)" if had_fewer else ""
            return f"rank {rank} ended {now['ended']} in {place}{fewer}{inputs}"
        if before is not None and before["beat"] == now["beat"]:
            return f"rank {rank} gives no sign of life; it was last seen in {place}{inputs}"
        if (now["step"], now["phase"] in WORKING) < (self.step, self.phase in WORKING):
            return f"rank {rank} is alive and has been in {place} for {now['seconds']:.0f} s{inputs}"
        if inputs:
            return f"rank {rank} is in {place} as well{inputs}"
        return ""

    def _others(self, store: Any) -> dict[int, dict[str, Any] | None]:
        out: dict[int, dict[str, Any] | None] = {}
        for rank in range(self.size):
            if rank != self.rank:
                key = f"pulse/{rank}"
                out[rank] = None
                if store.check([key]):
                    out[rank] = json.loads(store.get(key))
        return out

    def _run(self) -> None:
        logged = 0.0
        while True:
            if not self._post(self._beating):
                return
            since = self.since
            late = self._alarm_s is not None and time.monotonic() - since > self._alarm_s
            if late and logged != since and self.phase in WORKING:
                logged = since
                _LOG.error("rank %d waits in %s of step %d: %s", self.rank, self.phase, self.step, self.diagnose())
            if self._stop.wait(_BEAT_S):
                return

    def _post(self, store: Any) -> bool:
        self._beat += 1
        self._posted = time.monotonic()
        state = {"beat": self._beat, "step": self.step, "phase": self.phase, "inputs": self.inputs,
                 "seconds": time.monotonic() - self.since, "ended": self._ended}  # fmt: skip
        try:
            store.set(f"pulse/{self.rank}", json.dumps(state))
        except RuntimeError:  # the rank that keeps the store is gone: the next collective fails and reports it
            return False
        return True
