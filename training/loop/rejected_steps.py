"""Handles a step whose loss or gradient is not finite: it is counted, reported and undone, except for a smaller loss
scale. What happens after several in a row is decided here, or by `triage.Judge` if the lane has one."""

from __future__ import annotations

import math

import torch

from layerline.pipeline.errors import StageError
from layerline.training.loop.lane_state import LaneState


def reject(lane: LaneState, loss: float, norm: float) -> None:
    """Drops a window whose loss or gradient is not finite."""
    # fp16 gradients overflow as a matter of course while the scale is being found; a loss never should.
    answered = lane.scale.on and not lane.scale.at_floor and math.isfinite(loss)
    step = lane.steps + 1  # the judge may go back to an earlier one
    lane.skipped += 1
    lane.first_rejected = lane.first_rejected or lane.steps + lane.skipped
    lane.skipped_in_a_row += not answered
    if not answered and lane.steps and weights_spoilt(lane):
        return
    for policy in lane.policies():
        policy.after_rejected(finite=False)
    if lane.scale.on:
        lane.monitor.scale_fell(lane.scale.value, at_floor=lane.scale.at_floor)
    try:
        if lane.judge is not None and not answered:
            lane.judge.rejected(lane, loss, norm)
        elif not answered and lane.skipped_in_a_row >= lane.config.nonfinite.patience:
            raise not_finite(lane, loss, norm)
    finally:
        lane.forget()
    if not answered and not lane.config.nonfinite.triage:
        lane.monitor.warn("rejected", f"step {step} was rejected, since {seen(loss, norm)}; "
                                      "nonfinite.triage: true says where such a thing begins")  # fmt: skip


def spoilt_weight(lane: LaneState) -> str | None:
    """A weight that was finite at first and no longer is; ranks that hold parts of the weights ask each other."""
    name = lane.finite.first_spoilt()
    if lane.peers is not None and lane.peers.greatest(float(name is not None)):
        return name or "a weight of another rank"
    return name


def weights_spoilt(lane: LaneState) -> bool:
    """Looks for a weight that an earlier update made Inf or NaN. True when the last checkpoint was put back for it."""
    # Of several ranks all must ask at the same step.
    name = spoilt_weight(lane)
    if name is None:
        return False
    hint = "lower the learning rate, or keep the weights in float32; `nonfinite: {policy: rollback}` goes back to the "
    error = StageError(f"{name} is Inf or NaN after step {lane.steps}: an update was not finite", where=name,
                       hint=hint + "last checkpoint")  # fmt: skip
    try:
        if lane.judge is None:
            raise error
        lane.judge.enough(lane, error)
    finally:
        drop(lane)
    return True


def drop(lane: LaneState) -> None:
    """Drops a window that is not stepped on although nothing in it is Inf or NaN."""
    for policy in lane.policies():
        policy.after_rejected(finite=True)
    lane.forget()


def not_finite(lane: LaneState, loss: float, norm: float) -> StageError:
    """The error for a rejected step, naming the first parameter whose gradient is not finite."""
    what = f"{seen(loss, norm)} at step {lane.steps + 1}"
    if lane.skipped_in_a_row > 1:
        what += f", {lane.skipped_in_a_row} steps in a row"
    where = "loss"
    for name, param in zip(lane.names, lane.stepped, strict=True):
        if param.grad is not None and not torch.isfinite(param.grad).all():
            what += f"; the first gradient that is not finite is that of {name}"
            where = name
            break
    hint = "lower the learning rate, clip gradients, or look for a division or log of 0 there; "
    return StageError(what, where=where, hint=hint + "nonfinite.triage: true says where it begins")


def seen(loss: float, norm: float) -> str:
    """What was not finite, in words."""
    if math.isfinite(loss):
        return f"the gradient norm is {norm:g}"
    return f"the loss is {loss:g}"
