"""What the launcher says, and the store in which ranks meet before they are a group. Each rank posts there what it is
doing, so that a failed wait names the ranks that are missing."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from layerline.pipeline.errors import ConfigError, StageError, Unavailable, first_line
from layerline.pipeline.untrusted import integer, is_number, launched

# Parts of the messages of gloo and NCCL errors. Other RuntimeErrors of a backward pass come from the model.
_MARKS = ("gloo", "NCCL", "c10d", "pair closure", "Connection closed by peer", "Connection reset by peer")
# A rank that fails posts its error as it ends; the others notice the broken connection at about the same time.
_LAST_POST_S = 0.5
USERS_CODE = "the user's code after"


def device(choice: str, where: str) -> torch.device:
    """The device that auto, cuda or cpu means here; of several ranks, the GPU of this rank's number on its machine."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        hint = "set it to auto or cpu, or mend the driver"
        raise Unavailable("torch finds no CUDA device here", where=where, hint=hint)
    number = os.environ.get("LOCAL_RANK")
    if number is None:
        return torch.device("cuda")
    if not is_number(number):
        raise ConfigError(f"LOCAL_RANK is {number!r:.40}", where="environment", hint="start with torchrun")
    if int(number) >= torch.cuda.device_count():
        what = f"this machine has {torch.cuda.device_count()} GPUs, and the launcher started a rank for GPU {number}"
        raise Unavailable(what, where="LOCAL_RANK", hint="start at most one process per GPU")
    torch.cuda.set_device(int(number))
    return torch.device("cuda", int(number))


@functools.cache
def rendezvous(timeout_s: float) -> Any:
    """The store that torchrun keeps; without torchrun, rank 0 keeps one at MASTER_ADDR and MASTER_PORT."""
    rank, _ = launched()
    host, named = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    try:
        port = integer(named, 0, 65535)
    except ValueError as error:
        raise ConfigError(f"MASTER_PORT: {error}", where="environment", hint="start with torchrun") from None
    keeper = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in the module's list of names
            host, port, is_master=keeper, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
    except dist.DistError as error:
        hint = "is it running, and do MASTER_ADDR and MASTER_PORT name its machine?"
        raise StageError(f"rank 0 does not answer within {timeout_s:g} s", where=f"{host}:{port}", hint=hint) from error
    # A restarted group of workers must not read what the one before it left.
    return PrefixStore(f"layerline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def meet(store: Any, place: str, rank: int, size: int, timeout_s: float,
         ended: Callable[[Sequence[int]], str] | None = None) -> None:  # fmt: skip
    """Waits in `place` until all ranks are there."""
    store.set(f"{place}/here/{rank}", "")
    pause, end = 0.005, time.monotonic() + timeout_s
    missing = list(range(size))
    while missing := [r for r in missing if not store.check([f"{place}/here/{r}"])]:
        if time.monotonic() > end:
            who = f"rank {missing[0]}"
            if len(missing) > 1:
                who = f"ranks {', '.join(map(str, missing))}"
            raise StageError(f"{who} of {size} did not come within {timeout_s:g} s", where=f"rank {rank}",
                             hint="look at what that process said, or raise distributed.timeout_s")  # fmt: skip
        if ended is not None and (text := ended(missing)):
            raise StageError(text, where=f"rank {rank}")
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def announce(place: str, *, runs: bool, timeout_s: float) -> None:
    """Rank 0: whether all ranks are needed in `place`."""
    rank, size = launched()
    store = rendezvous(timeout_s)
    store.set(f"decision/{place}", str(int(runs)))
    if not runs:  # this process may end now, and with it the store it keeps: the others read first
        meet(store, f"decision/{place}", rank, size, timeout_s)


