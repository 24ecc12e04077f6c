"""ema: the weights that will ship, with golden inputs and outputs, and how far they are from the last online ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from layerline.pipeline.errors import memory_errors
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import EXAMPLE_HOOKS, Task

if TYPE_CHECKING:
    from layerline.backends.base import Session


class Ema(Stage):
    """Takes the averaged weights out of a checkpoint, the online ones where EMA was off.

    Leaves `model.safetensors` (canonical names, float32, tied tensors once with their aliases recorded) and
    `golden.safetensors`.
    """

    name: ClassVar[str] = "ema"
    version: ClassVar[int] = 3
    takes: ClassVar[Mapping[str, str]] = {"checkpoint": "checkpoint"}
    gives: ClassVar[str] = "weights"
    uses: ClassVar[tuple[str, ...]] = ("model", *EXAMPLE_HOOKS)
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (EXAMPLE_HOOKS,)
    env: ClassVar[tuple[str, ...]] = ("torch",)

    weights: Literal["ema", "online"] = "ema"
    """Which weights ship."""

    def check(self, look: Inspection) -> None:
        from layerline.training.run import hook_trial

        hook_trial.try_example(look)

    def session(self, folder: Path, task: Task) -> Session:
        """The module with the weights that ship, ready to run."""
        from layerline.export.example_call import ModuleSession
        from layerline.training.run import shipping

        return ModuleSession(*shipping.shipped(task, folder))

    def run(self, work: Work) -> Report:
        from layerline.compare.arrays import tensor_row
        from layerline.training.data import batches
        from layerline.training.run import shipping
        from layerline.training.state import checkpoint

        path = work.inputs["checkpoint"] / "checkpoint.safetensors"
        with memory_errors():
            model = shipping.network(work.task)
            example = batches.example_inputs(work.task, forward=model.forward)
            online, averaged = checkpoint.weights(path)
            shipping.ship(model, example, averaged if self.weights == "ema" else online, work.out)
            # After shipping: comparing loads the online weights into the model, and the averaged ones last.
            effects = shipping.compared(model, example, online, averaged)
            is_same = shipping.same(online, averaged)
            notes: tuple[str, ...] = ()
            if self.weights == "ema" and is_same:
                notes = ("no average was taken (EMA off, or ema_start_step after the last step): online weights ship",)
            elif self.weights == "online" and not is_same:
                notes = ("the online weights ship, as the configuration asks",)
            return Report(
                stage=self.name,
                reference="online weights",
                candidate="EMA weights",
                records=tuple(tensor_row(*effect) for effect in effects),
                notes=notes,
            )
