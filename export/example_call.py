"""How a module is called, as flat named arrays: nested arguments and results get the names they keep in the ONNX."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.backends.base import Array, Feed
from layerline.compare.arrays import NOT_IN_NUMPY, array, tensor
from layerline.export import kept_state, padded_masks
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
        left_out: numbers and text among what came out, by name; the ONNX has none of them.
        first: the module as it was before it was called, on the same weights; None where it can't be copied.
        unwatched: why it can't.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    feed: Mapping[str, Array]
    fixed: Mapping[str, Any]
    outputs: tuple[str, ...]
    results: Mapping[str, Array]
    left_out: Mapping[str, Any]
    first: nn.Module | None
    unwatched: str
    keeps: Mapping[str, nn.Module]

    @property
    def complex_inputs(self) -> list[str]:
        """Inputs of complex numbers, which the ONNX takes as pairs along a last axis."""
        leaves = (v for v in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(v, Tensor))
        return [n for n, v in zip(self.feed, leaves, strict=True) if v.is_complex()]

    def arguments(self, feed: Feed) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example's arguments with the tensors of `feed` in their places."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        # Each its own memory: the exporter takes two arguments that are the same tensor for one input.
        arrays = iter([feed[n] for n in self.feed])
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            [tensor(next(arrays), complex_pairs=v.is_complex()) if isinstance(v, Tensor) else v for v in leaves], spec
        )
        return found

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        """The tensors of another call, by input name."""
        return {n: array(v) for n, v in _named(self.module, args, kwargs)[1] if isinstance(v, Tensor)}

    def run(self, feed: Feed, module: nn.Module | None = None) -> dict[str, Array]:
        """What the module itself gives when it is called for the first time, by output name; raises whatever it raises.

        Args:
            module: runs instead of it.
        """
        args, kwargs = self.arguments(feed)
        with torch.no_grad():
            found = _leaves((module or self.pristine())(*args, **kwargs))[0]
        return dict(zip(self.outputs, (array(v) for _, v in found), strict=True))

    def pristine(self) -> nn.Module:
        """The module as it was before it was called for the first time, on the same weights."""
        fresh = kept_state.untouched(self.first) if self.keeps and self.first is not None else self.module
        return fresh if isinstance(fresh, nn.Module) else self.module

    def warm(self) -> nn.Module:
        """Another copy of the module, called once on the example."""
        module = self.pristine()
        self.run(self.feed, module)
        return module

    def changes(self) -> dict[str, nn.Module]:
        """Attributes that calls have changed so far, by path, with the module that holds each."""
        return {**self.keeps, **(kept_state.changed(self.first, self.module) if self.first is not None else {})}

    @contextmanager
    def tensors_alone(self) -> Iterator[None]:
        """Inside, forward() gives its tensors as a tuple, if it gives anything else: a graph has no other outputs."""
        own, forward = vars(self.module).get("forward"), self.module.forward
        if not self.left_out:
            yield
            return

        def alone(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return tuple(v for v in pytree.tree_leaves(forward(*args, **kwargs)) if isinstance(v, Tensor))

        alone.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        self.module.forward = alone
        try:
            yield
        finally:
            if own is not None:
                self.module.forward = own
            else:
                del self.module.forward

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
        TaskError: the arguments do not fit forward(), two have one name, or forward() raises on them.
        StageError: something comes out that is not made of tensors, or nothing; names it.
    """
    who, first = f"{type(module).__name__}.forward()", kept_state.untouched(module)
    order, named = _named(module, args, kwargs)
    kwargs = {k: kwargs[k] for k in order if k in kwargs}
    # Copies: a forward() that works in place must not change what it was given.
    feed = {n: _portable(f"input {n}", v).copy() for n, v in named if isinstance(v, Tensor)}
    if not feed:
        raise TaskError(f"the example inputs of {who} hold no tensor", where="example_inputs")
    try:
        with torch.no_grad():
            given, named_args = pytree.tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))
            result = module(*given, **named_args)
    except Exception as error:
        raise TaskError(f"{who} raised {type(error).__name__}: {error}", where="example_inputs") from error
    tensors, left_out = _leaves(result)
    outgoing = [(f"{n}_out" if n in feed else n, v) for n, v in tensors]
    _distinct("output", [n for n, _ in outgoing])
    results = {n: _portable(f"output {n}", v) for n, v in outgoing}
    return Call(
        module=module,
        args=tuple(args),
        kwargs=kwargs,
        feed=feed,
        fixed={n: v for n, v in named if isinstance(v, _CONSTANTS)},
        outputs=tuple(results),
        results=results,
        left_out=left_out,
        first=first if isinstance(first, nn.Module) else None,
        unwatched="" if isinstance(first, nn.Module) else first,
        keeps=kept_state.changed(first, module) if isinstance(first, nn.Module) else {},
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
    """Checks a declared range of an integer input, or of a mask, where the range says what is fed beside the example.

    Raises:
        ConfigError: no such input, not of integers, or the example lies outside.
    """
    where, array = f"ranges.{name}", call.feed.get(name)
    if array is None:
        raise ConfigError(f"unknown input {name!r}", where=where, hint=f"the model takes {', '.join(call.feed)}")
    if padded_masks.fits(array, low, high):
        return
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
    named = [(_name(path), leaf) for path, leaf in pytree.tree_flatten_with_path(bound)[0]]
    _distinct("input", [n for n, leaf in named if isinstance(leaf, Tensor)])
    return list(bound), named


def _leaves(result: Any) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """The tensors of a result with their names, and the numbers and text beside them; None is left out.

    Raises:
        StageError: something else, or no tensor.
    """
    _register(result)
    found, numbers = list[tuple[str, Tensor]](), dict[str, Any]()
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        name = _name(path) if path and not isinstance(path[0], pytree.SequenceKey) else _name(("output", *path))
        if isinstance(leaf, Tensor):
            found.append((name, leaf))
        elif isinstance(leaf, _CONSTANTS):
            numbers[name] = leaf
        elif leaf is not None:
            kind = type(leaf).__name__
            raise StageError(
                f"forward() returns a {kind}, which is not made of tensors",
                where=f"output {name}",
                hint="return tensors in its place: switch it off by an argument (use_cache=False for a cache), or "
                "wrap the model in a module that returns only what is needed",
            )
    if not found:
        told = ", ".join(f"{n} = {v!r}" for n, v in numbers.items()) or "None"
        raise StageError(
            f"forward() returns no tensor, but {told}", where="model", hint="return what is to be computed, as tensors"
        )
    return found, numbers


def _portable(what: str, tensor: Tensor) -> Array:
    """A tensor on its way in or out, as an array.

    Raises:
        StageError: no runtime takes or gives such tensors.
    """
    kind = str(tensor.dtype).removeprefix("torch.") if tensor.dtype in NOT_IN_NUMPY or tensor.is_quantized else ""
    kind = kind or ("" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch."))
    if kind:
        raise StageError(
            f"a tensor of {kind} can't go in or out: neither numpy nor onnxruntime's own interface has such",
            where=what,
            hint="let forward() take and return float32, dense: .float(), .to_dense(); quantize chooses half precision",
        )
    return array(tensor)


def _distinct(what: str, names: Sequence[str]) -> None:
    """Refuses tensors that would go by one name."""
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        raise TaskError(
            f"two {what}s would both be called {twice[0]!r}: names are the parameters' (or fields'), then keys and "
            f"positions, joined by _",
            where=f"{what} {twice[0]}",
            hint=f"rename a key or a parameter, or wrap the model in a module whose {what}s have names of their own",
        )


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
