"""The ranks that train together: they join, compare notes before the first step, and pass things to each other."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from layerline.pipeline.errors import PipeError, StageError
from layerline.training.config.sections import Config, DistributedConfig
from layerline.training.distributed import rendezvous as launch
from layerline.training.distributed.heartbeat import Pulse
from layerline.training.distributed.rendezvous import environment, meet, rendezvous
from layerline.training.model.canonical_names import Named

_MEETINGS = itertools.count()
# One per process group, however many optimizers there are.
_JOINED: dict[Any, Ranks] = {}
# Where each rank keeps its own files may differ.
_OWN = ("config monitor.save_dir", "config monitor.tensorboard")
Line = tuple[str, str]
T = TypeVar("T")


class Ranks:
    """This process among those that train together.

    Attributes:
        rank: of this process; 0 writes checkpoints.
        size: how many there are.
        device: where tensors lie while they travel.
        serves_cpu: whether those in CPU memory can travel as well.
        pulse: what each is at.
    """

    def __init__(self, store: Any, config: DistributedConfig, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = config.timeout_s
        self.store = store
        served = dist.get_backend_config()  # as cpu:gloo,cuda:nccl; who gives no backend gets that of the accelerator
        nccl, self.serves_cpu = "nccl" in served, "cpu:" in served
        self.device = _own_gpu(device) if nccl else torch.device("cpu")
        self.pulse = Pulse(store, self.rank, self.size, 0.8 * config.timeout_s if nccl else None)

    def floats(self, *values: float) -> list[list[float]]:
        """The values of every rank, in their order (one collective)."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        rows: list[list[float]] = torch.stack(every).tolist()  # one read for all of them
        return rows

    def gather(self, thing: Any) -> list[Any]:
        """A small object of every rank, in their order; they are processes of one program, so it is pickled."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, thing)
        return out

    def by_first(self, action: Callable[[], T]) -> T:
        """Rank 0 does it, the others wait and get what it gave.

        Raises:
            PipeError: what it raised on rank 0, on every rank.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = action()
            except PipeError as error:
                outcome[1] = error
        with self.pulse.guarded("waiting for rank 0", self.pulse.step):
            dist.broadcast_object_list(outcome, 0)
        if outcome[1] is not None:
            raise outcome[1]
        return cast("T", outcome[0])

    def share(self, tensor: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor that rank 0 has, on the CPU of every rank."""
        full = torch.empty(shape, dtype=dtype) if tensor is None else tensor.contiguous()
        if full.numel():
            sent = full.reshape(-1).view(torch.uint8).to(self.device)  # as bytes: not every type travels
            dist.broadcast(sent, 0)
            full.reshape(-1).view(torch.uint8).copy_(sent)
        return full

    def spread(self, tensors: Sequence[torch.Tensor], size: int) -> None:
        """Gives tensors the values they have on rank 0, in messages of at most `size` bytes."""
        for flat, parts in flattened(tensors, size, self.device):
            dist.broadcast(flat.view(torch.uint8), 0)  # as bytes, here too
            unflatten(flat, parts)

    def compare(
        self, lines: Sequence[Line], hint: str = "build the same model with the same configuration on each rank"
    ) -> None:
        """Ends training before it starts where ranks differ.

        Args:
            lines: what this rank has, as (what, value).
            hint: what to do where they differ.

        Raises:
            StageError: on every rank; names the first rank that differs from rank 0, and the first line that does.
        """
        name = f"lines/{next(_MEETINGS)}"
        text = json.dumps(lines)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.store.set(f"{name}/text/{self.rank}", text)
        self.store.set(f"{name}/digest/{self.rank}", digest)
        meet(self.store, name, self.rank, self.size, self.timeout_s, self.pulse.ended)
        digests = [self.store.get(f"{name}/digest/{rank}") for rank in range(self.size)]
        other = next((rank for rank, seen in enumerate(digests) if seen != digests[0]), None)
        if other is None:
            return
        mine, theirs = (json.loads(self.store.get(f"{name}/text/{rank}")) for rank in (0, other))
        self.leave(name)
        raise StageError(
            f"rank {other} is not like rank 0: {_difference(mine, theirs, other)}", where=f"rank {other}",
            hint=hint,
        )  # fmt: skip

    def leave(self, name: str) -> None:
        """Before the end: rank 0, which may keep the store, goes last."""
        self.store.set(f"{name}/left/here/{self.rank}", "")
        if self.rank == 0:
            meet(self.store, f"{name}/left", self.rank, self.size, self.timeout_s)


def join(config: DistributedConfig, device: torch.device) -> Ranks | None:
    """Takes this process into the group: the one that exists, or the one torchrun's variables describe.

    Returns:
        None where this process is alone.

    Raises:
        StageError: a rank is missing after `timeout_s`.
        ConfigError: RANK or WORLD_SIZE is not a number, or makes no sense.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1 and dist.group.WORLD not in _JOINED:
            _JOINED[dist.group.WORLD] = Ranks(dist.distributed_c10d._get_default_store(), config, device)
        return _JOINED.get(dist.group.WORLD)
    rank, size = environment()
    if size == 1:
        return None
    backend: str = config.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and config.offload:
        backend = "cpu:gloo,cuda:nccl"  # NCCL sends nothing that lies in CPU memory
    # A name for each time: what the group before left in the store must not be read as this one's.
    store = PrefixStore(f"group/{next(_MEETINGS)}", rendezvous(config.timeout_s))
    meet(store, "start", rank, size, config.timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                            timeout=timedelta(seconds=config.timeout_s))  # fmt: skip
    _JOINED[dist.group.WORLD] = Ranks(store, config, device)
    return _JOINED[dist.group.WORLD]


def joined() -> bool:
    """Whether this process is in a group already that was joined here."""
    return dist.is_available() and dist.is_initialized() and dist.group.WORLD in _JOINED


@contextmanager
def together() -> Iterator[None]:
    """A group that is joined inside ends with the block, so that what comes after is done by each rank alone.

    An error becomes this rank's last word to the others, which would wait for it otherwise.
    """
    try:
        yield
    except BaseException as error:
        for group in _JOINED.values():
            group.pulse.close(error)
        raise
    if joined():
        group = _JOINED.pop(dist.group.WORLD)
        group.leave("end")
        group.pulse.close()
        dist.destroy_process_group()


def _own_gpu(device: torch.device) -> torch.device:
    """The model's GPU, or the one the launcher means, as the current one: torch's collectives of objects use that."""
    if device.type == "cpu":
        launch.device("cuda")
    elif device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def flattened(
    tensors: Sequence[torch.Tensor], size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Buckets of one kind and at most `size` bytes (or one tensor): a flat copy on `device`, and the tensors it was
    made of."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in kinds.values():
        bucket: list[torch.Tensor] = []
        held = 0
        for tensor in group:
            if bucket and held + tensor.numel() * tensor.element_size() > size:
                yield torch.cat([t.flatten() for t in bucket]).to(device), bucket
                bucket, held = [], 0
            bucket.append(tensor)
            held += tensor.numel() * tensor.element_size()
        yield torch.cat([t.flatten() for t in bucket]).to(device), bucket


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes a flat bucket back into the tensors it was made of."""
    parts = torch.split(flat, [t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


def lines(known: Named, config: Config) -> list[Line]:
    """What must be the same on every rank, one line each: tensors in their order, ties, configuration, torch."""
    out: list[Line] = [("torch", str(torch.__version__))]
    for name, param in known.params.items():
        out.append((f"parameter {name}", kind(param) + ("" if param.requires_grad else ", frozen")))
    out += [(f"buffer {name}", kind(buffer)) for name, buffer in known.buffers.items()]
    out += [(f"tied {name}", kept) for name, kept in known.aliases.items()]
    out += [(f"config {path}", repr(value)) for path, value in _flat(config.model_dump(mode="json"))]
    return [line for line in out if line[0] not in _OWN]


def _difference(mine: Sequence[Line], theirs: Sequence[Line], rank: int) -> str:
    for a, b in itertools.zip_longest(mine, theirs):
        if tuple(a or ()) != tuple(b or ()):
            have = [f"has {x[0]}: {x[1]}" if x else "has nothing more" for x in (a, b)]
            return f"rank 0 {have[0]}, rank {rank} {have[1]}"
    return "nothing"


def kind(tensor: torch.Tensor) -> str:
    """Type and shape, as a line for `Ranks.compare` says them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _flat(node: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [pair for k, v in node.items() for pair in _flat(v, f"{path}.{k}" if path else str(k))]
    return [(path, node)]
