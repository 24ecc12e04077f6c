"""The random state of a process in a form for checkpoints: python, numpy, torch and every CUDA device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CUDA: Any = torch.cuda


def capture() -> dict[str, Any]:
    """The state from which the process draws the same numbers again."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  (the state that user code draws from)
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {"kind": kind, "keys": torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
                  "position": position, "has_gauss": has_gauss, "cached": cached},
        "torch": torch.get_rng_state(),
        # A process that has not used CUDA has no state there, and reading one would initialise CUDA.
        "cuda": torch.cuda.get_rng_state_all() if _CUDA.is_initialized() else [],
    }  # fmt: skip


def restore(state: dict[str, Any]) -> None:
    """Restores what `capture` returned, except for CUDA devices that this machine lacks."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].clone())
    if torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved.clone(), device)


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers. Similar inputs give unrelated seeds (the finaliser of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers on the CPU come from `seed`. Restores the state afterwards. CUDA's is not changed."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
