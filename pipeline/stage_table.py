"""Which stages there are: the built-in ones in one table, third parties' by the entry points `layerline.stages`."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from types import new_class
from typing import ClassVar, cast

from layerline.pipeline.errors import ConfigError, Unavailable, brief
from layerline.pipeline.nearest import hint
from layerline.pipeline.stage import Stage

GROUP = "layerline.stages"
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
    return {e.name: e.value for e in metadata.entry_points(group=GROUP)} | BUILT_IN


@cache
def stage_class(name: str) -> type[Stage]:
    """The class behind a stage's name; another distribution's is imported here alone: Unavailable where that fails."""
    place = names()[name]
    where = f"entry point {GROUP}: {name} = {place}"
    try:
        cls = metadata.EntryPoint(name, place, GROUP).load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything while it is imported, SystemExit too
        raise Unavailable(f"stage {name} can't be imported: {brief(error)}", where=where) from error
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise Unavailable(f"it is no subclass of Stage: {cls!r:.80}", where=where)
    return cls


def imported(name: str) -> type[Stage] | None:
    """The class of a stage where that runs no other distribution's code: a built-in one, or one imported before."""
    with suppress(Unavailable):
        if name in BUILT_IN or names().get(name, "").partition(":")[0] in sys.modules:
            return stage_class(name)
    return None


@cache
def stand_in(name: str, use: str) -> type[Stage]:
    """The stage that is registered as `use`, with the name and the place of the stage that it stands in for."""
    if use not in names():
        others = [other for other in names() if other not in BUILT_IN]
        nearest = ""
        if others:
            nearest = f"{hint(use, others)}; "
        raise ConfigError(
            f"no stage is registered as {use!r}",
            hint=f"{nearest}install the package that registers it, under the entry point {GROUP} of that name",
        )
    original, replacement = stage_class(name), stage_class(use)
    if replacement.gives != original.gives:
        raise ConfigError(
            f"stage {use} gives {replacement.gives!r}, but {name} gives {original.gives!r}",
            hint=f"a stage that stands in for {name} has gives = {original.gives!r}",
        )
    # A class of its own: keys, checks and errors see the name of the place, and the code of the replacement.
    namespace = {
        "__module__": replacement.__module__,  # whose code is part of the key
        "__doc__": replacement.__doc__,
        "__annotations__": {"name": ClassVar[str], "implementation": ClassVar[str]},
        "name": name,
        "implementation": use,
    }
    return cast("type[Stage]", new_class(replacement.__name__, (replacement,), {}, lambda body: body.update(namespace)))
