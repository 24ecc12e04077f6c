"""Checks, before anything is trained, the data that quantize will read and the metric, on a few samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from layerline.calib.named_arrays import Array, Input
from layerline.calib.samples import Batch, Samples
from layerline.pipeline.config.budgets import MaxDrop, by_metric, least_drop, refuse_unmeasured
from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import form, leaves, mapped
from layerline.pipeline.inputs.metric import accuracy, joined, score
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.outline import outlined
from layerline.pipeline.wording import quantity

# Samples that the metric is tried on. Where it raises on FEW, as one over pairs or classes may, MORE are tried.
FEW, MORE = 2, 64
# Outputs of the model, in order, for one feed.
Predict = Callable[[Mapping[str, Array]], Sequence[Array]]


def check_calibration(
    look: Inspection, inputs: Sequence[Input], hooks: Sequence[str], requested: int | None, *, required: bool
) -> None:
    """Reads two samples of the first of `hooks` that the task has; pipe.yaml asks for `requested` samples.

    Args:
        required: whether the run fails without samples.
    """
    hook = next((hook for hook in hooks if look.task.has(hook)), None)
    if hook is None:
        absent = f"the task defines none of {', '.join(f'{h}()' for h in hooks)}, so nothing can be calibrated"
        hint = "define calib_data(), or use quantize.mode: fp16, which needs no data"
        if required:
            with look.item("calib_data()"):
                raise TaskError(absent, hint=hint)
        else:
            look.warn("calib_data()", absent, hint)
        return
    with look.item(f"{hook}()"):
        source = look.task.call(hook)
        batch = next(iter(Samples(source, inputs, hook=hook, batch_size=FEW, limit=FEW)))
        count = Samples(source, inputs, hook=hook).count()
        look.ok(f"{hook}()", f"calibrates with {outlined(batch.feed)}{_of_all(count)}")
        if requested is not None and count is not None and count < requested:
            what = f"{requested} are requested, {hook}() has {count}"
            look.warn("quantize.samples", what, "all of them will be used")


def check_metric(look: Inspection, inputs: Sequence[Input], run: Predict, max_drop: MaxDrop | None) -> None:
    """Calls the metric on the untrained model's outputs for the first samples of eval_data()."""
    with look.item("quantize.max_drop"):
        refuse_unmeasured(max_drop, has_data=look.task.has("eval_data"))
    if not look.task.has("eval_data"):
        return
    with look.item("eval_data()"):
        source = look.task.call("eval_data")
        count = Samples(source, inputs, hook="eval_data", purpose="evaluation").count()
        outputs, targets = _predicted(look, source, inputs, run, FEW)
        look.ok("eval_data()", f"targets {outlined(targets)}{_of_all(count)}")
        with look.item("metric()"):
            _try_metric(look, source, inputs, run, (outputs, targets), max_drop)
        least = least_drop(max_drop)
        if count and least is not None and least < 1 / count:
            worth = f"{1 / count:.2g}"
            look.warn(
                "quantize.max_drop",
                f"{least:g} is less than one of the {count} samples of eval_data() is worth in a share ({worth})",
                f"where the metric is a share, allow at least {worth}, or evaluate on more samples",
            )


def _of_all(count: int | None) -> str:
    if count is None:
        return ""
    return f" of {quantity(count, 'sample')}"


def _try_metric(
    look: Inspection,
    source: Any,
    inputs: Sequence[Input],
    run: Predict,
    predicted: tuple[Any, Any],
    max_drop: MaxDrop | None,
) -> None:
    outputs, targets = predicted
    if targets is None:
        if look.task.has("metric") or max_drop is not None:
            raise TaskError("eval_data() gives no targets, so nothing is measured", where="eval_data",
                            hint="give (x, y), or a dict with the target under 'label'")  # fmt: skip
        return
    if not look.task.has("metric"):
        try:
            scores = score(accuracy, outputs, targets)
        except TaskError as error:
            if max_drop is not None:
                raise
            look.warn("metric()", f"the task has none, and {error.what}", error.hint)
            return
    else:
        metric = look.task.get("metric")
        try:
            scores = score(metric, outputs, targets)
        except TaskError as on_few:
            more = _predicted(look, source, inputs, run, MORE)
            try:
                scores = score(metric, *more)
            except TaskError:
                targets = np.asarray(next(leaves(more[1])))  # a metric over classes has no value for a single one
                if form(source, "eval_data") != "batches" or np.unique(targets).size > 1:
                    raise on_few from None
                look.warn("metric()", on_few.what, f"the first {MORE} samples are of one class: shuffle eval_data(), "
                          "or make sure that metric() takes all of it", on_few.where)  # fmt: skip
                return
    if not scores and max_drop is not None:
        raise TaskError(
            "it gave no figure, and quantize.max_drop asks for one", hint="return a number, or numbers by name"
        )
    with look.item("quantize.max_drop"):
        by_metric(max_drop, scores)
    # Without their values: the weights may be untrained, and a few samples tell nothing.
    figures = ", ".join(scores) or "no figure"
    look.ok("metric()", f"gives {figures} on outputs {outlined(outputs)}")


def _predicted(look: Inspection, source: Any, inputs: Sequence[Input], run: Predict, limit: int) -> tuple[Any, Any]:
    """Outputs and targets of the first samples, as the metric gets them."""
    outputs: list[list[Array]] = []
    targets: list[Any] = []
    rows = 0
    for whole in Samples(source, inputs, hook="eval_data", purpose="evaluation", batch_size=limit, limit=limit):
        batch = _cut(whole, inputs, limit)
        with look.task.blaming("the model", on=partial(outlined, batch.feed)):
            results = run(batch.feed)
        outputs.append([batch.real(array) for array in results])
        targets.append(batch.target)
        rows += batch.rows
        if rows >= limit:
            break
    parts = tuple(joined(list(arrays), "outputs") for arrays in zip(*outputs, strict=True))
    all_outputs = parts[0] if len(parts) == 1 else parts
    if targets[0] is None:
        return all_outputs, None
    return all_outputs, joined(targets, "targets")


def _cut(batch: Batch, inputs: Sequence[Input], limit: int) -> Batch:
    """The first samples of a batch that came ready-made, where the model takes any number of them."""
    if batch.rows <= limit or not all(i.shape and isinstance(i.shape[0], str) for i in inputs):
        return batch

    def head(array: Any) -> Any:
        # An array without samples, and an absent target, stay whole.
        if isinstance(array, np.ndarray) and array.ndim and len(array) == batch.rows:
            return array[:limit]
        return array

    feed, target = mapped((batch.feed, batch.target), head)
    return Batch(feed, target, limit)
