"""A torch module as a session: arrays by the names that its inputs and outputs have in the ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from layerline.backends.base import Array, Feed, check_names
from layerline.export.example_call import call


class ModuleSession:
    """A module in eval mode.

    Args:
        module: with the weights that are to be run.
        args: positional arguments of an example call, from which inputs and outputs get their names.
        kwargs: its keyword arguments.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._call = call(module, args, kwargs)
        self.inputs = list(self._call.feed)
        self.outputs = list(self._call.outputs)

    def run(self, feed: Feed) -> dict[str, Array]:
        check_names(feed, self.inputs)
        return self._call.run(feed)
