"""What follows a loss or gradient that is not finite: say where it began, then skip, stop or roll back.

A step that was rejected never reached weights, averages or optimizer state. This module decides what happens next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from layerline.pipeline.errors import StageError
from layerline.training.diagnostics.nan_localizer import Origin, Pass, output_tensors, trace, weights
from layerline.training.loop import rejected_steps as rejected
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import unwrap
from layerline.training.model.hooks import Attached
from layerline.training.randomness.rng_snapshot import past

# Rolling back to the same checkpoint more often than this only repeats what happened.
_ROLL_BACKS = 3


@dataclass(frozen=True)
class Finding:
    """The first rejected step of a row, looked into.

    Attributes:
        step: the optimizer step that was rejected; 1 is the first.
        loss, norm: what was seen.
        micro_batch: the micro-batch of the window it began in; 0 is the first.
        origin: where it began; None when the same micro-batches, run again, are finite.
        rank: whose micro-batch it was, where there are several ranks.
        seen: whether every loss of the window came through calls of the model, so that all of it could be run again.
    """

    step: int
    loss: float
    norm: float
    micro_batch: int = 0
    origin: Origin | None = None
    rank: int | None = None
    seen: bool = True

    @property
    def repeats(self) -> bool:
        """Whether running the step again gave it again."""
        return self.origin is not None and self.seen

    def __str__(self) -> str:
        seen = rejected.seen(self.loss, self.norm)
        rank = "" if self.rank is None else f" on rank {self.rank}"
        if self.origin is None and not self.seen:
            why = "the loss does not come through calls of the model alone, and nothing else can be run again"
            return f"step {self.step}: {seen}{rank}; where it began is not known: {why}"
        if self.origin is None:
            return f"step {self.step}: {seen}{rank}; run again, the step is finite: it does not repeat"
        micro = f" of micro-batch {self.micro_batch}" if self.micro_batch else ""
        repeats = "; run again, it repeats" if self.seen else ""
        return f"step {self.step}: {seen}; it began{rank} {self.origin}{micro}{repeats}"


def _advice(origin: Origin | None) -> tuple[str, str]:
    """Where to look, and what for."""
    if origin is None:
        return "loss", "what isn't run again is left: the loss, or something in the loop that changes gradients"
    if origin.phase == "input":
        return "the batch", "look at these samples: mend them, or leave them out of the data"
    if origin.phase == "parameter":
        return origin.tensor, "it was spoilt before this step: start from a sound checkpoint, or see who writes to it"
    if origin.phase == "loss":
        return "loss", "look for a division, log or root of 0 in the loss function"
    where = origin.module or "the model"
    return where, "look for a division, log or root of 0, or for too great a number, there; or lower the learning rate"


class Recorder:
    """Keeps what it takes to run the present window's micro-batches again: their inputs, by reference, the random state
    (some ten microseconds each) and copies of the buffers.

    Args:
        lane: whose model is watched. Passes without gradients are not kept.
    """

    def __init__(self, lane: LaneState) -> None:
        self._lane = lane
        self._window = (-1, -1)
        self.passes: list[Pass] = []
        model = lane.model
        self._handles = [
            model.register_forward_pre_hook(Attached(self._before), with_kwargs=True),
            model.register_forward_hook(Attached(self._after)),
        ]

    def remove(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()

    def find(self, loss: float, norm: float) -> Finding:
        """Runs the window's passes again, first to last, until one isn't finite."""
        # What no gradient came back to, in eval mode, is no part of the step.
        lane, passes = self._lane, [p for p in self.passes if p.training or p.gradients]
        step, losses = lane.steps + 1, lane.window.losses
        self.passes = []  # the model is watched while it runs again, too
        for index, kept in enumerate(passes):
            if (origin := trace(lane.model, kept)) is not None:
                return Finding(step, loss, norm, index, origin)
        if sum(bool(kept.gradients) for kept in passes) < max(lane.window.micro, len(losses)):
            return Finding(step, loss, norm, origin=weights(lane.model), seen=False)
        bad = next((i for i, value in enumerate(losses) if not torch.isfinite(value)), None)
        if bad is None:
            return Finding(step, loss, norm)
        # The model is finite, there and back: what is left is the loss itself.
        nan, dtype = int(torch.isnan(losses[bad])), str(losses[bad].dtype).removeprefix("torch.")
        return Finding(step, loss, norm, bad, Origin("loss", "", "the loss", (), dtype, nan, 1 - nan))

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lane = self._lane
        if (window := (lane.steps, lane.skipped)) != self._window:
            self._window, self.passes = window, []
        if torch.is_grad_enabled():
            device, start = lane.device.type, past(unwrap(lane.model).modules())
            how = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            self.passes.append(Pass(args, kwargs, start, how))

    def _after(self, _: Any, out: Any) -> None:
        if not torch.is_grad_enabled() or not self.passes:
            return
        gradients = self.passes[-1].gradients
        for index, tensor in enumerate(output_tensors(out)):
            tensor.register_hook(lambda g, index=index: gradients.__setitem__(index, g.detach()))  # type: ignore[no-untyped-call]


class Judge:
    """Decides what follows a rejected step: the policy of `nonfinite`.

    skip goes on, and gives up after `limit` rejected steps in a row. stop ends at the first one. rollback puts the last
    saved weights, averages and optimizer state back after `limit` in a row and goes on with the data that come next; it
    gives up when the same checkpoint is needed a fourth time.

    Args:
        lane: whose steps are judged.
        roll_back: puts the last good state back and says which; None where there is none.

    Attributes:
        findings: one for each row of rejected steps, where `nonfinite.triage` is on.
    """

    def __init__(self, lane: LaneState, roll_back: Callable[[], str | None]) -> None:
        self._config, self._roll_back = lane.config.nonfinite, roll_back
        self.recorder = Recorder(lane) if self._config.triage else None
        self.findings: list[Finding] = []
        self._where, self._times = "", 0

    def rejected(self, lane: LaneState, loss: float, norm: float) -> None:
        """Called while the rejected window's gradients are still there; not for what a smaller loss scale answers.

        Raises:
            StageError: the policy says that this is the end; with what was found.
        """
        if self.recorder is not None and lane.skipped_in_a_row == 1:
            self._look(lane, self.recorder.find(loss, norm))
        if lane.skipped_in_a_row >= self._config.patience:
            self.enough(lane, self._end(lane, loss, norm))

    def enough(self, lane: LaneState, error: StageError) -> None:
        """Called at as many rejected steps in a row as the policy allows: goes back, or ends with `error`.

        Raises:
            StageError: the policy does not go back, or cannot, or has done so too often.
        """
        if self._config.policy != "rollback":
            raise error
        if (where := self._roll_back()) is None:
            raise StageError(f"{error.what}; there is no checkpoint to roll back to", where="nonfinite.policy",
                             hint="set monitor.save_interval, or call mo.save_ckpt()")  # fmt: skip
        self._times = self._times + 1 if where == self._where else 1
        self._where = where
        if self._times > _ROLL_BACKS:
            what = f"{error.what}; rolling back to {where} {_ROLL_BACKS} times did not help"
            raise StageError(what, where=error.where, hint=error.hint)
        lane.skipped_in_a_row = 0
        text = f"rolled back to {where} after {self._config.limit} rejected steps in a row"
        lane.monitor.warn(f"rolled back {where} {self._times}", text)

    def _look(self, lane: LaneState, finding: Finding) -> None:
        if lane.peers is not None:
            told = lane.peers.gather(finding)
            first = next((r for r, f in enumerate(told) if f.origin is not None), None)
            finding = finding if first is None else replace(told[first], rank=first)
        self.findings.append(finding)
        lane.monitor.warn(f"finding {finding.step}", str(finding))

    def _end(self, lane: LaneState, loss: float, norm: float) -> StageError:
        if self.recorder is None or not self.findings:
            return rejected.not_finite(lane, loss, norm)
        found, times = self.findings[-1], lane.skipped_in_a_row
        rows = f"; {times} steps in a row were rejected" if times > 1 else ""
        where, hint = _advice(found.origin)
        return StageError(f"{found}{rows}", where=where, hint=hint)
