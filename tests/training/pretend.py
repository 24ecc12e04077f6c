"""Ranks with a GPU each that is only pretended: see pretend.cpp.

That library has to be loaded before torch, so each rank is a process that begins here, in a module without torch.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import pickle
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def build(folder: Path, compiler: str) -> Path:
    """Compiles the library (some twenty seconds)."""
    from torch.utils import cpp_extension

    out, source = folder / "pretend.so", Path(__file__).with_suffix(".cpp")
    flags = [f"-I{p}" for p in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    flags += [f"-{f}{p}" for p in cpp_extension.library_paths() for f in ("L", "Wl,-rpath,")]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    flags += ["-shared", "-fPIC", "-std=c++20", "-DTORCH_EXTENSION_NAME=pretend"]
    subprocess.run([compiler, source, "-o", out, *flags, *libraries], check=True)
    return out


def ranks(library: Path, function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 120.0) -> list[Any]:
    """What `function(rank, *args)` gave on each rank, as `group.ranks`; a killed rank leaves no answer, and fails."""
    from tests.training.group import _free_port

    job = library.with_name("job")
    job.write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
    place = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "OMP_NUM_THREADS": 1}
    told, processes = [library.with_name(f"told-{rank}") for rank in range(size)], []
    for rank, out in enumerate(told):
        out.unlink(missing_ok=True)
        env = os.environ | {k: str(v) for k, v in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(subprocess.Popen([sys.executable, "-m", __name__, library, job, out], env=env))
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads(out.read_bytes()) for out in told]


def _rank(library: str, job: str, out: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    _install(library)
    from tests.training.group import Died, _last_word

    module, name, args = pickle.loads(Path(job).read_bytes())
    answer: Any
    try:
        answer = getattr(importlib.import_module(module), name)(int(os.environ["RANK"]), *args)
        _last_word(None)
    except BaseException as error:
        _last_word(error)
        answer = Died(type(error).__name__, f"{error}\n{traceback.format_exc()}")
    Path(out).write_bytes(pickle.dumps(answer))
    os._exit(0)  # torch's threads are still there


class _Still:
    """A stream or an event of a device on which everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> _Still:
        return self

    def wait(self, *_: Any) -> None: ...

    record = wait_stream = wait_event = synchronize = is_capturing = wait


def _install(library: str) -> None:
    """Gives torch.cuda and torch.distributed the device that was loaded."""
    loader = importlib.machinery.ExtensionFileLoader("pretend", library)
    import torch
    import torch.distributed.distributed_c10d as c10d

    spec = importlib.util.spec_from_loader("pretend", loader)
    assert spec is not None
    own: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(own)
    sys.modules["pretend"] = own
    draws = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    for name, value in {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *_, **__: True, "get_device_capability": lambda *_: (8, 0),
        "device_count": lambda: 2, "current_device": own.device,
        "set_device": lambda d: own.set_device(d if isinstance(d, int) else torch.device(d).index),
        "Stream": _Still, "Event": _Still, "current_stream": _Still, "stream": nullcontext,
        "synchronize": lambda *_: None,
        "max_memory_allocated": lambda *_: own.peak(), "reset_peak_memory_stats": lambda *_: own.reset(),
        "manual_seed_all": lambda _: None, "get_rng_state_all": lambda: [d.clone() for d in draws],
        "set_rng_state": lambda state, device: draws[device].copy_(state),
        "set_rng_state_all": lambda states: [d.copy_(s) for d, s in zip(draws, states, strict=True)],
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    torch.cuda.nccl.version = lambda: (2, 0, 0)
    torch.accelerator.current_stream, torch._C._get_accelerator = _Still, lambda: torch.device("cuda")
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda s, n: (own.resize if s.device.type == "cuda" else resize)(s, n)

    class Nccl(own.Nccl):
        class Options:
            _timeout: Any

        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            super().__init__(c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout))

        def _set_sequence_number_for_group(self) -> None: ...

    c10d.ProcessGroupNCCL, c10d.is_nccl_available = Nccl, lambda: True


if __name__ == "__main__":
    _rank(*sys.argv[1:])
