"""One feed that models are compared on, with what the module itself gives for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layerline.backends.base import Array, Feed


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One feed to compare on.

    Attributes:
        label: what is special about it: "example", "batch=5".
        outputs: what the module itself gives for it.
        sizes: the axes that differ from the example's, by name.
    """

    label: str
    feed: Feed
    outputs: Mapping[str, Array]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def gate(self) -> str:
        """Name of the gate that this probe becomes."""
        return f"module itself, {self.label}"
