"""The samples that quantize reads from the task's hooks, and the ranges collected over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.calib import collect, selection
from layerline.calib.calibration_survey import Survey
from layerline.calib.hold_out import HoldOut
from layerline.calib.named_arrays import Input, Positions
from layerline.calib.sample_screen import SampleScreen
from layerline.calib.samples import Batch, Samples
from layerline.pipeline.config.quantize_fields import Selection
from layerline.pipeline.errors import StageError, TaskError
from layerline.pipeline.stage import Work

# Samples that the rounding of weights is chosen on, and that a default session is judged on.
MOST_FEEDS = 128
# Bytes of weights up to which calibration runs an optimised session, which holds two further copies of them.
MOST_OPTIMISED = 1 << 28


def session(model: ir.Model, taps: Sequence[str]) -> OrtSession:
    """A session for calibration, with the given inner values as further outputs.

    Ranges need no bits of the graph as it is written, and optimised kernels take a fifth less time. Threads that do not
    spin leave the other cores to other work.
    """
    config = {"session.intra_op.allow_spinning": "0"}
    if sum(tensor.nbytes for tensor in model.graph.initializers.tensors()) <= MOST_OPTIMISED:
        try:
            return OnnxRuntime(defaults=True, config=config).open(model, taps)
        except StageError:
            # Some optimisations merge a value that is tapped into another node, and then miss it: onnxruntime 1.31
            # does in sums of several convolutions. As it is written, the graph gives the same ranges.
            pass
    return OnnxRuntime(config=config).open(model, taps)


@dataclass(eq=False)
class CalibrationData:
    """Calibration and evaluation samples of one task, in the form that the model takes.

    Attributes:
        survey: a few of the calibration samples that choices are fitted on.
        held_out: a few of the others.
        evaluated: the same of the evaluation samples.
    """

    work: Work  # holds the task and the log
    inputs: Sequence[Input]  # the model's inputs
    _: dataclasses.KW_ONLY
    hooks: Sequence[str] = ()  # hooks that may give calibration samples, in order of preference
    samples: int = 1  # greatest number of calibration samples
    batch_size: int  # samples a run, where the data does not come in batches
    selection: Selection = "even"  # how they are chosen; `choose_samples` does it.
    stop_early: float | None = None  # see `collect`
    percentile: float = 99.99  # see `collect`
    # whether choices and repairs are judged on some calibration samples that they are not fitted on. Ranges are of all
    # samples.
    holds_out: bool = False
    drops_outliers: bool = False  # see `SampleScreen`

    def __post_init__(self) -> None:
        self.task = self.work.task
        self.survey = Survey(self.inputs)
        self.held_out = Survey(self.inputs)
        self.evaluated = Survey(self.inputs)
        self._hold_out = HoldOut(self.survey, self.held_out)
        self._screen: SampleScreen | None = None
        self._numbers: Positions | None = None
        self._choice_note: tuple[str, ...] = ()

    def hook(self) -> str | None:
        """The hook that calibration samples come from; None where the task has none."""
        for hook in self.hooks:
            if self.task.has(hook):
                return hook
        return None

    def choose_samples(self, model: ir.Model, names: Sequence[str]) -> None:
        """Chooses the calibration samples, once, where they are not simply spread evenly over the data.

        Args:
            names: the values that are calibrated, in the order of the network.

        Raises:
            TaskError: stratified, and the data gives no class.
        """
        hook = self.hook()
        if self._numbers is not None or hook is None or not names:
            return
        if self.selection == "coverage":
            wanted = selection.CANDIDATES * self.samples
            candidates = self._read(hook, limit=wanted, batch_size=selection.CANDIDATE_BATCH)
            features = selection.statistics(lambda taps: session(model, taps), candidates, names)
            chosen = selection.k_center(features, self.samples)
            # The order stays: of the first ones each is the farthest from those before it.
            self._numbers = candidates.positions(len(features))[chosen]
            self._choice_note = (f"{chosen.size} of {len(features)} samples were chosen to cover the activations",)
            return
        if self.selection == "stratified":
            candidates = self._read(hook, limit=selection.MOST_LABELS)
            classes, kind = selection.labels(candidates, hook)
            chosen = selection.stratified(classes, self.samples)
            numbers = candidates.positions(len(classes))[chosen]
            sizes = np.unique(classes[chosen], return_counts=True)[1]
            of_each = f"{sizes.size} classes of {sizes.min()} to {sizes.max()} samples each"
            self._choice_note = (f"stratified by {kind}: {of_each}",)
        elif self.stop_early is not None:
            samples = self._read(hook, limit=self.samples)
            total = samples.count()
            if total is None:
                return
            numbers = samples.positions(total)
        else:
            return
        # The first samples say as much about the data as all of them.
        self._numbers = numbers[selection.spread_order(numbers.size)]

    def calibration(self) -> tuple[Samples, tuple[str, ...]]:
        """The calibration samples, and a note where they do not come from calib_data().

        Raises:
            TaskError: the task has none of the hooks.
        """
        hook = self.hook()
        if hook is None:
            raise TaskError(
                f"0 calibration samples: the task defines none of {', '.join(f'{h}()' for h in self.hooks)}",
                where=self.task.path.name,
                hint="define calib_data(), or use mode: fp16, which needs no data",
            )
        notes: tuple[str, ...] = ()
        if hook != "calib_data":
            notes = (f"no calib_data() in the task: calibrated on {hook}()",)
        return self._chosen(hook, self.samples), (*notes, *self._choice_note)

    def calibration_feeds(self) -> Iterator[Feed]:
        """Up to MOST_FEEDS of the calibration samples, as they are fed; none where the task has no hook for them."""
        for batch in self._few():
            yield batch.feed

    def fitting(self) -> Iterator[Feed]:
        """Up to MOST_FEEDS calibration samples without those held out, whatever order the hook gives them in."""
        for batch in self._hold_out.fitted(self._few()):
            yield batch.feed

    def parts(self) -> tuple[list[Feed], list[Feed]]:
        """A few samples that choices are fitted on, and a few that they are judged on.

        The second list is empty where nothing is held out: of fewer than LEAST samples, or of one that comes again.
        """
        return [batch.feed for batch in self.survey.batches()], [batch.feed for batch in self.held_out.batches()]

    def evaluated_feeds(self) -> list[Feed]:
        """A few evaluation samples, without those that calibration would leave out as well."""
        batches = self.evaluated.batches()
        if self._screen is not None:
            batches = self._screen.finite(batches)
        return [batch.feed for batch in batches]

    @property
    def left_out(self) -> int:
        """Calibration samples that were read and not used."""
        if self._screen is None:
            return 0
        return self._screen.left_out

    def evaluation(self) -> Samples | None:
        """All samples of eval_data(); None where the task has no such hook."""
        if not self.task.has("eval_data"):
            return None
        return self._read("eval_data", purpose="evaluation")

    def ranges(
        self,
        model: ir.Model,
        names: Sequence[str],
        batches: Samples | list[Batch],
        nonfinite: Literal["stop", "skip"],
        *,
        screened: bool = True,
    ) -> collect.Ranges:
        """Collects the ranges of the named values, and keeps a few samples in `survey` and `held_out`.

        Args:
            screened: leaves out samples as `SampleScreen` says.
        """
        count = len(batches) if isinstance(batches, list) else batches.count()
        # A reader without a length is expected to give as many samples as are wanted.
        total = count or self.samples
        read: Iterable[Batch] = batches
        if screened and self._screen is not None:
            read = self._screen.again(read)
        elif screened:
            opened = functools.cache(lambda: session(model, ()))
            self._screen = SampleScreen(
                self.survey,
                nonfinite,
                lambda feed: opened().run(feed),
                every=nonfinite == "skip" or (self.holds_out and not names),
                drops_outliers=self.drops_outliers,
            )
            read = self._screen.through(read)
        # A model that is calibrated anew is tried on the same samples as before.
        if not self.survey.rows:
            keeper = self._hold_out if self.holds_out else self.survey
            read = keeper.through(read)
        ranges = collect.collect(
            lambda taps: session(model, taps),
            read,
            names,
            nonfinite=nonfinite,
            percentile=self.percentile,
            stop_early=self.stop_early,
            progress=lambda done: self.work.log.progress(min(done, total), total),
        )
        self._hold_out.finish()
        if screened and self._screen is not None:
            notes = self._screen.notes(lambda number: self._position(batches, number))
            ranges = dataclasses.replace(ranges, notes=(*ranges.notes, *notes))
        return ranges

    def _position(self, batches: Samples | list[Batch], number: int) -> int:
        """The place in the data of the sample that was read as the n-th."""
        if self._numbers is not None:
            return int(self._numbers[number])
        if isinstance(batches, Samples):
            return int(batches.positions(number + 1)[number])
        return number

    def _few(self) -> Iterator[Batch]:
        hook = self.hook()
        if hook is not None:
            chosen = self._chosen(hook, min(self.samples, MOST_FEEDS))
            yield from chosen if self._screen is None else self._screen.again(chosen)

    def _chosen(self, hook: str, limit: int) -> Samples:
        """The calibration samples as `choose_samples` chose them, or spread evenly over the data."""
        if self._numbers is None:
            return self._read(hook, limit=limit)
        return self._read(hook, numbers=self._numbers[:limit])

    def _read(
        self,
        hook: str,
        *,
        purpose: str = "calibration",
        limit: int | None = None,
        batch_size: int | None = None,
        numbers: Positions | None = None,
    ) -> Samples:
        return Samples(
            self.task.call(hook),
            self.inputs,
            hook=hook,
            purpose=purpose,
            batch_size=batch_size or self.batch_size,
            limit=limit,
            numbers=numbers,
        )
