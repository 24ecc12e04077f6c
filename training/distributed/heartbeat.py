"""A sign of life from every rank, so that an endless wait is told as what it is: which rank, doing what, since when.

Each rank posts what it is at to the store in which the ranks met, at most twenty times a second, and a thread posts
once a second that it is alive. Only when a collective fails or takes too long does anybody read it.
"""

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

from layerline.pipeline.errors import PipeError, StageError

_LOG = logging.getLogger("layerline")
_BEAT_S = 1.0
_APART_S = 0.05
# What gloo and NCCL errors carry; other RuntimeErrors of a backward pass are the model's own.
_MARKS = ("gloo", "NCCL", "c10d", "Connection closed by peer", "Connection reset by peer")
WORKING = ("the backward pass", "reducing gradients")


class Pulse:
    """What this rank is at, posted for the others; and what the others are at.

    Args:
        store: where the ranks met; a connection of its own is made for the thread.
        rank, size: this one, and how many there are.
        alarm_s: seconds in one collective after which the thread says in the log who is being waited for; None never.
            For backends whose collectives cannot raise (NCCL): what follows is their own timeout.

    Attributes:
        step: the optimizer step being worked on.
        phase: which part of it.
        inputs: shapes of what the model was last given.
    """

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
        # After an uncaught exception the interpreter has left it in sys.
        atexit.register(lambda: self.close(getattr(sys, "last_value", None)))

    def at(self, phase: str, step: int) -> None:
        """Notes what this rank begins to do."""
        self.phase, self.step, self.since = phase, step, time.monotonic()
        if self.since - self._posted > _APART_S and not self._stop.is_set():
            self._post(self._store)

    def close(self, error: BaseException | None = None) -> None:
        """The last word of this rank: that it ended, and why."""
        if self._stop.is_set():
            return
        self._ended = f"with {type(error).__name__}: {_first_line(error)}" if error is not None else "without an error"
        self._stop.set()
        self._thread.join(timeout=2 * _BEAT_S)
        self._post(self._store)

    @contextmanager
    def guarded(self, phase: str, step: int) -> Iterator[None]:
        """A part of a step in which this rank depends on the others.

        Raises:
            StageError: a collective failed or timed out; names the ranks that are to blame.
        """
        self.at(phase, step)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS):
                raise StageError(
                    f"{phase} of step {step} failed after {time.monotonic() - self.since:.0f} s: {self.diagnose()}",
                    where=f"rank {self.rank}", hint=f"from torch: {_first_line(error)}",
                ) from error  # fmt: skip
            raise

    def diagnose(self) -> str:
        """Which ranks are missing, stuck or gone, in words."""
        store = self._beating if threading.current_thread() is self._thread else self._store
        try:
            first = self._others(store)
            time.sleep(2.5 * _BEAT_S)  # a living rank posts twice in this time
            now = self._others(store)
        except RuntimeError:
            return (
                "rank 0 is gone: the store that it keeps does not answer" if self.rank else "the store does not answer"
            )
        said = [text for r, state in sorted(now.items()) if (text := self._about(r, first.get(r), state))]
        return "; ".join(said) or "all ranks are alive and at the same step: the connection between them is broken"

    def ended(self, ranks: Sequence[int]) -> str:
        """Which of these ranks have ended, and how; "" for none."""
        states = self._others(self._store)
        gone = [self._about(r, None, state) for r in ranks if (state := states.get(r)) and state["ended"]]
        return "; ".join(gone)

    def _about(self, rank: int, before: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
        if now is None:
            return f"rank {rank} never started"
        unlike = now["inputs"] and self.inputs and now["inputs"] != self.inputs
        inputs = f"; its input is {now['inputs']}, here {self.inputs}" if unlike else ""
        place = f"{now['phase']} of step {now['step']}"
        if now["ended"]:
            fewer = " (it had fewer batches)" if "without" in now["ended"] and now["step"] <= self.step else ""
            return f"rank {rank} ended {now['ended']} in {place}{fewer}{inputs}"
        if before is not None and before["beat"] == now["beat"]:
            return f"rank {rank} gives no sign of life; it was last seen in {place}{inputs}"
        if (now["step"], now["phase"] in WORKING) < (self.step, self.phase in WORKING):
            return f"rank {rank} is alive and has been in {place} for {now['seconds']:.0f} s{inputs}"
        return f"rank {rank} is in {place} as well; its input is {now['inputs']}, here {self.inputs}" if inputs else ""

    def _others(self, store: Any) -> dict[int, dict[str, Any] | None]:
        out: dict[int, dict[str, Any] | None] = {}
        for rank in range(self.size):
            if rank != self.rank:
                key = f"pulse/{rank}"
                out[rank] = json.loads(store.get(key)) if store.check([key]) else None
        return out

    def _run(self) -> None:
        told = 0.0
        while True:
            if not self._post(self._beating):
                return
            since = self.since
            late = self._alarm_s is not None and time.monotonic() - since > self._alarm_s
            if late and told != since and self.phase in WORKING:
                told = since
                _LOG.error("rank %d waits in %s of step %d: %s", self.rank, self.phase, self.step, self.diagnose())
            if self._stop.wait(_BEAT_S):
                return

    def _post(self, store: Any) -> bool:
        self._beat, self._posted = self._beat + 1, time.monotonic()
        state = {"beat": self._beat, "step": self.step, "phase": self.phase, "inputs": self.inputs,
                 "seconds": time.monotonic() - self.since, "ended": self._ended}  # fmt: skip
        try:
            store.set(f"pulse/{self.rank}", json.dumps(state))
        except RuntimeError:  # the keeper of the store is gone: whoever asks it next is told
            return False
        return True


def _first_line(error: BaseException) -> str:
    text = error.what if isinstance(error, PipeError) else str(error)
    return text.strip().splitlines()[0][:300] if text.strip() else ""
