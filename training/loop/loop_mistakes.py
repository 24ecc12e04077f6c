"""What a training loop can do wrong around a step: refused by name, with what to do instead."""

from __future__ import annotations

from typing import Any

import torch

from layerline.pipeline.errors import ConfigError, StageError
from layerline.training.loop.lane_state import LaneState


def refuse_averages(lane: LaneState, where: str) -> None:
    """Training would change the averages, which the model holds, and not the weights."""
    if lane.ema is not None and lane.ema.swapped:
        raise ConfigError("the model holds its EMA weights", where=where, hint="call switch_to_online() first")


def check_begun(lane: LaneState) -> None:
    """A step without a loss needs gradients from backward(), here or by hand; one rank of several may have none."""
    refuse_averages(lane, "step")
    if lane.window.open or lane.peers is not None:
        return
    if lane.window.weighted is not None:
        raise StageError("nothing was added since the last step()", where="step",
                         hint="pass the loss, mo.step(loss), or call mo.backward(loss) first")  # fmt: skip
    if all(p.grad is None for p in lane.stepped):
        raise no_gradient(lane)


def settle_foreign(lane: LaneState, others_ran: bool) -> None:
    """Drops gradients that the backward pass of another ModelOptimizer has left, as a plain zero_grad() does."""
    if not others_ran or lane.shared or lane.peers is not None:
        return
    if lane.window.untouched:
        foreign = [p for p in {*lane.params, *lane.stepped} if p.grad is not None]
        for tensor in foreign:
            tensor.grad = None
        if foreign:
            text = (
                "gradients that another ModelOptimizer's backward pass left in this model are dropped: put models that "
                "train each other into one, ModelOptimizer({'g': g, 'd': d})"
            )
            lane.monitor.warn("foreign", text)
    elif lane.window.witness is not None:
        param, grad, version = lane.window.witness
        if param.grad is grad and grad._version != version:
            raise StageError(
                "the backward pass of another ModelOptimizer added to the gradients of this window, which is dropped",
                where="step", hint="put both models into one: ModelOptimizer({'g': g, 'd': d})",
            )  # fmt: skip


def no_gradient(lane: LaneState) -> StageError:
    """The error for a step that no parameter has a gradient for."""
    lane.refresh()
    return StageError("no parameter has a gradient", where="step", hint="pass the loss: mo.step(loss)")


def explain_backward(error: BaseException) -> None:
    """What a backward pass raised, said in the loop's terms where it can be."""
    if isinstance(error, RuntimeError) and "through the graph a second time" in str(error):
        raise ConfigError("a backward pass has gone through the graph of this loss already", where="loss",
                          hint="mo.step(loss) runs it: leave loss.backward() out, or call mo.step() without "
                               "the loss; of losses that share a graph, give the sum") from error  # fmt: skip


def no_closure(optimizer: Any) -> ConfigError:
    """The error for a step that an optimizer can take with a closure alone."""
    return ConfigError(
        f"{type(optimizer).__name__} evaluates the loss itself and needs a closure",
        where="step",
        hint="mo.step(closure=f), where f() runs the model on the batch and returns the loss, without backward()",
    )


def sparse_gradient(lane: LaneState) -> str | None:
    """The first parameter whose gradient is sparse."""
    return next((n for n, p in zip(lane.names, lane.stepped, strict=True)
                 if p.grad is not None and p.grad.layout is not torch.strided), None)  # fmt: skip


def explain_step(lane: LaneState, error: BaseException, sparse: str | None) -> None:
    """What a step raised, in the loop's terms where it can be; `sparse` as it was before the window was dropped."""
    if sparse is not None:
        raise ConfigError("sparse gradients are not supported", where=sparse,
                          hint="sparse=False where its embedding is looked up") from error  # fmt: skip
    if type(error).__name__ == "NoClosureError":  # pytorch_optimizer's, whatever version
        raise no_closure(lane.optimizer) from error
    if isinstance(error, RuntimeError | TypeError):
        lane.refresh()  # what was changed in the model is a better reason
