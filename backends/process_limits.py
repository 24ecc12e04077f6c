"""How much memory and time a process may take that runs what somebody else wrote."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

GB = 10**9
_SLACK = 512 << 20
"""Addresses that the libraries and the stacks of their threads take, whatever the model."""
_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a process.

    Attributes:
        memory: bytes that it may take beyond what it has when the bounds are set.
        seconds: from its start to its end.
        what: what it does, for errors.
        hint: where the bounds are set.
    """

    memory: int
    seconds: float
    what: str
    hint: str

    def apply(self) -> None:
        """Bounds this process' memory, where the system has such a limit (Linux; elsewhere nothing changes)."""
        if sys.platform != "linux":
            return
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + _SLACK + self.memory
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def machine_memory() -> int:
    """Bytes of memory that this machine has, or the container it is."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        physical = 16 * GB  # no portable call tells it
    groups = (Path(p).read_text("ascii").strip() for p in _GROUPS if Path(p).is_file())
    return min([physical, *(int(text) for text in groups if text.isdecimal())])
