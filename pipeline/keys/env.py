"""Facts about this machine that can change a stage's result, by name, found without importing what they are about."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib import metadata

ABSENT = "absent"
# Distributions that share one import package: whichever is installed speaks for the name.
_ALIASES = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime", "onnxruntime-directml")}


def fact(name: str) -> str:
    """The version of a distribution, or for "gpu" the compute capability of device 0; "absent" where there is none."""
    if name == "gpu":
        return _compute_capability()
    for distribution in _ALIASES.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ABSENT


def versions() -> dict[str, str]:
    """What ran a stage besides the packages its key names: Layerline, Python, the system and its processor."""
    system = f"{platform.system()} {platform.machine()}"
    return {"layerline": fact("layerline"), "python": platform.python_version(), "system": system}


def _compute_capability() -> str:
    # The driver's own library answers in a millisecond; torch.cuda would cost two seconds of import.
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return ABSENT
    major, minor = ctypes.c_int(), ctypes.c_int()
    attributes = ((75, major), (76, minor))  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR of device 0
    if cuda.cuInit(0) or any(cuda.cuDeviceGetAttribute(ctypes.byref(value), code, 0) for code, value in attributes):
        return ABSENT
    return f"{major.value}.{minor.value}"
