"""import-weights: a checkpoint from elsewhere, found in its file, held against model(), left as weights that ship."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from layerline.pipeline.errors import StageError
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Stage, Work

if TYPE_CHECKING:
    from torch import nn

    from layerline.training.run.shipping import Example, Pair
    from layerline.training.state.state_dict_match import Fit


class ImportWeights(Stage):
    """Finds the state dict that fits model() in a .safetensors file or a torch checkpoint, whatever it lies under.

    Prefixes of wrappers (`module.`, `_orig_mod.`, inside too) and of outer modules come off; averages are told by their
    key. All of the model's tensors must be there, and no others.
    """

    name: ClassVar[str] = "import-weights"
    version: ClassVar[int] = 4
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "weights"
    uses: ClassVar[tuple[str, ...]] = ("model", "example_inputs", "eval_data", "train_data", "calib_data")
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (uses[1:],)
    env: ClassVar[tuple[str, ...]] = ("torch",)

    file: str
    """The checkpoint, inside the project."""
    key: str = ""
    """Where in the file the weights are, keys joined by dots; found where it is left out."""
    weights: Literal["ema", "online"] = "ema"
    """Which ship, where the file has both."""
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
        from layerline.training.state import state_dict_match

        hook_trial.look_at_example(look)
        with look.item("import-weights.file"):
            tree, _ = state_dict_match.read(look.root / self.file, trust=self.trust)
            network = look.need("network")
            fit = self._chosen(*state_dict_match.choose(tree, network, key=self.key, ignore=self.ignore))
            state_dict_match.check(fit, canonical_names.named(network))
            look.ok("import-weights.file", f"{len(fit.tensors)} tensors in {fit.state.where} fit the model")

    def run(self, work: Work) -> Report:
        from layerline.compare import tensor_rows
        from layerline.training.data import batches
        from layerline.training.model import canonical_names
        from layerline.training.run import shipping
        from layerline.training.state import state_dict_match

        model, path = shipping.network(work.task), work.sources / self.file
        tree, notes = state_dict_match.read(path, trust=self.trust)
        online, averages = state_dict_match.choose(tree, model, key=self.key, ignore=self.ignore)
        fit = self._chosen(online, averages)
        state_dict_match.check(fit, canonical_names.named(model))
        work.log.say(f"{len(fit.tensors)} tensors in {fit.state.where}")
        example = batches.example_inputs(work.task, forward=model.forward)
        shipping.ship(model, example, fit.tensors, work.out)
        reference, pairs = _pairs(model, example, fit, online, averages)
        return Report(
            stage=self.name,
            reference=reference,
            candidate="EMA weights" if online and averages else "model() in float32",
            records=tensor_rows.rows(pairs),
            notes=(*notes, f"the weights are those of {fit.state.where}", *fit.notes, *_left(fit, online, averages)),
            metrics={"tensors": len(fit.tensors), "parameters": sum(p.numel() for p in model.parameters())},
        )

    def _chosen(self, online: Fit | None, averages: Fit | None) -> Fit:
        if self.weights == "online" and online is None and averages is not None:
            raise StageError(
                f"the file holds averages alone, in {averages.state.where}",
                where="import-weights.weights",
                hint="take them: weights: ema",
            )
        chosen = averages or online if self.weights == "ema" else online
        assert chosen is not None  # one of the two was found
        return chosen


def _pairs(
    model: nn.Module, example: Example, fit: Fit, online: Fit | None, averages: Fit | None
) -> tuple[str, list[Pair]]:
    """Online weights and averages where the file has both; else each tensor as it was stored, and as it is now."""
    from layerline.compare.arrays import NOT_IN_NUMPY
    from layerline.training.model import canonical_names
    from layerline.training.run import shipping

    if online and averages:
        return "online weights", shipping.compared(model, example, online.tensors, averages.tensors)
    # float32 holds every value of the types that numpy has not.
    stored = {n: t.float() if t.dtype in NOT_IN_NUMPY else t for n, t in fit.tensors.items()}
    return "weights in the file", [
        shipping.Pair(n, "parameter", n.rpartition(".")[0], stored[n], t)
        for n, t in canonical_names.named(model).tensors.items()
    ]


def _left(fit: Fit, online: Fit | None, averages: Fit | None) -> list[str]:
    other = next((f for f in (online, averages) if f is not None and f is not fit), None)
    return [f"{other.state.where} fits as well, and does not ship"] if other else []
