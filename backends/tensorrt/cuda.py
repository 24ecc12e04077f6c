"""CUDA memory and a stream through pycuda. Not run on a device yet: a slow test runs it on a stand-in driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import numpy as np

from layerline.backends.base import Array
from layerline.pipeline.errors import Unavailable

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which pycuda does not name: the stream never waits for the legacy stream


def unavailable_reason() -> str | None:
    """Why no engine can run on this machine, in one sentence; None where pycuda finds a device."""
    if find_spec("pycuda") is None:
        return "pycuda is not installed (pip install 'layerline[gpu]')"
    try:
        import pycuda.driver as driver
    except (ImportError, OSError) as error:
        return f"pycuda finds no NVIDIA driver ({error})"
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        return f"the NVIDIA driver does not start ({error})"
    if not count:
        return "the NVIDIA driver finds no device"
    return None


class Device:
    """Device 0 with one stream.

    Inside `with` its primary context is current, which is the one TensorRT's own CUDA calls use. Memory that is taken
    there is freed at the end.

    Raises:
        Unavailable: no pycuda, driver or device; from the methods, a CUDA call that failed.
    """

    def __init__(self) -> None:
        reason = unavailable_reason()
        if reason:
            raise Unavailable(reason)
        import pycuda.driver

        self._driver = pycuda.driver
        self._allocations: list[Any] = []
        with self._errors():
            # The primary context: a context of our own would not be the one that TensorRT allocates in.
            self._context = self._driver.Device(0).retain_primary_context()
            with self:
                self._stream = self._driver.Stream(_NON_BLOCKING)

    @property
    def stream(self) -> int:
        """Handle of the stream, as TensorRT's Python API takes it."""
        return int(self._stream.handle)

    def __enter__(self) -> Device:
        with self._errors():
            self._context.push()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # pycuda aborts the process at its end if a context is still pushed then.
        try:
            with self._errors():
                while self._allocations:
                    self._allocations.pop().free()
        finally:
            self._context.pop()

    def take(self, nbytes: int) -> int:
        """Address of new memory of at least one byte."""
        with self._errors():
            # An empty array needs an address as well.
            allocation = self._driver.mem_alloc(max(nbytes, 1))
        self._allocations.append(allocation)
        return int(allocation)

    def send(self, array: Array) -> int:
        """Address of a copy of a contiguous array. The array may change once this returns."""
        pointer = self.take(array.nbytes)
        with self._errors():
            self._driver.memcpy_htod_async(pointer, _bytes(array), self._stream)
            self._stream.synchronize()
        return pointer

    def fetch(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The array at an address, once all queued work is done."""
        # Pageable memory will do: the copy is waited for at once.
        array = np.empty(shape, dtype)
        with self._errors():
            self._driver.memcpy_dtoh_async(_bytes(array), pointer, self._stream)
            self._stream.synchronize()
        return array

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._driver.Error as error:  # names the call: "cuMemAlloc failed: out of memory"
            raise Unavailable(str(error), where="CUDA") from error


def _bytes(array: Array) -> Array:
    """The same memory as bytes: Python's buffers have no bfloat16."""
    return array.reshape(-1).view(np.uint8)
