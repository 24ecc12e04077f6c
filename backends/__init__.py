"""Something that runs a model. One explicit table; third parties join through the entry points `layerline.backends`."""

from __future__ import annotations

import difflib
from importlib import import_module, metadata

from layerline.backends.base import Backend, Feed, Session
from layerline.pipeline.errors import ConfigError, Unavailable

__all__ = ["BACKENDS", "Backend", "Feed", "Session", "get"]

BACKENDS = {
    "onnxruntime": "layerline.backends.onnxruntime:OnnxRuntime",
    "openvino": "layerline.backends.openvino:OpenVino",
    "tensorrt": "layerline.backends.tensorrt.builder:tensorrt",
    "tensorrt-rtx": "layerline.backends.tensorrt.builder:tensorrt_rtx",
    "torch": "layerline.backends.torch:Torch",
}


def get(name: str) -> Backend:
    """The backend of that name, able to run here.

    Raises:
        ConfigError: no such backend.
        Unavailable: it cannot run on this machine; the message says why.
    """
    table = BACKENDS | {e.name: e.value for e in metadata.entry_points(group="layerline.backends")}
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no backend is called {name!r}", hint=f"{meant}there are: {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    if reason := backend.unavailable_reason():
        raise Unavailable(reason, where=f"backend {name}")
    return backend
