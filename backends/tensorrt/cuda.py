"""The little of CUDA that running an engine takes, from the driver's own library: no toolkit, no pycuda, any torch.

Not run on a device yet; the tests run it against a stand-in for the driver's library.
"""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType
from typing import Any

import numpy as np

from layerline.backends.base import Array
from layerline.pipeline.errors import Unavailable

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the engine never waits for the legacy stream


def unavailable_reason() -> str | None:
    """Why no engine can run on this machine, in one sentence; None where there is a device and a driver."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"there is no NVIDIA driver on this machine ({_LIBRARY} is not found)"
    if code := driver.cuInit(0):
        return f"the NVIDIA driver does not start ({_describe(driver, code)})"
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no device on this machine"
    return None


class Device:
    """Device 0 with one stream. Memory taken inside `with` is given back at its end.

    Raises:
        Unavailable: no driver or no device.
    """

    def __init__(self) -> None:
        if reason := unavailable_reason():
            raise Unavailable(reason)
        self._driver = ctypes.CDLL(_LIBRARY)
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        # The primary context is the one TensorRT's own CUDA calls use.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        self._stream = stream
        self._taken: list[int] = []

    @property
    def stream(self) -> int:
        """Handle of the stream, as TensorRT's Python API takes it."""
        return self._stream.value or 0

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._taken:
            self._call("cuMemFree_v2", ctypes.c_uint64(self._taken.pop()))

    def take(self, nbytes: int) -> int:
        """Address of fresh memory of at least one byte."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        self._taken.append(pointer.value)
        return pointer.value

    def send(self, array: Array) -> int:
        """Address of a copy of a contiguous array. The copy is done when this returns: the array may change then."""
        pointer = self.take(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(pointer), _address(array), _size(array), self._stream)
        self.wait()
        return pointer

    def fetch(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """What lies at an address once all queued work is done."""
        array = np.empty(shape, dtype)
        self._call("cuMemcpyDtoHAsync_v2", _address(array), ctypes.c_uint64(pointer), _size(array), self._stream)
        self.wait()
        return array

    def wait(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, function: str, *args: Any) -> None:
        if code := getattr(self._driver, function)(*args):
            raise Unavailable(f"{function} failed: {_describe(self._driver, code)}", where="CUDA")


def _describe(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown'}, CUDA error {code}"


def _address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _size(array: Array) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.nbytes)
