"""What follows a loss or gradient that is not finite: say where it began, then skip, stop or roll back. A step that was
rejected never reached weights, averages or optimizer state. This module decides what happens next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from layerline.pipeline.errors import StageError
from layerline.training.diagnostics.nan_localizer import NonFiniteOrigin, Pass, output_tensors, trace, weights
from layerline.training.loop import rejected_steps as rejected
from layerline.training.loop.lane_state import LaneState
from layerline.training.model.canonical_names import unwrap
from layerline.training.model.hooks import Attached
from layerline.training.randomness.rng_state import past

# Rolling back to the same checkpoint more often than this only repeats what happened.
_ROLL_BACKS = 3


@dataclass(frozen=True)
class StepDiagnosis:
    """The diagnosis of the first of several rejected steps in a row."""

    step: int  # the rejected optimizer step; 1 is the first
    loss: float  # loss, norm: loss and gradient norm of the step
    norm: float
    micro_batch: int = 0  # the micro-batch of the window in which it began; 0 is the first
    # The first non-finite tensor; None when the same micro-batches, run again, are finite.
    origin: NonFiniteOrigin | None = None
    rank: int | None = None  # the rank of that micro-batch, where there are several
    replayed: bool = True  # whether every loss of the window came from calls of the model, and so could run again

    def __str__(self) -> str:
        text = f"step {self.step}: {rejected.seen(self.loss, self.norm)}; "
        if self.origin is None and not self.replayed:
            why = "the loss does not come from calls of the model alone, and only these can be run again"
            return f"{text}where it began is not known: {why}"
        if self.origin is None:
            return f"{text}run again, the step is finite: it does not repeat"
        text += "it began "
        if self.rank is not None:
            text += f"on rank {self.rank} "
        text += str(self.origin)
        if self.micro_batch:
            text += f" of micro-batch {self.micro_batch}"
        if self.replayed:
            text += "; run again, it repeats"
        return text


def _advice(origin: NonFiniteOrigin | None) -> tuple[str, str]:
    """The place to look at, and what to look for."""
    if origin is None:
        return "loss", "look at the code that isn't run again: the loss, and parts of the loop that change gradients"
    if origin.phase == "input":
        return "the batch", "look at these samples: correct them, or leave them out of the data"
    if origin.phase == "parameter":
        return origin.tensor, "it was not finite before this step: load a sound checkpoint, or see who writes it"
    if origin.phase == "loss":
        return "loss", "look for a division, log or root of 0 in the loss function"
    hint = "look for a division, log or root of 0, or for too great a number, there; or lower the learning rate"
    return origin.module or "the model", hint


def _first_of(of_ranks: Sequence[StepDiagnosis]) -> StepDiagnosis | None:
    for rank, finding in enumerate(of_ranks):
        if finding.origin is not None:
            return replace(finding, rank=rank)
    return None


class Recorder:
    """Records the micro-batches of the present window so that they can run again: references to their inputs, the
    random state (about ten microseconds each) and copies of the buffers."""

    def __init__(self, lane: LaneState) -> None:
        self._lane = lane
        self._window = (-1, -1)
        self.passes: list[Pass] = []
        lane.model.register_forward_pre_hook(Attached(self._before), with_kwargs=True)
        lane.model.register_forward_hook(Attached(self._after))

    def find(self, loss: float, norm: float) -> StepDiagnosis:
        """Runs the window's passes again, in their order, until one isn't finite."""
        lane = self._lane
        # A pass in eval mode without gradients, such as a validation, is not part of the step.
        passes = [p for p in self.passes if p.start.modes[0][1] or p.gradients]
        step = lane.steps + 1
        losses = lane.window.losses
        self.passes = []  # the hooks below record the second run, too
        for index, recorded in enumerate(passes):
            origin = trace(lane.model, recorded)
            if origin is not None and origin.phase == "loss" and not all(recorded.finite):
                return StepDiagnosis(step, loss, norm)  # it began in the model, whose outputs are finite now
            if origin is not None:
                return StepDiagnosis(step, loss, norm, index, origin)
        if sum(bool(recorded.gradients) for recorded in passes) < max(lane.window.micro, len(losses)):
            return StepDiagnosis(step, loss, norm, origin=weights(lane.model), replayed=False)
        for index, value in enumerate(losses):
            if not torch.isfinite(value):
                # Outputs and gradients of the model are finite, so the loss function made it.
                nan = int(torch.isnan(value))
                dtype = str(value.dtype).removeprefix("torch.")
                made_by_loss = NonFiniteOrigin("loss", "", "the loss", (), dtype, nan, 1 - nan)
                return StepDiagnosis(step, loss, norm, index, made_by_loss)
        return StepDiagnosis(step, loss, norm)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lane = self._lane
        window = (lane.steps, lane.skipped)
        if window != self._window:
            self._window, self.passes = window, []
        if torch.is_grad_enabled():  # a validation pass is no part of a step
            device = lane.device.type
            start = past(unwrap(lane.model).modules())
            autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            self.passes.append(Pass(args, kwargs, start, autocast))

    def _after(self, _: Any, out: Any) -> None:
        if not torch.is_grad_enabled() or not self.passes:
            return
        gradients, finite = self.passes[-1].gradients, self.passes[-1].finite
        for index, tensor in enumerate(output_tensors(out)):
            finite.append(torch.isfinite(tensor.detach()).all())  # read by `find` alone: a read waits for the device
            tensor.register_hook(lambda g, index=index: gradients.__setitem__(index, g.detach()))  # type: ignore[no-untyped-call]


class Judge:
    """Applies the policy of `nonfinite` to rejected steps. skip gives up after `limit` of them in a row, stop at the
    first one. rollback restores the last saved weights, averages and optimizer state after `limit` in a row and goes on
    with the next data; it gives up when it would restore the same checkpoint for the fourth time."""

    def __init__(self, lane: LaneState, roll_back: Callable[[], str | None]) -> None:
        self._config, self._roll_back = lane.config.nonfinite, roll_back
        self.recorder = Recorder(lane) if self._config.triage else None
        # One for each sequence of rejected steps, where `nonfinite.triage` is on.
        self.findings: list[StepDiagnosis] = []
        self._restored, self._times = -1, 0

    def rejected(self, lane: LaneState, loss: float, norm: float) -> None:
        """Called while the gradients of the rejected window still exist; not for an overflow that a smaller loss scale
        answers."""
        if self.recorder is not None and lane.skipped_in_a_row == 1:
            finding = self.recorder.find(loss, norm)
            if lane.peers is not None:
                finding = _first_of(lane.peers.gather(finding)) or finding
            self.findings.append(finding)
            lane.monitor.warn(f"finding {finding.step}", str(finding))
        if lane.skipped_in_a_row < self._config.patience:
            return
        error = rejected.not_finite(lane, loss, norm)
        if self.findings:
            where, hint = _advice(self.findings[-1].origin)
            what = str(self.findings[-1])
            if lane.skipped_in_a_row > 1:
                what += f"; {lane.skipped_in_a_row} steps in a row were rejected"
            error = StageError(what, where=where, hint=hint)
        self.enough(lane, error)

    def enough(self, lane: LaneState, error: StageError) -> None:
        """Called after as many rejected steps in a row as the policy allows: rolls back, or ends with `error`."""
        if self._config.policy != "rollback":
            raise error
        where = self._roll_back()
        if where is None:
            raise StageError(f"{error.what}; there is no checkpoint to roll back to", where="nonfinite.policy",
                             hint="set monitor.save_interval, or call mo.save_ckpt()")  # fmt: skip
        if lane.steps != self._restored:  # the step of the checkpoint: a file may have been written again since
            self._restored, self._times = lane.steps, 0
        self._times += 1
        if self._times > _ROLL_BACKS:
            what = f"{error.what}; rolling back to {where} {_ROLL_BACKS} times did not help"
            raise StageError(what, where=error.where, hint=error.hint)
        lane.skipped_in_a_row = 0
        text = f"rolled back to {where} after {self._config.limit} rejected steps in a row"
        lane.monitor.warn(f"rolled back {where} {lane.steps} {self._times}", text)
