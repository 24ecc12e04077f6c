"""The two types every backend provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]


class Session(Protocol):
    """A model that is loaded and ready."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    def run(self, feed: Feed) -> dict[str, np.ndarray[Any, Any]]:
        """Runs once: arrays by input name in, arrays by output (and tapped value) name out."""


class Backend(Protocol):
    """Opens models on one runtime."""

    name: str

    def unavailable_reason(self) -> str | None:
        """Why this backend can't run on this machine, in one sentence; None when it can."""

    def open(self, model: Path | bytes, taps: Sequence[str] = ()) -> Session:
        """Loads a model file or its serialised bytes; `taps` are inner values to return beside the outputs."""
