"""What the shipped weights answer: golden inputs and outputs, and the output of every module on the way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.pipeline.errors import TaskError, ran_out_of_memory
from layerline.training.loss import first_output
from layerline.training.names import modules


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by the names of forward's arguments; those of *args are `<name>_0`, `<name>_1`, …

    Raises:
        TaskError: the call does not fit forward().
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TaskError(f"the example does not fit forward(): {error}", where="example_inputs") from error
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            flat |= {f"{name}_{i}": v for i, v in enumerate(value)}
        else:
            flat[name] = value
    return {n: v for n, v in flat.items() if isinstance(v, Tensor)}


def named_outputs(out: Any) -> dict[str, Tensor]:
    """The tensors a model returns: `output`, `output_0`, `output_1`, … or the keys of a dict."""
    if isinstance(out, Tensor):
        return {"output": out}
    if isinstance(out, Mapping):
        return {str(k): v for k, v in out.items() if isinstance(v, Tensor)}
    if isinstance(out, tuple | list):
        return {f"output_{i}": v for i, v in enumerate(out) if isinstance(v, Tensor)}
    raise TaskError(f"the model returns {type(out).__name__}, expected tensors", where="model")


def forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One forward pass without gradients, in the mode the model is in, on copies: it may write into its arguments.

    Raises:
        TaskError: the model cannot run on this input.
    """
    named_inputs(model, args, kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except TaskError:
        raise
    except Exception as error:  # the model is the user's code
        if ran_out_of_memory(error):
            raise
        raise TaskError(
            f"the model cannot run on the example: {type(error).__name__}: {error}", where="example_inputs"
        ) from error


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """`inputs/<name>` and `outputs/<name>` of one forward pass."""
    inputs, outputs = named_inputs(model, args, kwargs), named_outputs(forward(model, args, kwargs))
    return {f"inputs/{n}": t for n, t in inputs.items()} | {f"outputs/{n}": t.detach() for n, t in outputs.items()}


def activations(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """(class of the module, its output) by canonical path, in the order of the calls, for one forward pass.

    The second call of a shared module is `path:1`, the third `path:2`.
    """
    seen: dict[str, tuple[str, Tensor]] = {}
    calls: dict[str, int] = {}

    def keep(path: str, module: nn.Module, out: Any) -> None:
        count = calls[path] = calls.get(path, -1) + 1
        if isinstance(out, Tensor) or (isinstance(out, tuple) and out and isinstance(out[0], Tensor)):
            tensor = first_output(out)
            if tensor.is_floating_point():
                seen[f"{path}:{count}" if count else path] = type(module).__name__, tensor.detach().clone()

    handles = [
        module.register_forward_hook(lambda m, _args, out, path=path: keep(path, m, out))
        for path, module in modules(model) if path
    ]  # fmt: skip
    try:
        forward(model, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen
