"""train: trains the task's model to a checkpoint. A resumed training gives the same bytes as an uninterrupted one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from layerline.pipeline.errors import ConfigError, memory_errors
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.nearest import did_you_mean, hint
from layerline.pipeline.report import Gate, LayerDiff, Report
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from layerline.backends.base import Session
    from layerline.training.config.sections import Config
    from layerline.training.loop.step_engine import Lane
    from layerline.training.run.train_loop import TrainingRun
    from layerline.training.state.prove_resume import ResumeProof

_DEFAULTS: Mapping[str, Any] = {
    "scheduler.name": "cosine", "scheduler.warmup_ratio": 0.05, "clip.max_norm": 1.0,
    "ema.decay": 0.999, "ema.warmup": True,
}  # fmt: skip

_SHOWN = (
    "optimizer", "scheduler", "training", "precision", "gpu", "distributed", "pruning", "distillation", "swa", "preset",
)  # fmt: skip


class Train(Stage):
    """Trains the task's model.

    The sections `optimizer`, `scheduler`, `training`, `precision`, `gpu`, `distributed`, `pruning`, `distillation` and
    `swa` (and `preset`) may be written in any of the shapes that ModelOptimizer takes; they are kept in the one form
    they mean. Left out: AdamW at 1e-3, warm-up and cosine, clipping at norm 1, EMA 0.999 with warm-up. 0 turns clipping
    or EMA off.
    """

    name: ClassVar[str] = "train"
    version: ClassVar[int] = 6
    takes: ClassVar[Mapping[str, str]] = {}
    gives: ClassVar[str] = "checkpoint"
    uses: ClassVar[tuple[str, ...]] = ("model", "train_data", "loss")
    env: ClassVar[tuple[str, ...]] = ("torch", "numpy")
    side: ClassVar[frozenset[str]] = frozenset({"metrics.csv"})
    unkeyed: ClassVar[frozenset[str]] = frozenset({"workers"})
    together: ClassVar[bool] = True
    long: ClassVar[bool] = True

    epochs: PositiveInt = 10
    """Passes over the training data."""
    steps: PositiveInt | None = None
    """Optimizer steps; overrides epochs."""
    batch_size: PositiveInt = 64
    """Samples a micro-batch; batches that come ready-made keep their size."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Start of every random draw: initial weights, order of samples, dropout."""
    workers: NonNegativeInt = 0
    """Processes that load samples; they change nothing but the speed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a CUDA device where there is one."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """What the sections mean, by the one name of each field (`clip.max_norm`); the sections themselves may be written
    instead."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        # One form for all ways of writing it, so that they share one key.
        return _gather(raw, cls.model_fields)

    @model_validator(mode="after")
    def _recipe_holds(self) -> Train:
        config = self.config()
        # Each of these waits for a metric that nobody would compute.
        needs_validation = {
            "plateau": config.scheduler.name == "plateau",
            "keep_best": config.monitor.keep_best,
            "early_stop": config.monitor.early_stop,
        }
        for name, is_set in needs_validation.items():
            if is_set and not config.monitor.valid_interval:
                what, hint = f"{name} follows validation, which is off", "set it, in optimizer steps"
                raise _placed(ConfigError(what, where="training.valid_interval", hint=hint), {})
        return self

    @classmethod
    def written(cls) -> list[tuple[str, ...]]:
        from layerline.training.config import aliases

        # `recipe` is the stored form; people write the sections.
        names = (cls.model_fields.keys() - {"recipe"}) | aliases.SECTIONS | aliases.FIELDS | aliases.MOVES.keys()
        return [tuple(name.split(".")) for name in sorted(names)]

    def hooks(self) -> tuple[str, ...]:
        """The task's hooks that it calls. Those of the evaluation count only if training validates, so that otherwise
        editing metric() does not retrain."""
        config = self.config()
        hooks = self.uses
        if config.distillation.alpha:
            hooks = (*hooks, "teacher")
        if config.monitor.valid_interval:
            hooks = (*hooks, "eval_data", "metric")
        return hooks

    def config(self) -> Config:
        """The typed configuration of ModelOptimizer."""
        from layerline.training.config import aliases

        try:
            return aliases.load(aliases.nested(self.recipe))
        except ConfigError as error:
            raise _placed(error, aliases.nested(self.recipe)) from error

    def announce(self, *, runs: bool) -> None:
        from layerline.training.distributed import rendezvous

        rendezvous.announce(self.name, runs=runs, timeout_s=self.config().distributed.timeout_s)

    def follow(self) -> bool:
        from layerline.training.distributed import rendezvous

        return rendezvous.follow(self.name, timeout_s=self.config().distributed.timeout_s)

    def session(self, folder: Path, task: Task) -> Session:
        """The module with the weights of the last step, ready to run."""
        from layerline.export.example_call import ModuleSession
        from layerline.training.run import shipping
        from layerline.training.state import checkpoint

        weights, _ = checkpoint.weights(folder / "checkpoint.safetensors")
        return ModuleSession(*shipping.opened(task, weights))

    def run(self, work: Work) -> Report:
        from layerline.training.distributed import ranks
        from layerline.training.run import train_loop
        from layerline.training.state import checkpoint

        config, device = self.config(), self._device()
        # Bit for bit the same on one machine: a resumed run has to end where a straight one does.
        with train_loop.deterministic(), ranks.together(), memory_errors():
            run = train_loop.prepare(work.task, config, device=device, parts=work.parts, **self._length())
            train_loop.train(run, work.scratch, work.log, save_every=config.monitor.save_interval)
            run.mo.export_metrics(work.out / "metrics.csv")
            # With keep_best, the weights of the best validation ship, and the report says of which step.
            best = train_loop.take_best(run)
            checkpoint.save(run.mo, work.out / "checkpoint.safetensors", timings=False)
            if run.lane.skipped:
                work.log.say(_rejected(run.lane))
            return _report(run, best)

    def check(self, look: Inspection) -> None:
        from layerline.training.run import hook_trial

        length = self._length()
        # Workers change the speed alone, and two samples need none.
        del length["workers"]
        hook_trial.try_training_hooks(look, self.config(), device=self._device, **length)

    def _length(self) -> dict[str, Any]:
        """The fields that say how much is trained on what, as arguments."""
        return self.model_dump(include={"epochs", "steps", "batch_size", "seed", "workers"})

    def prove_resume(self, work: Work, steps: int) -> Report:
        """Checks that this training continues bit for bit after a kill.

        Compares `steps` optimizer steps before a checkpoint and as many after it, in one process and in two. Begins at
        the newest checkpoint of an interrupted training, otherwise at the start: a finished one has no steps left.
        """
        from layerline.training.state import checkpoint
        from layerline.training.state import prove_resume as prove

        # Fields that are not set stay so: some sections refuse fields without the one that turns them on.
        arguments = {
            "task": str(work.task.path),
            "config": self.config().model_dump(mode="json", exclude_unset=True),
            "device": self.device,
            **self._length(),
        }
        kept = work.scratch / "checkpoints"
        start = None
        if checkpoint.rotation(kept):
            start = kept
        proof = prove.prove(
            "layerline.training.run.proof_process:make_stage",
            steps,
            arguments=arguments,
            start=start,
            progress=work.log.progress,
        )
        return _proved(proof, asked=steps, interrupted=start is not None)

    def _device(self) -> torch.device:
        from layerline.training.distributed import rendezvous

        return rendezvous.device(self.device, "train.device")


def _proved(proof: ResumeProof, *, asked: int, interrupted: bool) -> Report:
    notes: list[str] = []
    if interrupted:
        notes.append("too few steps are left of the interrupted training")
        if proof.begun_from:
            notes = [f"began from {proof.begun_from}, the newest checkpoint of the interrupted training"]
    if proof.steps < asked:
        notes.append(f"{asked} steps were requested; each half of what the training has left is {proof.steps}")
    tables: dict[str, list[dict[str, Any]]] = {}
    if proof.difference:
        tables["First difference"] = [dataclasses.asdict(proof.difference)]
    return Report(
        stage="train", reference="straight", candidate="resumed in a fresh process",
        metrics={"began_at_step": proof.first, "steps": proof.steps, "compared": proof.compared}, notes=tuple(notes),
        gates=(Gate("goes on bit for bit", proof.passed, str(proof), "no difference", proof.hint),),
        tables=tables,
    )  # fmt: skip


def _gather(raw: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    from layerline.training.config import aliases

    # Errors list the names that people write. The normal form's own sections are valid too.
    valid = [name for name in fields if name != "recipe"] + list(_SHOWN)
    for name in map(str, raw):
        if name not in fields and name not in aliases.SECTIONS and name not in valid:
            advice = did_you_mean(name, [*valid, *aliases.SECTIONS]) or hint(name, valid)
            raise _placed(ConfigError("unknown field", where=name, hint=advice), raw)
    sections = {key: value for key, value in raw.items() if key in aliases.SECTIONS or key == "preset"}
    stage_fields = {key: value for key, value in raw.items() if key not in sections}
    try:
        recipe = _dotted(stage_fields.get("recipe"))
        written = recipe | _dotted(sections)
        defaults = dict(_DEFAULTS)
        if written.get("scheduler.name", "cosine") != "cosine":
            # The default warm-up belongs to the default schedule.
            del defaults["scheduler.warmup_ratio"]
        if "swa.share" in written:
            # SWA's mean ships instead of the EMA.
            defaults = {key: value for key, value in defaults.items() if not key.startswith("ema.")}
        return {**stage_fields, "recipe": aliases.normal_form({**sections, **recipe}, defaults)}
    except ConfigError as error:
        raise _placed(error, raw) from error


def _dotted(recipe: Any) -> dict[str, Any]:
    """A recipe by field (`clip.max_norm`), whether it was written by field or in sections."""
    if recipe is None:
        return {}
    if not isinstance(recipe, Mapping):
        raise ConfigError(f"expected a mapping, for example {{clip.max_norm: 1}}; saw {recipe!r}", where="recipe")
    dotted: dict[str, Any] = {}
    for section, fields in recipe.items():
        if isinstance(fields, Mapping):
            dotted |= {f"{section}.{name}" if name else section: value for name, value in fields.items()}
        else:
            dotted[section] = fields
    return dotted


def _placed(error: ConfigError, raw: Any) -> ValidationError:
    """The same error at the place of its field, so that it names the line and column in pipe.yaml."""
    # pydantic carries the error to the place of its field; pipe.yaml's reader shows it as it is.
    text = "{what}"
    if error.hint:
        text = "{what}; {hint}"
    kind = PydanticCustomError("told", text, {"what": error.what, "hint": error.hint})
    # A number is the place in a list: `optimizer.groups.1.lr`.
    place: tuple[str | int, ...] = tuple(int(part) if part.isdecimal() else part for part in error.where.split("."))
    recipe = raw.get("recipe") if isinstance(raw, Mapping) else None
    if isinstance(recipe, Mapping) and place[0] not in raw:
        # In `recipe`, a field may be one key: `clip.max_norm`.
        if error.where in recipe:
            place = (error.where,)
        place = ("recipe", *place)
    for key in place:
        try:
            raw = raw[key]
        except (LookupError, TypeError):  # what was written has no such field
            raw = None
    details: InitErrorDetails = {"type": kind, "loc": place, "input": raw}
    return ValidationError.from_exception_data("Train", [details])


def _report(run: TrainingRun, best: str) -> Report:
    from layerline.training.model.split_tensors import whole
    from layerline.training.run import train_loop

    # The stage trains one network; only loops of people's own have several.
    (lane,) = run.mo.lanes.values()
    # Sharded parameters are put together first.
    records = tuple(_record(run, name, whole(tensor.detach())) for name, tensor in lane.named.params.items())
    # A weight that is not finite makes every later stage fail, with a worse message.
    bad = [record.name for record in records if record.nonfinite_b]
    finite = Gate("finite weights", not bad, ", ".join(bad[:3]) or "all finite", "all finite")
    notes = [*run.mo.warnings]
    if best:
        notes.append(best)
    if run.resumed is not None:
        notes.append(f"resumed at step {run.resumed}")
    if lane.skipped:
        notes.append(_rejected(lane))
    dead = sum(bool(record.extra["dead"]) for record in records)
    if dead:
        notes.append(f"{dead} trained parameters never changed")
    return Report(
        stage="train", reference="initial weights", candidate="trained weights", records=records,
        metrics={"steps": lane.steps, "loss": lane.loss, "grad_norm": lane.grad_norm, **lane.monitor.speed()},
        gates=(train_loop.accepted(lane), finite),
        notes=tuple(notes),
    )  # fmt: skip


def _rejected(lane: Lane) -> str:
    steps = "1 step was"
    if lane.skipped > 1:
        steps = f"{lane.skipped} steps were"
    return f"{steps} rejected: loss or gradients were not finite"


def _record(run: TrainingRun, name: str, now: Tensor) -> LayerDiff:
    from layerline.compare.arrays import tensor_row

    module = name.rpartition(".")[0]
    row = tensor_row(name, "parameter", module, run.initial[name], now)
    update_ratio = None
    if name in run.before_last:
        update_ratio = tensor_row(name, "parameter", module, run.before_last[name], now).rel_l2
    # A parameter that training may change and never did is most likely not connected.
    dead = name in run.lane.names and row.rel_l2 == 0.0
    # No SQNR against the initial value: training is meant to leave it behind.
    return dataclasses.replace(row, sqnr_db=None, cosine=None, extra={"update_ratio": update_ratio, "dead": dead})
