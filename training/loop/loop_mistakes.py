"""What a training loop can do wrong around a step: refused or warned of once, with the line to change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError, StageError, ran_out_of_memory
from layerline.training.config.sections import Config
from layerline.training.loop import model_sync
from layerline.training.loop.lane_state import LaneState, passes
from layerline.training.model.hooks import Attached
from layerline.training.model.precision import HALF

if TYPE_CHECKING:
    from layerline.training.loop.monitors import Monitor


def check_begun(lane: LaneState) -> None:
    """A step without a loss needs gradients from backward(), here or by hand; one rank of several may have none."""
    lane.refuse_averages("step")
    if lane.window.open or lane.peers is not None:
        return
    if lane.window.weighted is not None:
        raise StageError("nothing was added since the last step()", where="step",
                         hint="pass the loss, mo.step(loss), or call mo.backward(loss) first")  # fmt: skip
    if all(p.grad is None for p in lane.stepped):
        raise no_gradient(lane)


def check_window(lane: LaneState) -> None:
    """Refuses a step whose gradients were cleared, or that another ModelOptimizer has added to."""
    if lane.own_passes != passes.number:
        settle_foreign(lane)
    lane.window.check_gradients(lane.stepped)


def settle_foreign(lane: LaneState) -> None:
    """Drops gradients that the backward pass of another ModelOptimizer has left, as a plain zero_grad() does."""
    if lane.shared or lane.peers is not None:
        return
    if lane.window.untouched:
        for tensor in {*lane.params, *lane.stepped}:
            if tensor.grad is not None:
                tensor.grad = None
                text = (
                    "gradients that another ModelOptimizer's backward pass left in this model are dropped: put models "
                    "that train each other into one, ModelOptimizer({'g': g, 'd': d})"
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
    model_sync.refresh(lane)
    return StageError("no parameter has a gradient", where="step", hint="pass the loss: mo.step(loss)")


def explain_memory(lane: LaneState, error: BaseException) -> None:
    """Where memory ran out, a warning says how a micro-batch runs in parts."""
    if ran_out_of_memory(error) and lane.config.accumulate.on_oom == "raise":
        text = (
            "memory ran out: `accumulate: {on_oom: halve}` runs a micro-batch in parts that fit, with "
            "mo.train_step(batch, forward) and in the train stage"
        )
        lane.monitor.warn("memory", text)


def explain_backward(lane: LaneState, error: BaseException) -> None:
    """Replaces an error of the backward pass by one that names the line of the loop to change, if it is a known one."""
    explain_memory(lane, error)
    if isinstance(error, RuntimeError) and "through the graph a second time" in str(error):
        raise ConfigError("a backward pass has gone through the graph of this loss already", where="loss",
                          hint="mo.step(loss) runs it: leave loss.backward() out, or call mo.step() without "
                               "the loss; of losses that share a graph, give the sum") from error  # fmt: skip


def no_closure(optimizer: Any) -> ConfigError:
    """The error for a step that an optimizer can take with a closure alone."""
    what = f"{type(optimizer).__name__} evaluates the loss itself and needs a closure"
    hint = "mo.step(closure=f), where f() runs the model on the batch and returns the loss, without backward()"
    return ConfigError(what, where="step", hint=hint)


def explain_step(lane: LaneState, error: BaseException, sparse: str | None) -> None:
    """What a step raised, in the loop's terms where it can be; `sparse` as it was before the window was dropped."""
    if sparse is not None:
        raise ConfigError("sparse gradients are not supported", where=sparse,
                          hint="sparse=False where its embedding is looked up") from error  # fmt: skip
    if type(error).__name__ == "NoClosureError":  # pytorch_optimizer's, whatever version
        raise no_closure(lane.optimizer) from error
    if isinstance(error, RuntimeError | TypeError):
        model_sync.refresh(lane)  # what was changed in the model is a better reason


# torch's code for reduction="mean" in the losses that save it for their backward pass.
_MEAN = 1
# A GradScaler starts at 65536 and moves by powers of two.
_LEAST_SCALE = 1024.0
# Share of the initial weights in an average at the end of a run, from which on it is too slow for the run.
_INITIAL_SHARE = 0.1


def warn_of_changed_loss(monitor: Monitor, loss: Tensor, weight: float | None, accumulated: int) -> None:
    """Warns of a loss that the loop has divided, weighed or scaled by itself, by the last operation on it."""
    node: Any = loss.grad_fn
    kind = type(node).__name__
    is_mean = kind == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN
    if weight is not None and weight > 1 and is_mean:
        text = f"weight={weight:g} says that the loss is a sum, and it is a mean: write mo.step(loss * n, weight=n), "
        monitor.warn("mean", text + "or leave weight out")
    if kind not in ("MulBackward0", "DivBackward0"):
        return
    other = node._saved_other
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad or not other:
        return
    factor = float(other) if kind == "MulBackward0" else 1 / float(other)
    # A factor of 1/2 may belong to the loss itself: `0.5 * mse`, or `(a + b) / 2`.
    may_be_half = kind == "MulBackward0" or type(node.next_functions[0][0]).__name__ == "AddBackward0"
    divided = math.isclose(factor, 1 / accumulated, rel_tol=1e-6) and not (accumulated == 2 and may_be_half)
    if accumulated > 1 and weight is None and divided:
        text = (
            f"the loss is divided by {accumulated}, the number of accumulated micro-batches, and ModelOptimizer "
            "divides once more: write mo.step(loss) instead of mo.step(loss / accumulation_steps)"
        )
        monitor.warn("divided", text)
    # A GradScaler's scale is a float32 tensor; a number in the loop (a batch size) is saved as int64 or float64.
    if factor >= _LEAST_SCALE and math.log2(factor).is_integer() and other.dtype == torch.float32:
        text = (
            f"the loss is multiplied by {factor:g}, as a GradScaler does: leave GradScaler out, "
            "`precision: {amp: fp16}` has its own loss scale"
        )
        monitor.warn("scaled", text)


def watch_autocast(model: nn.Module, monitor: Monitor, config: Config, device: torch.device) -> None:
    """Warns when the first forward pass that trains runs without the autocast that `precision.amp` asks for."""
    # A model whose parameters are all half computes in half precision without it.
    if config.precision.amp == "fp32" or all(p.dtype in HALF for p in model.parameters() if p.is_floating_point()):
        return

    def look(_args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        handle.remove()
        if not torch.is_autocast_enabled(device.type):
            text = f"precision.amp is {config.precision.amp}, and the forward pass runs without it: write "
            monitor.warn("autocast", text + "`with mo.autocast():` around the model and the loss")

    handle = model.register_forward_pre_hook(Attached(look))


def warn_of_slow_average(monitor: Monitor, config: Config) -> None:
    """Warns of an average that at the end of the run still consists of initial weights."""
    total, decay = config.scheduler.total_steps, config.ema.decay
    if not decay or total is None or config.ema.warmup or config.ema.start_step > 1:
        return
    share = decay**total
    if share <= _INITIAL_SHARE:
        return
    fitting = _INITIAL_SHARE ** (1 / total)
    text = f"after {total} steps the average still holds {share:.0%} of the initial weights: set ema.warmup: true, "
    monitor.warn("slow_average", text + f"or ema.decay to at most {fitting:.4g}")
