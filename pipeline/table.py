"""Which stages there are: the built-in ones in one table, third parties' by the entry points `layerline.stages`."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata

from layerline.pipeline.stage import Stage

# In the order they run; `import-*` stages stand in for everything up to the kind they give.
BUILT_IN = {
    "train": "layerline.stages.train:Train",
    "ema": "layerline.stages.ema:Ema",
    "export": "layerline.stages.export:Export",
    "fuse": "layerline.stages.fuse:Fuse",
    "quantize": "layerline.stages.quantize:Quantize",
    "engine": "layerline.stages.engine:Engine",
}


@cache
def names() -> dict[str, str]:
    """Stage name to "module:Class"."""
    return BUILT_IN | {e.name: e.value for e in metadata.entry_points(group="layerline.stages")}


@cache
def stage_class(name: str) -> type[Stage]:
    """The class behind a stage's name, imported on use."""
    module, _, attribute = names()[name].partition(":")
    found: type[Stage] = getattr(import_module(module), attribute)
    return found