def follow(place: str, *, timeout_s: float) -> bool:
    """The other ranks: what rank 0 decided, however long that takes."""
    rank, _ = launched()
    store = rendezvous(timeout_s)
    try:
        while not store.check([f"decision/{place}"]):
            time.sleep(0.05)
        runs = bool(int(store.get(f"decision/{place}")))
        store.set(f"decision/{place}/here/{rank}", "")
    except dist.DistError as error:
        raise StageError(f"rank 0 is gone before it said whether {place} runs", where=f"rank {rank}") from error
    return runs


class Phases:
    """Posts what this rank is doing to the store in which the ranks met, and names the ranks that others wait for. The
    posts are read only when a collective has failed."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.step = rank, size, 0
        self._store, self._phase, self._has_ended = store.clone(), "starting", False
        # The interpreter keeps an uncaught exception in sys.
        atexit.register(lambda: self.close(getattr(sys, "last_value", None)))

    def at(self, phase: str, step: int) -> None:
        """Posts the phase that this rank begins."""
        self._phase, self.step = phase, step
        self._post("")

    def close(self, error: BaseException | None = None) -> None:
        """Posts that this rank has ended, and why."""
        if self._has_ended:
            return
        self._has_ended = True
        outcome = "without an error"
        if error is not None:
            message = getattr(error, "what", "") or str(error)
            outcome = f"with {type(error).__name__}: {first_line(message)[:300]}"
        self._post(outcome)

    @contextmanager
    def guarded(self, phase: str, step: int) -> Iterator[None]:
        """A part of a step in which this rank waits for others."""
        self.at(phase, step)
        since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS):
                raise StageError(
                    f"{phase} of step {step} failed after {time.monotonic() - since:.0f} s: {self.diagnose()}",
                    where=f"rank {self.rank}", hint=f"from torch: {first_line(str(error))[:300]}",
                ) from error  # fmt: skip
            raise

    def diagnose(self) -> str:
        """A message that names the ranks that are missing, behind or gone."""
        time.sleep(_LAST_POST_S)
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            texts = [text for text in map(self._about, others) if text]
            if not texts:  # one hangs or was killed in a part of the step in which all wait for each other
                texts = ["no rank is behind: one hangs or was killed, or the connection between them is broken"]
                own_place = self._place(self.rank)
                elsewhere = [rank for rank in others if self._place(rank) != own_place]
                texts += [f"rank {rank} was last seen in {self._place(rank)}" for rank in elsewhere]
            return "; ".join(texts)
        except RuntimeError:
            if self.rank == 0:
                return "the store does not answer"
            return "rank 0 is gone: the store that it keeps does not answer"

    def ended(self, ranks: Sequence[int]) -> str:
        """A message that names those of these ranks that have ended; "" for none."""
        texts = []
        for rank in ranks:
            state = self._state(rank)
            if state is not None and state["ended"]:
                texts.append(self._about(rank))
        return "; ".join(texts)

    def _about(self, rank: int) -> str:
        """What is unusual about a rank; "" where nothing is."""
        state = self._state(rank)
        if state is None:
            return f"rank {rank} never started"
        place = self._place(rank)
        if state["ended"]:
            text = f"rank {rank} ended {state['ended']} in {place}"
            if "without" in state["ended"] and state["step"] <= self.step:
                text += " (it had fewer batches)"
            return text
        waits_for_others = not state["phase"].startswith(USERS_CODE)
        if (state["step"], waits_for_others) < (self.step, True):
            return f"rank {rank} was last seen in {place}"
        return ""

    def _place(self, rank: int) -> str:
        state = self._state(rank) or {"phase": "starting", "step": 0}
        return f"{state['phase']} of step {state['step']}"

    def _state(self, rank: int) -> dict[str, Any] | None:
        key = f"phase/{rank}"
        if not self._store.check([key]):
            return None
        state: dict[str, Any] = json.loads(self._store.get(key))
        return state

    def _post(self, ended: str) -> None:
        state = {"step": self.step, "phase": self._phase, "ended": ended}
        try:
            self._store.set(f"phase/{self.rank}", json.dumps(state))
        except RuntimeError:
            return  # the rank that keeps the store is gone: the next collective fails and reports it
