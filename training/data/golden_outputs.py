"""Golden inputs and outputs of the shipped weights, and the output of every module in a forward pass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.pipeline.errors import TaskError, ran_out_of_memory
from layerline.training.data.loss import first_output
from layerline.training.model.canonical_names import first_paths

_CALL_ALIKE = "call the arrays of the data (or what example_inputs() gives) as forward() calls its arguments"


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call, named by forward's arguments, then keys and positions (`batch_image`, `args_0`)."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(signature, args, kwargs, error) from error
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value  # **kwargs of forward(): each has a name of its own
        else:
            flat[name] = value
    return dict(_tensors(flat, ()))


def misfit(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError
) -> TaskError:
    """The error for arguments that forward() does not take; names those of both sides."""
    parameters = [n for n in signature.parameters if n != "self"]
    arguments = [*kwargs]
    if args:
        arguments.insert(0, f"{len(args)} by position")
    unfilled = [n for n in parameters if n not in kwargs][len(args) :]
    hint = _CALL_ALIKE
    surplus = [key for key in kwargs if key not in parameters]
    if surplus and not unfilled:
        # Most likely a target that lies among the inputs under a name that is not taken for one.
        hint += (
            f"; if {surplus[0]} is the target, give it beside the inputs, (inputs, target), or call it label or target"
        )
    if kwargs and len(unfilled) == 1 and not set(kwargs) & set(parameters):
        # Perhaps forward() takes one dict, and the data's arrays are its entries.
        keys = [key.removeprefix(f"{unfilled[0]}_") for key in kwargs]
        flat_names = ", ".join(f"{unfilled[0]}_{key}" for key in keys)
        entries = ", ".join(f"{key!r}: …" for key in keys)
        hint += f"; where it takes a dict, call them {flat_names}, and return {{{unfilled[0]!r}: {{{entries}}}}} "
        hint += "from example_inputs()"
    what = (
        f"the example does not fit forward(): {error}; it gives {', '.join(arguments) or 'nothing'}, "
        f"forward() takes {', '.join(parameters) or 'nothing'}"
    )
    return TaskError(what, where="example_inputs", hint=hint)


def named_outputs(out: Any) -> dict[str, Tensor]:
    """The tensors a model returns, named by keys and fields: `output`, `output_0`, `boxes`, `heads_mask`."""
    path: tuple[str, ...] = ("output",)
    if isinstance(out, Mapping) or hasattr(out, "_fields") or dataclasses.is_dataclass(out):
        path = ()
    tensors = dict(_tensors(out, path))
    if tensors:
        return tensors
    hint = "return a tensor, or tensors in tuples, lists, dicts, named tuples or dataclasses"
    raise TaskError(f"the model returns {type(out).__name__}, expected tensors", where="model", hint=hint)


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree, named as the export stage names it."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield "_".join(path), value
    elif isinstance(value, Mapping):
        entries = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, tuple | list):
        entries = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    for key, item in entries:
        yield from _tensors(item, (*path, str(key)))


def forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One forward pass without gradients, in the model's present mode, on copies of the arguments."""
    named_inputs(model, args, kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except TaskError:
        raise
    except Exception as error:  # the model is the user's code
        if ran_out_of_memory(error):  # no fault of the example
            raise
        what = f"the model cannot run on the example: {type(error).__name__}: {error}"
        hint = ""
        parameters = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        unnamed = [key for key in kwargs if key not in names]  # the **kwargs of forward() take them
        if unnamed:
            what += f"; it gives {', '.join(unnamed)}, which forward() does not name: it takes {', '.join(names)}"
            hint = _CALL_ALIKE
        elif any(t.dtype == torch.uint8 for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            hint = "the example holds uint8: convert it in the data hooks, or in forward(): x.float() / 255"
        raise TaskError(what, where="example_inputs", hint=hint) from error


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """`inputs/<name>` and `outputs/<name>` of one forward pass."""
    inputs = named_inputs(model, args, kwargs)
    outputs = named_outputs(forward(model, args, kwargs))
    tensors = {f"inputs/{name}": tensor for name, tensor in inputs.items()}
    tensors |= {f"outputs/{name}": tensor.detach() for name, tensor in outputs.items()}
    return tensors


def activations(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """(class of the module, its output) by canonical path, in the order of the calls, for one forward pass. A shared
    module has its first path; its second call is `path:1`, the third `path:2`."""
    outputs: dict[str, tuple[str, Tensor]] = {}
    calls: dict[str, int] = {}

    def record_output(path: str, module: nn.Module, _: Any, out: Any) -> None:
        count = calls.get(path, 0)
        calls[path] = count + 1
        if isinstance(out, Tensor) or (isinstance(out, tuple) and out and isinstance(out[0], Tensor)):
            tensor = first_output(out)
            if tensor.is_nested:
                # nn.TransformerEncoder hands these to its layers where src_key_padding_mask hides the ends of samples.
                tensor = tensor.to_padded_tensor(0.0)
            if tensor.is_floating_point():
                key = f"{path}:{count}".removesuffix(":0")
                outputs[key] = type(module).__name__, tensor.detach().clone()

    with ExitStack() as hooks:
        for module, path in first_paths(model).items():
            if path:  # the model itself has none
                hooks.enter_context(module.register_forward_hook(partial(record_output, path)))
        forward(model, args, kwargs)
    return outputs
