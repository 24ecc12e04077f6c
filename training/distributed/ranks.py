"""The group of ranks that train together: joining, comparing models and configurations, and exchanging objects."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from layerline.pipeline.errors import PipeError, StageError
from layerline.pipeline.untrusted import launched
from layerline.training.config.sections import Config, DistributedConfig
from layerline.training.distributed import rendezvous as launch
from layerline.training.distributed.rendezvous import Phases, meet, rendezvous
from layerline.training.model.canonical_names import NamedTensors

_MEETINGS = itertools.count()
# One per process group, however many optimizers there are.
_JOINED: dict[Any, Ranks] = {}
# Folders of a rank's own files may differ.
_OWN = {"save_dir"}
# Greatest message in which tensors are sent outside of a backward pass.
_MESSAGE_BYTES = 1 << 26
ParamLine = tuple[str, str]
T = TypeVar("T")


class Ranks:
    """This process and the group that it trains in."""

    def __init__(self, store: Any, config: DistributedConfig, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = config.timeout_s
        self.store = store
        backends = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
        self.serves_cpu = "cpu:" in backends  # whether it sends tensors in CPU memory as well
        # The device from which the backend sends tensors
        self.device = torch.device("cpu")
        if "nccl" in backends:
            # torch's collectives of objects use the current GPU: the model's, or the one that the launcher means.
            if device.type == "cpu":
                launch.device("cuda", "distributed.backend")
            elif device.index is not None:
                torch.cuda.set_device(device)
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.phases = Phases(store, self.rank, self.size)

    def floats(self, *values: float) -> list[list[float]]:
        """The values of all ranks, in the order of ranks, by one collective."""
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(gathered, row)
        rows: list[list[float]] = torch.stack(gathered).tolist()  # one read from the device
        return rows

    def gather(self, thing: Any) -> list[Any]:
        """A small object of every rank, in the order of ranks. It is pickled: all ranks run the same program."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, thing)
        return out

    def by_first(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and returns its result, or raises its PipeError, on every rank."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = action()
            except PipeError as error:
                outcome[1] = error
        with self.phases.guarded("waiting for rank 0", self.phases.step):
            dist.broadcast_object_list(outcome, 0)
        if outcome[1] is not None:
            raise outcome[1]
        return cast("T", outcome[0])

    def share(self, tensor: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of rank 0, on the CPU of every rank."""
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype)
        full = tensor.contiguous()
        if full.numel():
            sent = full.reshape(-1).view(torch.uint8).to(self.device)  # as bytes: backends don't send every type
            dist.broadcast(sent, 0)
            full.reshape(-1).view(torch.uint8).copy_(sent)
        return full

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sets tensors to their values on rank 0."""
        for bucket in buckets(tensors, _MESSAGE_BYTES):
            flat = flattened(bucket, self.device)
            dist.broadcast(flat.view(torch.uint8), 0)  # as bytes, see `share`
            unflatten(flat, bucket)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sets tensors to their mean over the ranks."""
        for bucket in buckets(tensors, _MESSAGE_BYTES):
            flat = flattened(bucket, self.device).div_(self.size)
            dist.all_reduce(flat)
            unflatten(flat, bucket)

    def compare(
        self, rows: Sequence[ParamLine], hint: str = "build the same model with the same configuration on each rank"
    ) -> None:
        """Refuses to train where ranks differ."""
        # Ranks that are missing are named here: a collective could only wait for them.
        meet(self.store, f"lines/{next(_MEETINGS)}", self.rank, self.size, self.timeout_s, self.phases.ended)
        first, *others = self.gather(list(rows))
        for rank, theirs in enumerate(others, start=1):
            for a, b in itertools.zip_longest(first, theirs):
                if a != b:
                    texts = ["has nothing more" if line is None else f"has {line[0]}: {line[1]}" for line in (a, b)]
                    what = f"rank {rank} is not like rank 0: rank 0 {texts[0]}, rank {rank} {texts[1]}"
                    raise StageError(what, where=f"rank {rank}", hint=hint)


def join(config: DistributedConfig, device: torch.device) -> Ranks | None:
    """Joins the existing process group, or the one that torchrun's variables describe; None in a single process."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1 and dist.group.WORLD not in _JOINED:
            _JOINED[dist.group.WORLD] = Ranks(dist.distributed_c10d._get_default_store(), config, device)
        return _JOINED.get(dist.group.WORLD)
    rank, size = launched()
    if size == 1:
        return None
    backend: str = config.backend or ("nccl" if device.type == "cuda" else "gloo")
    # NCCL's collectives don't raise: its watchdog logs which ranks are late, and ends the process.
    os.environ.setdefault("TORCH_NCCL_DESYNC_DEBUG", "1")
    # A new name each time: entries of an earlier group are still in the store.
    store = PrefixStore(f"group/{next(_MEETINGS)}", rendezvous(config.timeout_s))
    meet(store, "start", rank, size, config.timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                            timeout=timedelta(seconds=config.timeout_s))  # fmt: skip
    _JOINED[dist.group.WORLD] = Ranks(store, config, device)
    return _JOINED[dist.group.WORLD]


def joined() -> bool:
    """Whether this process has joined a group by `join`."""
    return dist.is_available() and dist.is_initialized() and dist.group.WORLD in _JOINED


@contextmanager
def together() -> Iterator[None]:
    """Ends a group that was joined inside the block. An error is posted to the other ranks, which would wait else."""
    try:
        yield
    except BaseException as error:
        for group in _JOINED.values():
            group.phases.close(error)
        raise
    if joined():
        group = _JOINED.pop(dist.group.WORLD)
        # Rank 0 may keep the store: it ends last.
        group.store.set(f"end/here/{group.rank}", "")
        if group.rank == 0:
            meet(group.store, "end", group.rank, group.size, group.timeout_s)
        group.phases.close()
        dist.destroy_process_group()


def buckets(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Groups of tensors of one type and device, of at most `size` bytes or one tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in kinds.values():
        bucket: list[torch.Tensor] = []
        held = 0
        for tensor in group:
            if bucket and held + tensor.nbytes > size:
                yield bucket
                bucket, held = [], 0
            bucket.append(tensor)
            held += tensor.nbytes
        yield bucket


def flattened(bucket: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A flat copy of a bucket's tensors on `device`."""
    return torch.cat([t.flatten() for t in bucket]).to(device)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies a flat bucket back into its tensors."""
    parts = torch.split(flat, [t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


def lines(model: NamedTensors, config: Config) -> list[ParamLine]:
    """What must be equal on all ranks: torch's version, tensors in their order, ties, configuration."""
    out: list[ParamLine] = [("torch", str(torch.__version__))]
    for name, param in model.params.items():
        text = kind(param)
        if not param.requires_grad:
            text += ", frozen"
        out.append((f"parameter {name}", text))
    out += [(f"buffer {name}", kind(buffer)) for name, buffer in model.buffers.items()]
    out += [(f"tied {alias}", name) for alias, name in model.aliases.items()]
    for section, fields in config.model_dump(mode="json", exclude={"monitor": _OWN}).items():
        out += [(f"config {section}.{name}", repr(value)) for name, value in fields.items()]
    return out


def kind(tensor: torch.Tensor) -> str:
    """Type and shape, for `Ranks.compare`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
