"""import-weights: finds the state dict in a checkpoint, checks it against model(), and ships its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from layerline.pipeline.errors import StageError
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import EXAMPLE_HOOKS, Task

if TYPE_CHECKING:
    from torch import nn

    from layerline.backends.base import Session
    from layerline.training.run.shipping import Example
    from layerline.training.state.state_dict_match import Fit


class ImportWeights(Stage):
    """Finds the state dict that fits model() in a .safetensors file or a torch checkpoint, under any key.

    Prefixes of wrappers (`module.`, `_orig_mod.`, also inside) and of outer modules are removed. Averages are
    recognised by their key. All of the model's tensors must be there, and no others.
    """

    name: ClassVar[str] = "import-weights"
    version: ClassVar[int] = 4
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "weights"
    uses: ClassVar[tuple[str, ...]] = ("model", *EXAMPLE_HOOKS)
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (EXAMPLE_HOOKS,)
    env: ClassVar[tuple[str, ...]] = ("torch",)

    file: str
    """The checkpoint, inside the project."""
    key: str = ""
    """Where in the file the weights are, keys joined by dots; searched for if left out."""
    weights: Literal["ema", "online"] = "ema"
    """Which weights ship if the file has both."""
    ignore: tuple[str, ...] = ()
    """Patterns of names in the file that the model need not have: `[head.*]`."""
    trust: bool = False
    """Whether a pickle that holds more than tensors may run its code."""

    def files(self) -> tuple[str, ...]:
        """The checkpoint: its content is part of the key."""
        return (self.file,)

    def check(self, look: Inspection) -> None:
        from layerline.training.model import canonical_names
        from layerline.training.run import hook_trial
        from layerline.training.state import foreign_files, state_dict_match

        hook_trial.try_example(look)
        with look.item("import-weights.file"):
            tree, _ = foreign_files.read(look.root / self.file, trust=self.trust)
            network = look.need("network")
            fit = self._chosen(*state_dict_match.choose(tree, network, key=self.key, ignore=self.ignore))
            state_dict_match.check(fit, canonical_names.named(network))
            look.ok("import-weights.file", f"{len(fit.tensors)} tensors in {fit.state.where} fit the model")

    def session(self, folder: Path, task: Task) -> Session:
        """The module with the weights that ship, ready to run."""
        from layerline.export.example_call import ModuleSession
        from layerline.training.run import shipping

        return ModuleSession(*shipping.shipped(task, folder))

    def run(self, work: Work) -> Report:
        from layerline.training.data import batches
        from layerline.training.model import canonical_names
        from layerline.training.run import shipping
        from layerline.training.state import foreign_files, state_dict_match

        model = shipping.network(work.task)
        # From the copy that was hashed: the original may change while it is read.
        tree, notes = foreign_files.read(work.sources / self.file, trust=self.trust)
        online, averages = state_dict_match.choose(tree, model, key=self.key, ignore=self.ignore)
        fit = self._chosen(online, averages)
        state_dict_match.check(fit, canonical_names.named(model))
        work.log.say(f"{len(fit.tensors)} tensors in {fit.state.where}")
        # Golden inputs and outputs of these weights: export proves itself on them.
        example = batches.example_inputs(work.task, forward=model.forward)
        shipping.ship(model, example, fit.tensors, work.out)
        reference, rows = _rows(model, example, fit, online, averages)
        # The other state dict that fits.
        unused = [other.state.where for other in (online, averages) if other is not None and other is not fit]
        weights_note = f"the weights are those of {fit.state.where}"
        return Report(
            stage=self.name,
            reference=reference,
            candidate="EMA weights" if online and averages else "model() in float32",
            records=rows,
            notes=(*notes, weights_note, *fit.notes, *(f"{w} fits as well, and does not ship" for w in unused[:1])),
            metrics={"tensors": len(fit.tensors), "parameters": sum(p.numel() for p in model.parameters())},
        )

    def _chosen(self, online: Fit | None, averages: Fit | None) -> Fit:
        if self.weights == "online" and online is None and averages is not None:
            raise StageError(
                f"the file holds only averages, in {averages.state.where}",
                where="import-weights.weights",
                hint="use them: weights: ema",
            )
        chosen = online
        if self.weights == "ema" and averages is not None:
            chosen = averages
        assert chosen is not None  # choose() raises if neither fits
        return chosen


def _rows(
    model: nn.Module, example: Example, fit: Fit, online: Fit | None, averages: Fit | None
) -> tuple[str, tuple[LayerDiff, ...]]:
    """Online weights and averages if the file has both; otherwise each tensor as stored, and as it is now."""
    from layerline.compare.arrays import tensor_row
    from layerline.training.model import canonical_names
    from layerline.training.run import shipping

    if online and averages:
        effects = shipping.compared(model, example, online.tensors, averages.tensors)
        return "online weights", tuple(tensor_row(*effect) for effect in effects)
    rows = []
    for name, tensor in canonical_names.named(model).tensors.items():
        rows.append(tensor_row(name, "parameter", name.rpartition(".")[0], fit.tensors[name], tensor))
    return "weights in the file", tuple(rows)
