"""What one thing that moves with a model's steps does before and after a step: the interface of the step engine."""

# ruff: noqa: ARG002  (the methods here do nothing)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Policy(Protocol):
    """A policy of a step. `loop.step_engine` calls the policies of a model in the order that is written down there. A
    policy overrides what it needs; by itself it does nothing."""

    name: ClassVar[str] = ""

    def before_step(self) -> None:
        """The backward passes of a window are done. Whether it is accepted is not known yet."""
        return

    def after_accepted(self, step: int) -> None:
        """The optimizer has made accepted step number `step`; 1 is the first."""
        return

    def after_rejected(self, *, finite: bool) -> None:
        """A window was dropped. `finite` is false where its loss or gradient was Inf or NaN."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it. Averages and master weights lie beside the weights, by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Takes over a state that was saved after accepted step number `step`."""
        return

    def weights_were_loaded(self) -> None:
        """Before the first step, other weights were loaded into the model."""
        return

    def rename(self, names: Mapping[str, str]) -> None:
        """Parameters of the model have other names from now on: old name -> new name."""
        return
