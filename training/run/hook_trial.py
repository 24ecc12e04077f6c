"""Tries the training hooks on two samples before training: model, data, loss and its gradient."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import TaskError
from layerline.pipeline.inputs.batches import described
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.outline import outlined
from layerline.pipeline.task import EXAMPLE_HOOKS
from layerline.training.config.sections import Config
from layerline.training.data import batches as data
from layerline.training.data import golden_outputs
from layerline.training.data.batches import Batches, leading, selected, size, to_device
from layerline.training.data.distillation import Taught
from layerline.training.model.canonical_names import named
from layerline.training.randomness import rng_state
from layerline.training.run import shipping
from layerline.training.run.shipping import module_of, train_mode
from layerline.training.run.train_loop import check_evaluation, loss_of, steps_per_epoch
from layerline.training.setup.model_optimizer import ModelOptimizer

SAMPLES = 2
_ONE_ROW = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def try_training_hooks(
    look: Inspection, config: Config, *, steps: int | None, epochs: int, batch_size: int, seed: int,
    device: Callable[[], torch.device],
) -> None:  # fmt: skip
    """Builds what a training run builds, and computes one loss with its gradient on two samples."""
    where = torch.device("cpu")
    with look.item("train.device"):
        where = device()
        look.ok("train.device", str(where))
    # The weights that the run would begin with.
    rng_state.seed_all(seed)
    with look.item("model()"):
        module = module_of(look.task)
        _tell_model(look, module)
        look.shared["trained"] = module
    with look.item("train_data()"):
        look.shared["batch"], look.shared["more"] = _batches(look, batch_size)
        look.shared["total"] = steps or epochs * steps_per_epoch(look.shared["more"], config.accumulate.steps)
    with look.item("eval_data()"):
        check_evaluation(look.task, config)
    with look.item("train"):
        model, total = look.need("trained").to(where), look.need("total")
        for text in train_mode(model):
            look.warn("model()", text, "see docs/training.md")
        if config.scheduler.total_steps is None:
            config = config.replace(scheduler={"total_steps": total})
        mo = _quietly_built(model, config)
        for text in mo.warnings:
            look.warn("train", text, "see docs/training.md")
        with look.item("teacher()"):
            loss = loss_of(look.task, model, config, where)
            look.shared["loss"] = loss
            if isinstance(loss, Taught):  # distillation is on
                look.ok("teacher()", _outline(loss.distillation.teacher))
        with look.item("loss()"):
            _try_loss(look, mo, where)
        with look.item("train.batch_size"):
            _try_last_batch(look, mo, batch_size, where)
    for name in ("trained", "batch", "more", "loss"):  # later stages need none of them
        look.shared.pop(name, None)
    gc.collect()  # the network of the later stages must not lie beside this one


def _quietly_built(model: nn.Module, config: Config) -> ModelOptimizer:
    """The optimizer of a trial. Its warnings become findings; the training that follows logs them itself."""
    logger = logging.getLogger("layerline.training")
    logger.disabled = True
    try:
        return ModelOptimizer(model, config.replace(monitor={"save_interval": 0}))
    finally:
        logger.disabled = False


def try_example(look: Inspection) -> None:
    """Runs the model in eval mode on the example; leaves `network` and `example` for those after it."""
    with look.item("model()"):
        network = shipping.network(look.task)
        if not any(f.item == "model()" for f in look.findings):
            _tell_model(look, network)
        look.shared["network"] = network
    hook = next(filter(look.task.has, EXAMPLE_HOOKS), EXAMPLE_HOOKS[0])
    with look.item(f"{hook}()"):
        network = look.need("network")
        example = data.example_inputs(look.task, forward=network.forward)
        try:
            golden = golden_outputs.record(network, *example)
        except TaskError as error:
            if hook != EXAMPLE_HOOKS[0] and not error.hint:
                error.hint = f"there is no example_inputs(), so the first samples of {hook}() are the example"
            raise
        inputs = {name.removeprefix("inputs/"): t for name, t in golden.items() if name.startswith("inputs/")}
        outputs = {name.removeprefix("outputs/"): t for name, t in golden.items() if name.startswith("outputs/")}
        look.shared["example"] = example
        look.ok(f"{hook}()", f"as the example: {outlined(inputs)} gives {outlined(outputs)}")
        _warn_of_nonfinite(look, "model()", outputs)


def _outline(module: nn.Module) -> str:
    count = sum(p.numel() for p in module.parameters())
    return f"{type(module).__name__} of {count:,} parameters"


def _tell_model(look: Inspection, model: nn.Module) -> None:
    params = named(model).params  # refuses what has no shape yet
    look.shared["model_bytes"] = sum(p.numel() * p.element_size() for p in params.values())
    look.ok("model()", _outline(model))
    if not any(p.requires_grad for p in params.values()):
        look.warn("model()", "no parameter requires a gradient", "let those that are to be trained require one")


def _batches(look: Inspection, batch_size: int) -> tuple[Any, Batches]:
    """A batch of two samples, and the batches that training will draw."""
    source = look.task.call("train_data")
    batches = Batches(source, batch_size=SAMPLES, seed=None)
    with look.task.blaming("drawing a batch of train_data()"):
        batch = next(batches.forever())
    text = described(batch)
    if batches.samples is not None:
        text += f" of {batches.samples} samples"
    look.ok("train_data()", text)
    look.shared["samples"] = batches.samples
    return batch, Batches(source, batch_size=batch_size, seed=None)


def _try_loss(look: Inspection, mo: ModelOptimizer, where: torch.device) -> None:
    """A loss and its gradient on two samples. Where it fails, as a loss over pairs may, a whole batch is tried."""
    batch = to_device(look.need("batch"), where)
    samples = size(batch)
    few = selected(batch, torch.arange(min(SAMPLES, samples)), samples)
    try:
        loss = _loss(look, mo, few)
    except TaskError as on_few:
        try:
            loss = _loss(look, mo, to_device(next(look.need("more").forever()), where))
        except TaskError:
            raise on_few from None  # the batch of two is what people can look at
    params = named(mo.model).params
    trained = [n for n, p in params.items() if p.requires_grad]
    missing = [n for n in trained if params[n].grad is None]
    if trained and len(missing) == len(trained):
        raise TaskError("no parameter gets a gradient from it", where="loss",
                        hint="compute it from the model's outputs, without detach() or no_grad()")  # fmt: skip
    look.ok("loss()", f"{float(loss.detach()):.4g} on {described(few).removeprefix('a batch ')}")
    if missing:
        shown = missing[:3]
        if len(missing) > 3:
            shown.append("…")
        look.warn("loss()", f"{len(missing)} of {len(trained)} parameters get no gradient: {', '.join(shown)}",
                  "freeze them by requires_grad_(False), or use them in forward()")  # fmt: skip
    gradients = {f"the gradient of {name}": p.grad for name, p in params.items() if p.grad is not None}
    _warn_of_nonfinite(look, "loss()", {"the loss": loss.detach(), **gradients})


def _loss(look: Inspection, mo: ModelOptimizer, batch: Any) -> Tensor:
    with mo.autocast():
        loss: Tensor = look.need("loss")(mo.model, batch)[0]
    with look.task.blaming("the gradient of loss()"):
        loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _try_last_batch(look: Inspection, mo: ModelOptimizer, batch_size: int, where: torch.device) -> None:
    """Tries a last batch of one sample, on which BatchNorm would fail only at the end of an epoch."""
    samples = look.shared.get("samples")
    # Only the last batch can have one sample.
    if samples is None or samples % batch_size != 1 or not any(isinstance(m, _ONE_ROW) for m in mo.model.modules()):
        return
    one = leading(look.need("batch"), 1)
    try:
        _loss(look, mo, to_device(one, where))
    except TaskError as error:
        what = f"the last batch of an epoch has 1 of the {samples} samples, and on it {error.what}"
        hint = f"choose a batch_size that leaves more than one, or leave a sample out; it is {batch_size}"
        raise TaskError(what, where="train.batch_size", hint=hint) from error


def _warn_of_nonfinite(look: Inspection, item: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            look.warn(item, f"{name} is NaN or infinite on the first {SAMPLES} samples",
                      "look for NaN in the data, a division by 0 or a log of 0")  # fmt: skip
            return
