"""A TensorRT engine, loaded and run.

Not run on a device yet: the tests run it on stand-ins of engine and device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from layerline.backends.base import Array, Feed, check_names
from layerline.backends.tensorrt.cuda import Device
from layerline.backends.tensorrt.network import dtype_name
from layerline.backends.tensorrt.profiles import Profile, ShapeRange, choose
from layerline.pipeline.errors import StageError


class EngineSession:
    """TensorRT's ICudaEngine with its execution context; `keep` must live as long as the engine (its runtime)."""

    def __init__(self, engine: Any, memory: Device, keep: Any = None) -> None:
        self._engine, self._memory, self._keep = engine, memory, keep
        # The context holds the scratch memory of all layers.
        self._context = engine.create_execution_context()
        if self._context is None:
            raise StageError("TensorRT gives no execution context; most often the device lacks memory", where="engine")
        # Inputs and outputs share one list of tensors.
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = [n for n in names if engine.get_tensor_mode(n).name == "INPUT"]
        self.outputs = [n for n in names if n not in self.inputs]
        self.profiles: list[Profile] = []
        for index in range(max(engine.num_optimization_profiles, 1)):
            self.profiles.append({name: self._shape_range(name, index) for name in self.inputs})

    def run(self, feed: Feed) -> dict[str, Array]:
        """Runs once with the profile whose opt shapes are nearest.

        Raises:
            StageError: names the input: unknown, missing, of another type, empty, or outside of every profile.
        """
        arrays = self._checked(feed)
        # Shapes are only valid for the profile that was switched to before.
        index = choose(self.profiles, {name: array.shape for name, array in arrays.items()})
        with self._memory as memory:
            switched = self._context.set_optimization_profile_async(index, memory.stream)
            _expect(switched, "engine", f"switch to profile {index}")
            for name, array in arrays.items():
                where = f"input {name}"
                _expect(self._context.set_input_shape(name, array.shape), where, f"accept shape {array.shape}")
                _expect(self._context.set_tensor_address(name, memory.send(array)), where, "accept its address")
            return self._execute(memory)

    def _execute(self, memory: Device) -> dict[str, Array]:
        places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            # Such a size is known after the run, and would need an output allocator.
            if any(d < 0 for d in shape):
                raise StageError(
                    f"the size of this output depends on the data, {shape}; such engines are not run here",
                    where=f"output {name}",
                )
            dtype = self._dtype(name)
            pointer = memory.take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            _expect(self._context.set_tensor_address(name, pointer), f"output {name}", "accept its address")
            places[name] = (pointer, shape, dtype)
        _expect(self._context.execute_async_v3(memory.stream), "engine", "run the engine")
        return {name: memory.fetch(*place) for name, place in places.items()}

    def _checked(self, feed: Feed) -> dict[str, Array]:
        check_names(feed, self.inputs)
        arrays: dict[str, Array] = {}
        for name in self.inputs:
            # TensorRT reads rows one after the other, whatever the strides of the array.
            array = np.asarray(feed[name], order="C")
            dtype = self._dtype(name)
            if array.dtype != dtype:
                raise StageError(f"is {array.dtype}; the engine takes {dtype}", where=f"input {name}")
            arrays[name] = array
        return arrays

    def _shape_range(self, name: str, index: int) -> ShapeRange:
        # -1 stands for a dynamic size; only inputs that have one are in the engine's profiles.
        fixed = tuple(self._engine.get_tensor_shape(name))
        if all(d >= 0 for d in fixed):
            return ShapeRange(fixed, fixed, fixed)
        return ShapeRange(*(tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, index)))

    def _dtype(self, name: str) -> np.dtype[Any]:
        dtype = dtype_name(self._engine.get_tensor_dtype(name))
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401, registers the name with numpy; comes with onnx

        return np.dtype(dtype)


def _expect(accepted: bool, where: str, what: str) -> None:
    if not accepted:
        raise StageError(f"TensorRT does not {what}", where=where)
