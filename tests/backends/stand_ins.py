"""What stands in for a device here: memory of this process, and an engine that onnxruntime computes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.tensorrt.profiles import Profile

_NAMES = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "int8": "INT8", "bool": "BOOL"}
_ORT = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64", "tensor(bool)": "bool"}


@dataclass
class HostMemory:
    """Memory of this process under its real addresses, checked for use after release."""

    stream: int = 7
    taken: dict[int, Any] = field(default_factory=dict)
    most: int = 0

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *args: object) -> None:
        self.taken.clear()

    def take(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(max(nbytes, 1))
        address = ctypes.addressof(buffer)
        self.taken[address] = buffer
        self.most = max(self.most, len(self.taken))
        return address

    def send(self, array: Any) -> int:
        assert array.flags.c_contiguous
        pointer = self.take(array.nbytes)
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)
        return pointer

    def fetch(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        assert pointer in self.taken
        size = int(np.prod(shape, dtype=int)) * dtype.itemsize
        return np.frombuffer(ctypes.string_at(pointer, size), dtype).reshape(shape).copy()


class Engine:
    """Looks like an ICudaEngine; computes with onnxruntime, and scales what it gives by `gain`."""

    def __init__(self, model: bytes, profiles: Sequence[Profile] = (), taps: Sequence[str] = (), gain: float = 1.0):
        self.session, self.profiles, self.gain = OnnxRuntime().open(model, taps), profiles, gain
        self.num_io_tensors = len(self.session.inputs) + len(self.session.outputs)
        self.num_optimization_profiles = max(len(profiles), 1)
        self.contexts: list[Context] = []

    def get_tensor_name(self, index: int) -> str:
        return [*self.session.inputs, *self.session.outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name="INPUT" if name in self.session.inputs else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_NAMES[_ORT[self.session.types[name][0]]])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self.session.types[name][1])

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        span = self.profiles[index][name]
        return [span.min, span.opt, span.max]

    def create_execution_context(self) -> Context:
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context:
    """Looks like an IExecutionContext; keeps to the order of calls that TensorRT asks for."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.results: Mapping[str, Any] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream == 7
        self.profile, self.shapes, self.addresses = index, {}, {}
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        profiles = self.engine.profiles
        return not profiles or name not in profiles[self.profile] or not profiles[self.profile][name].excess(shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        feed = {}
        for given in self.engine.session.inputs:
            dtype = np.dtype(_ORT[self.engine.session.types[given][0]])
            size = int(np.prod(self.shapes[given], dtype=int)) * dtype.itemsize
            data = ctypes.string_at(self.addresses[given], size)
            feed[given] = np.frombuffer(data, dtype).reshape(self.shapes[given])
        self.results = {n: np.asarray(a * self.engine.gain, a.dtype) for n, a in self.engine.session.run(feed).items()}
        return tuple(self.results[name].shape)

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == 7
        for name, array in self.results.items():
            made = np.ascontiguousarray(array)
            ctypes.memmove(self.addresses[name], made.ctypes.data, made.nbytes)
        return True
