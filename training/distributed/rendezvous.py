"""What the launcher says, and the store in which ranks meet before they are a group; a failed wait names the ranks."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from layerline.pipeline.inputs.untrusted import integer, is_number, launched


def device(kind: str) -> torch.device:
    """The device of this rank: the GPU of its number on its machine, where a launcher gave it one."""
    number = os.environ.get("LOCAL_RANK")
    if kind != "cuda" or number is None:
        return torch.device(kind)
    if not is_number(number):
        raise ConfigError(f"LOCAL_RANK is {number!r:.40}", where="environment", hint="start with torchrun")
    if int(number) >= (count := torch.cuda.device_count()):
        raise Unavailable(f"this machine has {count} GPUs, and the launcher started a rank for GPU {number}",
                          where="LOCAL_RANK", hint="start at most one process per GPU")  # fmt: skip
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
            plural = "s" if len(missing) > 1 else ""
            raise StageError(
                f"rank{plural} {', '.join(map(str, missing))} of {size} did not come within {timeout_s:g} s",
                where=f"rank {rank}", hint="look at what that process said, or raise distributed.timeout_s",
            )  # fmt: skip
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
