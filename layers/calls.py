"""How a module is called, as flat named arrays: nested arguments and results get the names they keep in the ONNX."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.backends.base import Array, Feed
from layerline.pipeline.errors import ConfigError, StageError, TaskError

_CONSTANTS = (int, float, complex, bool, str)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A module, example arguments, and the names of every tensor that goes in and comes out.

    Attributes:
        args: positional arguments of the example.
        kwargs: keyword arguments of the example, in the order of forward()'s parameters.
        feed: the example's tensors by input name: the parameter's, then keys and positions below it (`batch_image`).
        fixed: arguments that are numbers or text, by name; they become part of the graph.
        outputs: names of the tensors that come out: the fields' names, or `output`.
        results: what came out for the example.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    feed: Mapping[str, Array]
    fixed: Mapping[str, Any]
    outputs: tuple[str, ...]
    results: Mapping[str, Array]

    def arguments(self, feed: Feed) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example's arguments with the tensors of `feed` in their places."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        # Each its own memory: the exporter takes two arguments that are the same tensor for one input.
        tensors = iter([torch.from_numpy(np.array(feed[n])) for n in self.feed])
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            [next(tensors) if isinstance(v, Tensor) else v for v in leaves], spec
        )
        return found

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        """The tensors of another call, by input name."""
        return {n: v.detach().cpu().numpy() for n, v in _named(self.module, args, kwargs)[1] if isinstance(v, Tensor)}

    def run(self, feed: Feed) -> dict[str, Array]:
        """What the module itself gives, by output name; raises whatever it raises."""
        args, kwargs = self.arguments(feed)
        with torch.no_grad():
            found = _tensors(self.module(*args, **kwargs))
        return dict(zip(self.outputs, (v.numpy() for _, v in found), strict=True))

    def shapes(self, axes: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
        """`axes` by input name in the nesting of forward()'s parameters, as the exporter wants its dynamic shapes."""
        bound = dict(inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments)
        spec: dict[str, Any] = pytree.tree_map_with_path(
            lambda path, leaf: dict(axes.get(_name(path), {})) or None if isinstance(leaf, Tensor) else None,
            bound,
        )
        return spec


def call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Calls the module once on example arguments and names what goes in and comes out.

    Raises:
        TaskError: the arguments do not fit forward(), or forward() raises on them.
        StageError: something comes out that is not made of tensors; names it.
    """
    who = f"{type(module).__name__}.forward()"
    order, named = _named(module, args, kwargs)
    kwargs = {k: kwargs[k] for k in order if k in kwargs}
    # Copies: a forward() that works in place must not change what it was given.
    feed = {n: v.detach().cpu().numpy().copy() for n, v in named if isinstance(v, Tensor)}
    if not feed:
        raise TaskError(f"the example inputs of {who} hold no tensor", where="example_inputs")
    try:
        with torch.no_grad():
            given, named_args = pytree.tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))
            result = module(*given, **named_args)
    except Exception as error:
        raise TaskError(f"{who} raised {type(error).__name__}: {error}", where="example_inputs") from error
    results = {f"{n}_out" if n in feed else n: v.numpy() for n, v in _tensors(result)}
    fixed = {n: v for n, v in named if isinstance(v, _CONSTANTS)}
    outputs = tuple(results)
    return Call(
        module=module, args=tuple(args), kwargs=kwargs, feed=feed, fixed=fixed, outputs=outputs, results=results
    )


def refuse_training(module: nn.Module) -> None:
    """Names what eval() does not reach.

    Raises:
        StageError: a module (a BatchNorm, a Dropout) that is still in training mode.
    """
    for path, inner in module.named_modules():
        if inner.training:
            raise StageError(
                f"the {type(inner).__name__} is still in training mode after eval()",
                where=f"module {path}" if path else "model",
                hint="its train() or eval() is overridden, or it is switched back: let eval() reach it",
            )


def check_range(call: Call, name: str, low: int, high: int) -> None:
    """Checks a declared range of an integer input.

    Raises:
        ConfigError: no such input, not of integers, or the example lies outside.
    """
    where, array = f"ranges.{name}", call.feed.get(name)
    if array is None:
        raise ConfigError(f"unknown input {name!r}", where=where, hint=f"the model takes {', '.join(call.feed)}")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"input {name!r} is {array.dtype}: ranges are for integers", where=where)
    seen = (int(array.min()), int(array.max())) if array.size else (low, high)
    if low > high or seen[0] < low or seen[1] > high:
        raise ConfigError(f"the range is {low} to {high}; the example holds {seen[0]} to {seen[1]}", where=where)


def _named(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[tuple[str, Any]]]:
    """Argument names in the order of forward()'s parameters, and every leaf of the arguments with its name."""
    _spell_out(module, kwargs)
    try:
        bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        who = f"{type(module).__name__}.forward()"
        raise TaskError(f"the inputs do not fit {who}: {error}", where="example_inputs") from error
    _register(bound)
    return list(bound), [(_name(path), leaf) for path, leaf in pytree.tree_flatten_with_path(bound)[0]]


def _tensors(result: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a result with their names; None and plain numbers are left out."""
    _register(result)
    found = []
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        name = _name(path) if path and not isinstance(path[0], pytree.SequenceKey) else _name(("output", *path))
        if isinstance(leaf, Tensor):
            found.append((name, leaf))
        elif leaf is not None and not isinstance(leaf, _CONSTANTS):
            kind = type(leaf).__name__
            raise StageError(
                f"forward() returns a {kind}, which is not made of tensors",
                where=f"output {name}",
                hint="return tensors in its place: switch it off by an argument (use_cache=False for a cache), or "
                "wrap the model in a module that returns only what is needed",
            )
    return found


def _register(tree: Any) -> None:
    """Makes every dataclass in the tree a node of it, so that its fields are seen, here and by the exporter."""
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            _register([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


def _spell_out(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Spells out what a forward(**kwargs) is called with: the exporter has no names for what they collect."""
    given = inspect.signature(module.forward)
    named = [p for p in given.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    further = [k for k in kwargs if k not in given.parameters]
    if len(named) < len(given.parameters) and further:
        forward = module.forward

        def spelt_out(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        named += [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in further]
        spelt_out.__signature__ = given.replace(parameters=named)  # type: ignore[attr-defined]
        module.forward = spelt_out


def _name(path: Sequence[Any]) -> str:
    return "_".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
