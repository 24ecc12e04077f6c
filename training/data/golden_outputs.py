"""What the shipped weights answer: golden inputs and outputs, and the output of every module on the way."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.pipeline.errors import TaskError, ran_out_of_memory
from layerline.training.data.loss import first_output
from layerline.training.model.canonical_names import modules

_CALL_ALIKE = "call the arrays of the data (or what example_inputs() gives) as forward() calls its arguments"


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by the names of forward's arguments, then keys and positions (`batch_image`, `args_0`).

    Raises:
        TaskError: the call does not fit forward().
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(signature, args, kwargs, error) from error
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value
        else:
            flat[name] = value
    return dict(_tensors(flat, ()))


def misfit(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError
) -> TaskError:
    """The error for arguments that forward() does not take: both lists of names, and where a name comes from."""
    takes = [n for n in signature.parameters if n != "self"]
    given = [*(f"{len(args)} by position" for _ in args[:1]), *kwargs]
    left = [n for n in takes if n not in kwargs][len(args) :]
    hint = _CALL_ALIKE
    if kwargs and len(left) == 1 and not set(kwargs) & set(takes):
        keys = [k.removeprefix(f"{left[0]}_") for k in kwargs]
        told, called = ", ".join(f"{k!r}: …" for k in keys), ", ".join(f"{left[0]}_{k}" for k in keys)
        hint += (
            f"; where it takes a dict, call them {called}, and let example_inputs() give {{{left[0]!r}: {{{told}}}}}"
        )
    return TaskError(
        f"the example does not fit forward(): {error}; it gives {', '.join(given) or 'nothing'}, "
        f"forward() takes {', '.join(takes) or 'nothing'}",
        where="example_inputs",
        hint=hint,
    )


def named_outputs(out: Any) -> dict[str, Tensor]:
    """The tensors a model returns, by their keys and fields: `output`, `output_0`, `boxes`, `heads_mask`.

    Raises:
        TaskError: there is none.
    """
    fields = isinstance(out, Mapping) or hasattr(out, "_fields") or dataclasses.is_dataclass(out)
    if found := dict(_tensors(out, () if fields else ("output",))):
        return found
    raise TaskError(
        f"the model returns {type(out).__name__}, expected tensors",
        where="model",
        hint="return a tensor, or tensors in tuples, lists, dicts, named tuples or dataclasses",
    )


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree, named as the export stage names it."""
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield "_".join(path), value
    elif isinstance(value, Mapping):
        inside = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, tuple | list):
        inside = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    for key, item in inside:
        yield from _tensors(item, (*path, str(key)))


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
        told, hint = _unnamed(model, kwargs)
        if not hint and torch.uint8 in (t.dtype for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            hint = "the example holds uint8: convert it in the data hooks, or in forward(): x.float() / 255"
        raise TaskError(
            f"the model cannot run on the example: {type(error).__name__}: {error}{told}",
            where="example_inputs",
            hint=hint,
        ) from error


def _unnamed(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[str, str]:
    """Arguments that a forward(**kwargs) lets pass and has no name for, and what to do; both empty where none is."""
    takes = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in takes]
    unknown = [k for k in kwargs if k not in names]
    if not unknown:
        return "", ""
    told = f"; it gives {', '.join(unknown)}, which forward() does not name: it takes {', '.join(names)}"
    return told, _CALL_ALIKE


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
