"""Wraps the graph in torch so that loss() can call it like the task's model, and compares it with a teacher."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.export import example_call
from layerline.pipeline.errors import TaskError
from layerline.pipeline.task import Task
from layerline.qat.graph_module import GraphModule
from layerline.training.data.batches import example_inputs
from layerline.training.data.distillation import Distillation
from layerline.training.run import shipping

ToFeed = Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, Tensor]]
"""From the arguments of a call to the inputs of the graph by name."""
ToResult = Callable[[Mapping[str, Tensor]], Any]
"""From the outputs of the graph by name to what the model returns."""


class Student(nn.Module):
    """A module with the arguments and results of the task's model, computed by the graph."""

    def __init__(self, graph: GraphModule, signature: inspect.Signature, to_feed: ToFeed, to_result: ToResult) -> None:
        super().__init__()
        self.graph = graph

        def forward(*args: Any, **kwargs: Any) -> Any:
            return to_result(graph.compute(to_feed(args, kwargs)))

        # How a batch is spread over the arguments is read from the signature.
        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward


class OutputMatching(Distillation):
    """(1 - weight) · loss + weight · the error of all float outputs, whatever they mean.

    The error of an output is the mean square of its difference from the teacher's, over the variance of the teacher's:
    outputs of any size count alike, and one that tells nothing has an error of 1.
    """

    def distance(self, outputs: Any, wanted: Any, labels: Tensor | None, counted: Tensor | None) -> Tensor:
        del labels, counted  # of classes
        errors: list[Tensor] = []
        for actual, expected in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(wanted), strict=True):
            if not isinstance(expected, Tensor) or not expected.is_floating_point():
                continue
            finite = expected.isfinite()
            if bool(finite.any()):  # masks leave whole outputs at -inf
                exact = expected[finite].float()
                # A constant output has no variance: there its square counts.
                power = exact.var(correction=0) + 1e-6 * exact.square().mean()
                errors.append((actual[finite].float() - exact).square().mean() / power.clamp(min=1e-12))
        if not errors:
            raise TaskError("the model has no float output to compare with the teacher's", where="quantize.qat.distill")
        return torch.stack(errors).mean()


def maker(task: Task, inputs: list[str], outputs: list[str]) -> Callable[[GraphModule], Student]:
    """A function that wraps graphs with these inputs and outputs.

    The module has the signature and results of the task's model(). Without model(), or if the graph has other inputs or
    outputs (an imported file), it takes the inputs by position or name and returns a tensor or a tuple of tensors.

    Raises:
        TaskError: model() does not run on its example.
    """
    if task.has("model"):
        module = shipping.network(task)
        call = example_call.call(module, *example_inputs(task, forward=module.forward))
        if [*call.feed] == inputs and [*call.outputs] == outputs:
            model_signature, model_result = inspect.signature(module.forward), _to_result(call)
            return lambda graph: Student(graph, model_signature, call.tensors, model_result)
    names = [re.sub(r"\W|^(?=\d)", "_", name) for name in inputs]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    signature = inspect.Signature(parameters)

    def to_feed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Tensor]:
        bound = signature.bind(*args, **kwargs).arguments
        return {name: bound[key] for name, key in zip(inputs, names, strict=True)}

    def to_result(results: Mapping[str, Tensor]) -> Any:
        if len(outputs) == 1:
            return results[outputs[0]]
        return tuple(results[name] for name in outputs)

    return lambda graph: Student(graph, signature, to_feed, to_result)


def _to_result(call: example_call.Call) -> ToResult:
    """Returns the structure that the module returns for its example, with other tensors."""
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(call.pristine()(*call.args, **call.kwargs))

    def to_result(results: Mapping[str, Tensor]) -> Any:
        tensors = iter(results[name] for name in call.outputs)
        return pytree.tree_unflatten([next(tensors) if isinstance(v, Tensor) else v for v in leaves], spec)

    return to_result
