"""The samples that quantize reads from the task's hooks, and the ranges collected over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Feed
from layerline.backends.onnxruntime import OnnxRuntime, OrtSession
from layerline.calib import collect, selection
from layerline.calib.calibration_survey import Survey
from layerline.calib.named_arrays import Input, Positions
from layerline.calib.samples import Batch, Samples
from layerline.pipeline.config.quantize_fields import Selection
from layerline.pipeline.errors import TaskError
from layerline.pipeline.stage import Work

MOST_FEEDS = 128
"""Samples that the rounding of weights is chosen on, and that a default session is judged on."""
MOST_OPTIMISED = 1 << 28
"""Bytes of weights up to which calibration runs an optimised session, which holds two further copies of them."""
LEAST, DENSE = 8, 64
"""Of fewer than LEAST samples none is held out. Else every second of the first LEAST is, every fourth of the first
DENSE, and every 32nd of the others."""
TOO_FEW = f"fewer than {LEAST} different samples (or batches, where their size is fixed) leave none to judge it on"


def session(model: ir.Model, taps: Sequence[str]) -> OrtSession:
    """A session for calibration, with the given inner values as further outputs.

    Ranges need no bits of the graph as it is written, and optimised kernels take a fifth less time. Threads that do not
    spin leave the other cores to other work.
    """
    optimised = sum(tensor.nbytes for tensor in model.graph.initializers.tensors()) <= MOST_OPTIMISED
    return OnnxRuntime(defaults=optimised, config={"session.intra_op.allow_spinning": "0"}).open(model, taps)


class CalibrationData:
    """Calibration and evaluation samples of one task, in the form that the model takes.

    Args:
        work: holds the task and the log.
        inputs: the model's inputs.
        hooks: hooks that may give calibration samples, in order of preference.
        samples: greatest number of calibration samples.
        batch_size: samples a run, where the data does not come in batches.
        choice: how they are chosen; `choose` does it.
        stop_early: see `collect`.
        percentile: see `collect`.
        holds_out: whether some calibration samples are kept from ranges and repairs, for these to be judged on.

    Attributes:
        survey: a few of the calibration samples that were read.
        held_out: the same of those held out.
        evaluated: the same of the evaluation samples.
    """

    def __init__(
        self,
        work: Work,
        inputs: Sequence[Input],
        *,
        hooks: Sequence[str],
        samples: int,
        batch_size: int,
        choice: Selection = "even",
        stop_early: float | None = None,
        percentile: float = 99.99,
        holds_out: bool = False,
    ) -> None:
        self.task = work.task
        self.log = work.log
        self.survey = Survey(inputs)
        self.held_out = Survey(inputs)
        self.evaluated = Survey(inputs)
        self._inputs = inputs
        self._hooks = hooks
        self._limit = samples
        self._batch_size = batch_size
        self._choice = choice
        self._stop_early = stop_early
        self._percentile = percentile
        self._numbers: Positions | None = None
        self._choice_note: tuple[str, ...] = ()
        self._holds_out = holds_out
        self._held: dict[bytes, bool] = {}
        self._read = 0

    def hook(self) -> str | None:
        """The hook that calibration samples come from; None where the task has none."""
        for hook in self._hooks:
            if self.task.has(hook):
                return hook
        return None

    def choose(self, model: ir.Model, names: Sequence[str]) -> None:
        """Chooses the calibration samples, once, where they are not simply spread evenly over the data.

        Args:
            model: the float model.
            names: the values that are calibrated, in the order of the network.

        Raises:
            TaskError: stratified, and the data gives no class.
        """
        hook = self.hook()
        ordered = self._choice != "even" or self._stop_early is not None
        if self._numbers is not None or not ordered or hook is None or not names:
            return
        if self._choice == "coverage":
            wanted = selection.CANDIDATES * self._limit
            candidates = self._samples(hook, "calibration", wanted, selection.CANDIDATE_BATCH)
            features = selection.statistics(lambda taps: session(model, taps), candidates, names)
            chosen = selection.k_center(features, self._limit)
            self._numbers = candidates.positions(len(features))[chosen]
            self._choice_note = (f"{chosen.size} of {len(features)} samples were chosen to cover the activations",)
            return
        if self._choice == "stratified":
            candidates = self._samples(hook, "calibration", selection.MOST_LABELS)
            classes, kind = selection.labels(candidates, hook)
            chosen = selection.stratified(classes, self._limit)
            self._numbers = candidates.positions(len(classes))[chosen]
            sizes = np.unique(classes[chosen], return_counts=True)[1]
            least, most = sizes.min(), sizes.max()
            self._choice_note = (f"stratified by {kind}: {sizes.size} classes of {least} to {most} samples each",)
        else:
            samples = self._samples(hook, "calibration", self._limit)
            total = samples.count()
            if total is None:
                return
            self._numbers = samples.positions(total)
        # The first samples say as much about the data as all of them.
        self._numbers = self._numbers[selection.spread_order(self._numbers.size)]

    def calibration(self) -> tuple[Samples, tuple[str, ...]]:
        """The calibration samples, and a note where they do not come from calib_data().

        Raises:
            TaskError: the task has none of the hooks.
        """
        hook = self.hook()
        if hook is None:
            raise TaskError(
                f"0 calibration samples: the task defines none of {', '.join(f'{h}()' for h in self._hooks)}",
                where=self.task.path.name,
                hint="define calib_data(), or use mode: fp16, which needs no data",
            )
        notes: tuple[str, ...] = ()
        if hook != "calib_data":
            notes = (f"no calib_data() in the task: calibrated on {hook}()",)
        return self._calibration_samples(hook, self._limit), (*notes, *self._choice_note)

    def calibration_feeds(self) -> Iterator[Feed]:
        """Up to MOST_FEEDS of the calibration samples, as they are fed; none where the task has no hook for them."""
        for batch in self._calibration_batches():
            yield batch.feed

    def _calibration_batches(self) -> Iterator[Batch]:
        hook = self.hook()
        if hook is not None:
            yield from self._calibration_samples(hook, min(self._limit, MOST_FEEDS))

    def parts(self) -> tuple[list[Feed], list[Feed]]:
        """A few samples that choices are fitted on, and a few that they are judged on.

        The second list is empty where nothing is held out: of fewer than LEAST samples, or of one that comes again.
        """
        return [batch.feed for batch in self.survey.batches()], [batch.feed for batch in self.held_out.batches()]

    def fitting(self) -> Iterator[Feed]:
        """Up to MOST_FEEDS calibration samples without those held out, whatever order the hook gives them in."""
        for batch in self._split(self._calibration_batches()):
            yield batch.feed

    def _split(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Passes on what choices are fitted on. The first pass keeps what they are judged on in `held_out`."""
        first = not self.held_out.rows
        waiting: list[Batch] = []
        for batch in batches:
            self._read += batch.rows
            pieces = self._pieces(batch)
            held = np.array([self._is_held_out(piece) for piece in pieces])
            if not held.any():
                yield batch
                continue
            judged = batch
            if not held.all():
                judged = self.survey.select(batch, np.flatnonzero(held))
                yield self.survey.select(batch, np.flatnonzero(~held))
            if first:
                waiting.append(judged)
            if len(self._held) >= LEAST:
                list(self.held_out.through(waiting))
                waiting = []
        # Of so few samples each one is needed for the ranges.
        yield from waiting

    def _is_held_out(self, piece: Feed) -> bool:
        """Whether this sample is judged on. One that comes again, in any pass, has the part that it had before."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(piece):
            digest.update(np.ascontiguousarray(piece[name]).tobytes())
        index = len(self._held)
        held = index % 32 == 31
        if index < LEAST:
            held = index % 2 == 1
        elif index < DENSE:
            held = index % 4 == 3
        return self._held.setdefault(digest.digest(), held)

    def _pieces(self, batch: Batch) -> list[Feed]:
        """The smallest parts of a batch that the model takes: its rows, or all of it."""
        if not self.survey.can_cut(batch):
            return [batch.feed]
        return [self.survey.select(batch, np.array([row])).feed for row in range(batch.rows)]

    def evaluation(self) -> Samples | None:
        """All samples of eval_data(); None where the task has no such hook."""
        if not self.task.has("eval_data"):
            return None
        return self._samples("eval_data", "evaluation", None)

    def ranges(
        self,
        model: ir.Model,
        names: Sequence[str],
        batches: Samples | list[Batch],
        nonfinite: Literal["stop", "skip"],
        *,
        whole: bool = False,
    ) -> collect.Ranges:
        """Collects the ranges of the named values, and keeps a few samples in `survey`.

        Args:
            whole: reads held-out samples too.
        """
        count = len(batches) if isinstance(batches, list) else batches.count()
        # A reader without a length is expected to give as many samples as are wanted.
        total = count or self._limit
        read: Iterable[Batch] = batches
        splits = self._holds_out and not whole
        if splits:
            self._read = 0
            read = self._split(batches)
        # A model that is calibrated anew is tried on the same samples as before.
        if not self.survey.rows:
            read = self.survey.through(read)
        return collect.collect(
            lambda taps: session(model, taps),
            read,
            names,
            nonfinite=nonfinite,
            percentile=self._percentile,
            stop_early=self._stop_early,
            progress=lambda done: self.log.progress(min(self._read if splits else done, total), total),
        )

    def _calibration_samples(self, hook: str, limit: int) -> Samples:
        if self._numbers is None:
            return self._samples(hook, "calibration", limit)
        return self._samples(hook, "calibration", None, numbers=self._numbers[:limit])

    def _samples(
        self,
        hook: str,
        purpose: str,
        limit: int | None,
        batch_size: int | None = None,
        numbers: Positions | None = None,
    ) -> Samples:
        return Samples(
            self.task.call(hook),
            self._inputs,
            hook=hook,
            purpose=purpose,
            batch_size=batch_size or self._batch_size,
            limit=limit,
            numbers=numbers,
        )
