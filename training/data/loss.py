"""The loss of a task that defines none, how many labels it averages over, and the main output of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from layerline.pipeline.errors import TaskError, ran_out_of_memory
from layerline.pipeline.inputs.batches import described, leaves, split

# What torch's cross-entropy leaves out: padding, and tokens that are no target.
IGNORED = -100


def valid_labels(batch: Any) -> int | None:
    """How many labels of a batch count for cross-entropy; None where the targets are no class numbers."""
    _, _, target = split(batch)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        return None
    return int((target != IGNORED).sum())


def default_loss(model: nn.Module, batch: Any, *, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Cross-entropy for integer targets (classes on axis 1, or on the last axis of sequences), mean squared error for
    float ones; the model's own loss where it returns one.

    Args:
        reduction: of cross-entropy over the labels that count. A mean over none of them is NaN, a sum is 0. The other
            two losses are means in any case.

    Raises:
        TaskError: a batch without target, or an output that no rule fits.
    """
    args, kwargs, target = split(batch, model.forward)
    if not any(isinstance(v, Tensor) for v in leaves((args, kwargs))):
        raise TaskError(
            f"the loss got {described(batch)}, expected tensors", where="train_data", hint="give arrays: np.asarray(x)"
        )
    out = model(*args, **kwargs)
    if target is None:
        if isinstance(own := getattr(out, "loss", None), Tensor):
            return own
        raise TaskError(
            "the batch has no label, and the model returns no loss",
            where="train_data",
            hint="add the key labels to the batch, or define loss(model, batch)",
        )
    output = first_output(out)
    if not isinstance(target, Tensor):
        raise TaskError(
            "the label of a batch is no tensor",
            where="train_data",
            hint="give arrays: np.asarray(y)",
        )
    if target.is_floating_point():
        if output.shape != target.shape and output.numel() == target.numel():
            output = output.reshape(target.shape)  # (N, 1) against (N,): broadcasting would compare each with each
        if output.shape != target.shape:
            raise TaskError(
                f"outputs are {tuple(output.shape)}, float targets {tuple(target.shape)}",
                where="loss",
                hint="define loss(model, batch)",
            )
        return F.mse_loss(output, target)
    if output.ndim == target.ndim + 1 and output.ndim > 2 and output.shape[:-1] == target.shape:
        output = output.movedim(-1, 1)  # (N, T, classes), as sequence models give them
    if output.ndim != target.ndim + 1:
        raise TaskError(
            f"outputs are {tuple(output.shape)}, integer targets {tuple(target.shape)}",
            where="loss",
            hint="define loss(model, batch)",
        )
    return _cross_entropy(output, target.long(), reduction)


def _cross_entropy(output: Tensor, target: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    try:
        return F.cross_entropy(output, target, ignore_index=IGNORED, reduction=reduction)
    except (IndexError, ValueError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        what = (
            f"cross-entropy fails on outputs {tuple(output.shape)} and integer targets {tuple(target.shape)}: {error}"
        )
        if isinstance(error, IndexError):
            lowest, highest = int(_numbered(target).min()), int(target.max())
            what = f"targets go from {lowest} to {highest}, the model has {output.shape[1]} outputs"
        raise TaskError(what, where="loss", hint="number the classes from 0, or define loss(model, batch)") from error


def _numbered(target: Tensor) -> Tensor:
    """The labels that are no padding, so that an error names the class that is wrong."""
    counting = target[target != IGNORED]
    return counting if counting.numel() else target


def first_output(out: Any) -> Tensor:
    """The main output of a model: itself, `logits`, or the first of several."""
    if isinstance(out, Tensor):
        return out
    if isinstance(logits := getattr(out, "logits", None), Tensor):
        return logits
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        out = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
    values = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple | list) else []
    if values and isinstance(values[0], Tensor):
        return values[0]
    raise TaskError(f"the model returns {type(out).__name__}, expected a tensor", where="model")
