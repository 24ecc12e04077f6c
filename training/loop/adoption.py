"""Habits of a hand-written loop that do harm around ModelOptimizer: each is warned of once, with the line to change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerline.training.config.sections import Config
from layerline.training.model.hooks import Attached
from layerline.training.model.precision import HALF

if TYPE_CHECKING:
    from layerline.training.loop.monitors import Monitor

# torch's code for reduction="mean" in the losses that save it for their backward pass.
_MEAN = 1
# A GradScaler starts at 65536 and moves by powers of two.
_LEAST_SCALE = 1024.0
# Share of the initial weights in an average at the end of a run, from which on it is too slow for the run.
_INITIAL_SHARE = 0.1


def look_at_loss(monitor: Monitor, loss: Tensor, weight: float | None, accumulated: int) -> None:
    """Warns of a loss that the loop has divided, weighed or scaled by itself."""
    factor = _last_factor(loss)
    if accumulated > 1 and weight is None and _is(factor, 1 / accumulated) and not _may_be_half(loss, accumulated):
        monitor.warn(
            "divided",
            f"the loss is divided by {accumulated}, the number of accumulated micro-batches, and ModelOptimizer "
            "divides once more: write mo.step(loss) instead of mo.step(loss / accumulation_steps)",
        )
    if _is_scaled(loss, factor):
        monitor.warn(
            "scaled",
            f"the loss is multiplied by {factor:g}, as a GradScaler does: leave GradScaler out, "
            "`precision: {amp: fp16}` has its own loss scale",
        )
    if weight is not None and weight > 1 and _is_mean(loss):
        monitor.warn(
            "mean",
            f"weight={weight:g} says that the loss is a sum, and it is a mean: write "
            "mo.step(loss * n, weight=n), or leave weight out",
        )


def watch_autocast(model: nn.Module, monitor: Monitor, config: Config, device: torch.device) -> None:
    """Warns when the first forward pass that trains runs without the autocast that `precision.amp` asks for.

    A model whose parameters are all half computes in half precision without it.
    """
    if config.precision.amp == "fp32" or all(p.dtype in HALF for p in model.parameters() if p.is_floating_point()):
        return

    def look(_args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        handle.remove()
        if not torch.is_autocast_enabled(device.type):
            monitor.warn(
                "autocast",
                f"precision.amp is {config.precision.amp}, and the forward pass runs without it: write "
                "`with mo.autocast():` around the model and the loss",
            )

    handle = model.register_forward_pre_hook(Attached(look))


def look_at_average(monitor: Monitor, config: Config) -> None:
    """Warns of an average that at the end of the run still consists of initial weights."""
    total, decay = config.scheduler.total_steps, config.ema.decay
    if not decay or total is None or config.ema.warmup or config.ema.start_step > 1:
        return
    share = decay**total
    if share <= _INITIAL_SHARE:
        return
    fitting = _INITIAL_SHARE ** (1 / total)
    monitor.warn(
        "slow_average",
        f"after {total} steps the average still holds {share:.0%} of the initial weights: set ema.warmup: true, "
        f"or ema.decay to at most {fitting:.4g}",
    )


def _last_factor(loss: Tensor) -> float | None:
    """What the last operation multiplied the loss by; None where it was no product with a number."""
    node: Any = loss.grad_fn
    name = type(node).__name__
    if name not in ("MulBackward0", "DivBackward0"):
        return None
    other = node._saved_other
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return None
    value = float(other)
    if name == "MulBackward0":
        return value
    return 1 / value if value else None


def _is_scaled(loss: Tensor, factor: float | None) -> bool:
    """Whether a GradScaler multiplied the loss. Its scale is a float32 tensor; a number in the loop, such as the size
    of the batch, is saved as int64 or float64."""
    if factor is None or factor < _LEAST_SCALE or not math.log2(factor).is_integer():
        return False
    node: Any = loss.grad_fn
    return bool(node._saved_other.dtype == torch.float32)


def _may_be_half(loss: Tensor, accumulated: int) -> bool:
    """Whether a factor of 1/2 may belong to the loss itself: `0.5 * mse`, or `(a + b) / 2`."""
    if accumulated != 2:
        return False
    node: Any = loss.grad_fn
    return type(node).__name__ == "MulBackward0" or type(node.next_functions[0][0]).__name__ == "AddBackward0"


def _is(value: float | None, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=1e-6)


def _is_mean(loss: Tensor) -> bool:
    node: Any = loss.grad_fn
    if type(node).__name__ == "MeanBackward0":
        return True
    return getattr(node, "_saved_reduction", None) == _MEAN
