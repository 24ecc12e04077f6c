"""What this CPU's int8 arithmetic means for a comparison made on it."""

from __future__ import annotations

import platform
from pathlib import Path

_FLAGS = ("avx512_vnni", "avx_vnni", "i8mm", "asimddp")


def int8_flag(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The CPU flag under which 8-bit dot products add in 32 bits; "" where it has none, None where that is unknown.

    Without one, kernels that multiply u8 by s8 add pairs in int16, which saturates at 32,767.
    """
    if not cpuinfo.is_file():
        return None
    flags = set(cpuinfo.read_text("utf-8", errors="replace").split())
    return next((f for f in _FLAGS if f in flags), "")


def int8_note(flag: str | None) -> str:
    """The risk in a sentence."""
    cpu = {None: f"the flags of this {platform.machine()} CPU are unknown", "": "this CPU has no VNNI"}.get(
        flag, f"this CPU has {flag}"
    )
    return (
        "onnxruntime computed Q/DQ in float32, so no int8 sum saturated in this comparison; weights and activations "
        f"are signed, and int8 kernels that pair u8 with s8 saturate on CPUs without VNNI ({cpu})"
    )
