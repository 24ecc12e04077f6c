"""The graph in torch behind the signature of the task's model, as loss() calls it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.export import example_call
from layerline.pipeline.task import Task
from layerline.qat.graph_module import GraphModule
from layerline.training.data.batches import example_inputs
from layerline.training.run import shipping

Named = Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, Tensor]]
Rebuilt = Callable[[Mapping[str, Tensor]], Any]


class Student(nn.Module):
    """Takes and gives what the task's model takes and gives; computed by the graph.

    Args:
        named: names the tensors among the arguments of a call.
        rebuilt: puts outputs in the places of those of the model.
    """

    def __init__(self, graph: GraphModule, named: Named, rebuilt: Rebuilt) -> None:
        super().__init__()
        self.graph, self._named, self._rebuilt = graph, named, rebuilt

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one call."""
        return self._rebuilt(self.graph.compute(self._named(args, kwargs)))


def maker(task: Task, inputs: list[str], outputs: list[str]) -> Callable[[GraphModule], Student]:
    """Puts graphs with these inputs and outputs behind the signature of the task's model().

    Without model(), or where its inputs are others, as for an imported file: inputs by position or name, and a tensor
    or a tuple of them as the result.

    Raises:
        TaskError: model() does not run on its example.
    """
    if task.has("model"):
        module = shipping.network(task)
        call = example_call.call(module, *example_inputs(task, forward=module.forward))
        if [*call.feed] == inputs and [*call.outputs] == outputs:
            return lambda graph: _behind(inspect.signature(module.forward), graph, call.tensors, _tree(call))
    names = [re.sub(r"\W|^(?=\d)", "_", name) for name in inputs]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    signature = inspect.Signature(parameters)

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Tensor]:
        bound = signature.bind(*args, **kwargs).arguments
        return {name: bound[key] for name, key in zip(inputs, names, strict=True)}

    def rebuilt(results: Mapping[str, Tensor]) -> Any:
        tensors = tuple(results[name] for name in outputs)
        return tensors[0] if len(tensors) == 1 else tensors

    return lambda graph: _behind(signature, graph, named, rebuilt)


def _tree(call: example_call.Call) -> Rebuilt:
    """Puts tensors in the places of those that the module returns for its example."""
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(call.pristine()(*call.args, **call.kwargs))

    def rebuilt(results: Mapping[str, Tensor]) -> Any:
        tensors = iter(results[name] for name in call.outputs)
        return pytree.tree_unflatten([next(tensors) if isinstance(v, Tensor) else v for v in leaves], spec)

    return rebuilt


def _behind(signature: inspect.Signature, graph: GraphModule, named: Named, rebuilt: Rebuilt) -> Student:
    def forward(self: Student, *args: Any, **kwargs: Any) -> Any:
        return self.called(args, kwargs)

    # How a batch is spread over the arguments is read from the signature.
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    made: type[Student] = type("Student", (Student,), {"forward": forward})
    return made(graph, named, rebuilt)
