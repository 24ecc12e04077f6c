"""A TensorRT engine, loaded and run.

Not run on a device yet: the tests run it on stand-ins of engine and device.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from layerline.backends.base import Array, Feed, check_names
from layerline.backends.tensorrt.network import dtype_name
from layerline.backends.tensorrt.profiles import Profile, ShapeRange, choose
from layerline.pipeline.errors import StageError


class Memory(Protocol):
    """What a session needs of a device; `cuda.Device` is one."""

    @property
    def stream(self) -> int: ...
    def __enter__(self) -> Memory: ...
    def __exit__(self, *args: Any) -> None: ...
    def take(self, nbytes: int) -> int: ...
    def send(self, array: Array) -> int: ...
    def fetch(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array: ...


class EngineSession:
    """An engine with its execution context. Not run on a device yet.

    Args:
        engine: TensorRT's ICudaEngine.
        memory: the device it lives on.
        keep: what must live as long as the engine (its runtime).
    """

    def __init__(self, engine: Any, memory: Memory, keep: Any = None) -> None:
        self._engine, self._memory, self._keep = engine, memory, keep
        self._context = engine.create_execution_context()
        if self._context is None:
            raise StageError("TensorRT gives no execution context; most often the device lacks memory", where="engine")
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = [n for n in names if engine.get_tensor_mode(n).name == "INPUT"]
        self.outputs = [n for n in names if n not in self.inputs]
        self.profiles = tuple(self._profile(i) for i in range(max(engine.num_optimization_profiles, 1)))

    def run(self, feed: Feed) -> dict[str, Array]:
        """Runs once with the profile whose opt shapes are nearest.

        Raises:
            StageError: names the input: unknown, missing, of another type, empty, or outside of every profile.
        """
        arrays = self._checked(feed)
        index = choose(self.profiles, {name: array.shape for name, array in arrays.items()})
        with self._memory as memory:
            if not self._context.set_optimization_profile_async(index, memory.stream):
                raise StageError(f"TensorRT does not switch to profile {index}", where="engine")
            for name, array in arrays.items():
                self._set(self._context.set_input_shape(name, array.shape), f"input {name}", f"shape {array.shape}")
                self._set(self._context.set_tensor_address(name, memory.send(array)), f"input {name}", "its address")
            return self._execute(memory)

    def _execute(self, memory: Memory) -> dict[str, Array]:
        places = {}
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            if any(d < 0 for d in shape):
                raise StageError(
                    f"the size of this output depends on the data, {shape}; such engines are not run here",
                    where=f"output {name}",
                )
            dtype = self._dtype(name)
            pointer = memory.take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            self._set(self._context.set_tensor_address(name, pointer), f"output {name}", "its address")
            places[name] = (pointer, shape, dtype)
        if not self._context.execute_async_v3(memory.stream):
            raise StageError("TensorRT did not run the engine", where="engine")
        return {name: memory.fetch(*place) for name, place in places.items()}

    def _checked(self, feed: Feed) -> dict[str, Array]:
        check_names(feed, self.inputs)
        arrays = {name: np.asarray(feed[name]) for name in self.inputs}
        for name, array in arrays.items():
            if array.dtype != (dtype := self._dtype(name)):
                raise StageError(f"is {array.dtype}; the engine takes {dtype}", where=f"input {name}")
        # ascontiguousarray makes scalars rank 1, which another shape would be.
        return {n: a if a.flags.c_contiguous else np.ascontiguousarray(a) for n, a in arrays.items()}

    def _profile(self, index: int) -> Profile:
        return {name: self._span(name, index) for name in self.inputs}

    def _span(self, name: str, index: int) -> ShapeRange:
        fixed = tuple(self._engine.get_tensor_shape(name))
        if all(d >= 0 for d in fixed):
            return ShapeRange(fixed, fixed, fixed)
        return ShapeRange(*(tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, index)))

    def _dtype(self, name: str) -> np.dtype[Any]:
        dtype = dtype_name(self._engine.get_tensor_dtype(name))
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401, registers the name with numpy; comes with onnx

        return np.dtype(dtype)

    @staticmethod
    def _set(accepted: bool, where: str, what: str) -> None:
        if not accepted:
            raise StageError(f"TensorRT does not accept {what}", where=where)
