"""Something that runs a model. One explicit table; third parties join through the entry points `layerline.backends`."""

from __future__ import annotations

from importlib import import_module, metadata

from layerline.backends.base import Backend, Feed, Session
from layerline.pipeline.errors import ConfigError, Unavailable
from layerline.pipeline.nearest import did_you_mean

__all__ = ["BACKENDS", "Backend", "Feed", "Session", "get"]

GROUP = "layerline.backends"
BACKENDS = {
    "onnxruntime": "layerline.backends.onnxruntime:OnnxRuntime",
    "openvino": "layerline.backends.openvino:OpenVino",
    "tensorrt": "layerline.backends.tensorrt.builder:tensorrt",
    "tensorrt-rtx": "layerline.backends.tensorrt.builder:tensorrt_rtx",
}


def get(name: str) -> Backend:
    """The backend of that name, able to run here.

    Raises:
        ConfigError: no such backend.
        Unavailable: it can't be imported, or can't run on this machine; the message says why.
    """
    # No other distribution can take the name of a backend of ours.
    table = {e.name: e.value for e in metadata.entry_points(group=GROUP)} | BACKENDS
    if name not in table:
        hint = f"{did_you_mean(name, table)} there are: {', '.join(sorted(table))}"
        hint += f"; a package adds others under the entry point {GROUP}"
        raise ConfigError(f"no backend is called {name!r}", hint=hint.lstrip())
    module, _, attribute = table[name].partition(":")
    try:
        # Imported on use: a command that needs no runtime must not load one.
        backend: Backend = getattr(import_module(module), attribute)()
    except Exception as error:  # the code of another distribution
        raise Unavailable(f"{table[name]} can't be loaded: {error}", where=f"backend {name}") from error
    if reason := backend.unavailable_reason():
        raise Unavailable(reason, where=f"backend {name}")
    return backend
