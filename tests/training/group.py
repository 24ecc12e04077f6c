"""Several ranks for a test: processes on 127.0.0.1 that end in bounded time, whatever happens in them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # what making the first optimizer imports
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

_CONTEXT = multiprocessing.get_context("forkserver")
# torch is imported once, in a process without threads, and every rank is a fork of that.
_CONTEXT.set_forkserver_preload(
    ["tests.training.group", "layerline.training.distributed.sharding", "layerline.training.setup.model_optimizer"]
)


def split(model: nn.Module) -> nn.Module:
    """The model, split over the ranks by torch's `fully_shard` as a user does it: its children, then the rest."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for unit in (*model.children(), model):
        if any(True for _ in unit.parameters()):
            fully_shard(unit)
    return model


@dataclass(frozen=True)
class Died:
    """What a rank raised, as text."""

    kind: str
    text: str


def ranks(function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 60.0) -> list[Any]:
    """What `function(rank, *args)` gave on each rank; a rank that raised gives Died.

    The function is one of a test module's top level. A rank that is still there after `timeout` seconds is killed and
    fails the test; one that was killed gives None.
    """
    port = _free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(theirs, function, rank, size, port, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    end, results = time.monotonic() + timeout, []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(end - time.monotonic(), 0.1)):
                raise AssertionError(f"rank {rank} still runs after {timeout} s")
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                results.append(None)
    finally:
        for process in processes:
            process.join(5 if len(results) == size else 0)
            if process.is_alive():
                process.kill()
    return results


def good(results: list[Any]) -> list[Any]:
    """The same results, none of which is an error."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Died), f"rank {rank}: {result.kind}\n{result.text}"
    return results


def _rank(pipe: Any, function: Callable[..., Any], rank: int, size: int, port: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in place.items()})
    try:
        answer = function(rank, *args)
        _last_word(None)
    except BaseException as error:
        _last_word(error)
        answer = Died(type(error).__name__, f"{error}\n{traceback.format_exc()}")
    try:
        # By value: the pipe's own way hands over shared memory, which ends with this process.
        pipe.send_bytes(pickle.dumps(answer))
    finally:
        pipe.close()


def _last_word(error: BaseException | None) -> None:
    """What the interpreter's own end does; a forked process has none."""
    from layerline.training.distributed import ranks as joined

    for group in joined._JOINED.values():
        group.phases.close(error)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
