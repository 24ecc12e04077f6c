"""The two types every backend provides, what backends share, and what nodes carry from stage to stage."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import StageError

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]

MODULE, SOURCE = "layerline.module", "layerline.source"
"""Metadata of a node: the path of the torch module it comes from, and the line of the user's file. Not the exporter's
own: later stages and other exporters never have to know how torch writes its scopes."""
TRACED = "layerline.traced"
"""What stands in a file in place of `SOURCE`: the node was traced from the project's own module."""


class Session(Protocol):
    """A model that is loaded and ready."""

    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def outputs(self) -> Sequence[str]: ...

    def run(self, feed: Feed) -> dict[str, np.ndarray[Any, Any]]:
        """Runs once: arrays by input name in, arrays by output (and tapped value) name out."""


class Backend(Protocol):
    """Opens models on one runtime."""

    name: str

    def unavailable_reason(self) -> str | None:
        """Why this backend can't run on this machine, in one sentence; None when it can."""

    def open(self, model: Path | bytes, taps: Sequence[str] = ()) -> Session:
        """Loads a model file or its serialised bytes.

        `taps` are inner values to return beside the outputs; `outputs` leave out what can't be had.
        """


def not_installed(module: str, package: str) -> str | None:
    """The reason of a backend whose module is missing; None where it is installed."""
    if find_spec(module) is None:
        return f"{module} is not installed: pip install {package}"
    return None


def check_names(feed: Feed, inputs: Sequence[str]) -> None:
    """Raises a StageError unless the feed holds exactly the inputs."""
    unknown = sorted(set(feed) - set(inputs))
    missing = sorted(set(inputs) - set(feed))
    if unknown or missing:
        raise StageError(
            f"the model takes {list(inputs)}; unknown: {unknown or 'none'}, missing: {missing or 'none'}",
            where="inputs",
        )


def switch_off_telemetry() -> None:
    """Keeps runtimes from reporting home. Called before each import of one; a second call changes nothing.

    onnxruntime (1.24 and later) makes an id of the user and a database in the cache folder when it is imported;
    openvino makes an id in the home folder and sends an event. Neither asks.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    if "openvino_telemetry" not in sys.modules:
        # openvino takes a stub that does nothing where this package can't be imported.
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
