"""The default loss, the number of labels it averages over, and the main output of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from layerline.pipeline.errors import TaskError, ran_out_of_memory
from layerline.pipeline.inputs.batches import described, leaves, split

# Labels that torch's cross-entropy ignores: padding, and tokens that are not targets.
IGNORED = -100


def counted_labels(batch: Any) -> Tensor | None:
    """Which labels of a batch cross-entropy counts; None where the targets are not class numbers."""
    _, _, target = split(batch)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():  # a regression
        return None
    return target != IGNORED


def class_axis(output: Tensor, labels: Tensor | None) -> int:
    """The axis of the classes in a model's output: -1 for sequences (N, T, classes), 1 for images (N, classes, H, W).
    Labels decide where they have the output's shape without that axis. Without them outputs of up to three dimensions
    are taken for sequences, others for images."""
    sequences = output.ndim < 4
    if output.ndim > 2 and labels is not None and labels.ndim == output.ndim - 1:
        sequences = labels.shape == output.shape[:-1]
    return -1 if sequences else 1


def default_loss(model: nn.Module, batch: Any, *, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Cross-entropy for integer targets (classes on axis 1, or on the last axis of sequences), mean squared error for
    float targets, and the model's own loss for a batch without target. `reduction` is that of cross-entropy over the
    labels that count: a mean over none of them is NaN, a sum is 0."""
    args, kwargs, target = split(batch, model.forward)
    if not any(isinstance(v, Tensor) for v in leaves((args, kwargs))):
        what = f"the loss got {described(batch)}, expected tensors"
        raise TaskError(what, where="train_data", hint="give arrays: np.asarray(x)")
    out = model(*args, **kwargs)
    if target is None:
        models_loss = getattr(out, "loss", None)
        if isinstance(models_loss, Tensor):
            return models_loss
        hint = "add the key labels to the batch, or define loss(model, batch)"
        raise TaskError("the batch has no label, and the model returns no loss", where="train_data", hint=hint)
    output = first_output(out)
    if not isinstance(target, Tensor):
        raise TaskError("the label of a batch is not a tensor", where="train_data", hint="give arrays: np.asarray(y)")
    kind = "float" if target.is_floating_point() else "integer"
    if kind == "float" and output.numel() == target.numel():
        return F.mse_loss(output.reshape(target.shape), target)  # (N, 1) and (N,) would broadcast to (N, N)
    if kind == "integer" and output.ndim == target.ndim + 1:
        return _cross_entropy(output.movedim(class_axis(output, target), 1), target.long(), reduction)
    what = f"outputs are {tuple(output.shape)}, {kind} targets {tuple(target.shape)}"
    raise TaskError(what, where="loss", hint="define loss(model, batch)")


def _cross_entropy(output: Tensor, target: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    try:
        return F.cross_entropy(output, target, ignore_index=IGNORED, reduction=reduction)
    except (IndexError, ValueError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        shapes = f"outputs {tuple(output.shape)} and integer targets {tuple(target.shape)}"
        what = f"cross-entropy fails on {shapes}: {error}"
        if isinstance(error, IndexError):
            labels = target[target != IGNORED]  # without padding, so that the error names the class that is wrong
            lowest, highest = int(labels.min()), int(labels.max())
            what = f"targets go from {lowest} to {highest}, the model has {output.shape[1]} outputs"
        raise TaskError(what, where="loss", hint="number the classes from 0, or define loss(model, batch)") from error


def first_output(out: Any) -> Tensor:
    """The main output of a model: the tensor it returns, its `logits`, or the first of several tensors."""
    if isinstance(out, Tensor):
        return out
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values: list[Any] = []
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        values = [getattr(out, f.name) for f in dataclasses.fields(out)]
    elif isinstance(out, Mapping):
        values = list(out.values())
    elif isinstance(out, tuple | list):
        values = list(out)
    if values and isinstance(values[0], Tensor):
        return values[0]
    raise TaskError(f"the model returns {type(out).__name__}, expected a tensor", where="model")
