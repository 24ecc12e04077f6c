"""Which stages there are: the built-in ones in one table, third parties' by the entry points `layerline.stages`."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata

from layerline.pipeline.errors import Unavailable
from layerline.pipeline.stage import Stage

# In the order they run; `import-*` stages stand in for everything up to the kind they give.
BUILT_IN = {
    "train": "layerline.stages.train:Train",
    "ema": "layerline.stages.ema:Ema",
    "export": "layerline.stages.export:Export",
    "fuse": "layerline.stages.fuse:Fuse",
    "quantize": "layerline.stages.quantize:Quantize",
    "engine": "layerline.stages.engine:Engine",
    "import-weights": "layerline.stages.import_weights:ImportWeights",
    "import-onnx": "layerline.stages.import_onnx:ImportOnnx",
}


@cache
def names() -> dict[str, str]:
    """Stage name to "module:Class"; no other distribution can take the name of a built-in stage."""
    return {e.name: e.value for e in metadata.entry_points(group="layerline.stages")} | BUILT_IN


@cache
def stage_class(name: str) -> type[Stage]:
    """The class behind a stage's name, imported on use.

    Raises:
        Unavailable: another distribution's stage can't be imported here.
    """
    module, _, attribute = names()[name].partition(":")
    try:
        found: type[Stage] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"stage {name} can't be imported: {error}", where=names()[name]) from error
    return found
