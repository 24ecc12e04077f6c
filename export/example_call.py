"""Calls a module on flat named arrays. Nested arguments and results get the names that they keep in the ONNX."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerline.backends.base import Array, Feed, check_names
from layerline.compare.arrays import NOT_IN_NUMPY, array, tensor
from layerline.export import kept_state, padded_masks
from layerline.pipeline.errors import ConfigError, StageError, TaskError

_CONSTANTS = (int, float, complex, bool, str)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A module, example arguments, and the names of every tensor that goes in and comes out.

    Attributes:
        module: in eval mode; it has been called once on the example.
        args: positional arguments of the example.
        kwargs: keyword arguments of the example, in the order of forward()'s parameters.
        feed: tensors of the example by input name: the parameter's, then keys and positions below it (`batch_image`).
        fixed: arguments that are numbers or text, by name; they become part of the graph.
        outputs: names of the returned tensors: the names of their fields, or `output`.
        results: the tensors that forward() returned for the example, by output name.
        left_out: returned numbers and text by name; the ONNX has none of them.
        first: a copy made before the first call, which shares the weights; or why the module can't be copied.
        keeps: attributes that the first call changed, by path, each with the module that holds it.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    feed: Mapping[str, Array]
    fixed: Mapping[str, Any]
    outputs: tuple[str, ...]
    results: Mapping[str, Array]
    left_out: Mapping[str, Any]
    first: nn.Module | str
    keeps: Mapping[str, nn.Module]

    @property
    def complex_inputs(self) -> list[str]:
        """Inputs of complex numbers, which the ONNX takes as pairs along a last axis."""
        return [name for name, tensor in self.tensors(self.args, self.kwargs).items() if tensor.is_complex()]

    def arguments(self, feed: Feed) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example's arguments with the tensors of `feed` in their places."""
        names = iter(self.feed)

        def in_place_of(leaf: Tensor) -> Tensor:
            # Memory of its own: the exporter takes two arguments that are the same tensor for one input.
            return tensor(feed[next(names)], complex_pairs=leaf.is_complex())

        example = (self.args, dict(self.kwargs))
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, in_place_of, example)
        return arguments

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        """The tensors among other arguments as arrays, by input name."""
        return {name: array(leaf) for name, leaf in self.tensors(args, kwargs).items()}

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors among other arguments, by input name."""
        _, leaves = _named(self.module, args, kwargs)
        return {name: leaf for name, leaf in leaves if isinstance(leaf, Tensor)}

    def run(self, feed: Feed, module: nn.Module | None = None) -> dict[str, Array]:
        """Outputs of a first call of the module, or another, by output name. Raises whatever forward() raises."""
        args, kwargs = self.arguments(feed)
        if module is None:
            module = self.pristine()
        with torch.no_grad():
            tensors, _ = _leaves(module(*args, **kwargs))
        return {name: array(tensor) for name, (_, tensor) in zip(self.outputs, tensors, strict=True)}

    def pristine(self) -> nn.Module:
        """The module as it was before it was called for the first time, on the same weights."""
        if isinstance(self.first, str) or not self.keeps:
            return self.module
        fresh = kept_state.untouched(self.first)
        if isinstance(fresh, str):
            return self.module
        return fresh

    @contextmanager
    def tensors_alone(self) -> Iterator[None]:
        """Inside, forward() returns only its tensors, as a tuple; a graph has no other outputs."""
        if not self.left_out:
            yield
            return
        forward = self.module.forward
        # Set where forward() was replaced on the instance, and not only defined in the class.
        replacement = vars(self.module).get("forward")

        def tensors_of_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            leaves = pytree.tree_leaves(forward(*args, **kwargs))
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

        tensors_of_forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        self.module.forward = tensors_of_forward
        try:
            yield
        finally:
            if replacement is not None:
                self.module.forward = replacement
            else:
                del self.module.forward

    def shapes(self, axes: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
        """`axes` by input name, in the nesting of forward()'s parameters: the exporter's `dynamic_shapes`."""

        def dynamic(path: Sequence[Any], leaf: Any) -> dict[int, Any] | None:
            # The exporter wants an entry for every leaf, None for what is not dynamic.
            if not isinstance(leaf, Tensor):
                return None
            return dict(axes.get(_name(path), {})) or None

        # The exporter takes shapes by parameter, however the example passes its arguments.
        bound = dict(inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments)
        spec: dict[str, Any] = pytree.tree_map_with_path(dynamic, bound)
        return spec


def call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Calls the module once on example arguments and names what goes in and comes out.

    Raises TaskError where the arguments do not fit or forward() raises, StageError where it returns no tensors.
    """
    method = f"{type(module).__name__}.forward()"
    # Before the first call, which may leave state behind.
    copy = kept_state.untouched(module)
    order, leaves = _named(module, args, kwargs)
    kwargs = {name: kwargs[name] for name in order if name in kwargs}
    feed: dict[str, Array] = {}
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            _refuse_second("input", name, feed)
            # A copy: a forward() that works in place must not change the example.
            feed[name] = _portable(f"input {name}", leaf).copy()
    if not feed:
        raise TaskError(f"the example inputs of {method} hold no tensor", where="example_inputs")
    try:
        with torch.no_grad():
            cloned_args, cloned_kwargs = pytree.tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))
            result = module(*cloned_args, **cloned_kwargs)
    except Exception as error:
        hint = ""
        if any(value.dtype == "float16" for value in feed.values()):
            hint = "parameters are float32 here, as quantize chooses half precision: give float32 inputs as well"
        what = f"{method} raised {type(error).__name__}: {error}"
        raise TaskError(what, where="example_inputs", hint=hint) from error
    tensors, left_out = _leaves(result)
    results: dict[str, Array] = {}
    for name, leaf in tensors:
        # The ONNX has one namespace for inputs and outputs.
        if name in feed:
            name = f"{name}_out"
        _refuse_second("output", name, results)
        results[name] = _portable(f"output {name}", leaf)
    return Call(
        module=module,
        args=tuple(args),
        kwargs=kwargs,
        feed=feed,
        fixed={name: leaf for name, leaf in leaves if isinstance(leaf, _CONSTANTS)},
        outputs=tuple(results),
        results=results,
        left_out=left_out,
        first=copy,
        keeps={} if isinstance(copy, str) else kept_state.changed(copy, module),
    )


class ModuleSession:
    """Runs a module in eval mode; inputs and outputs get their names from the arguments of an example call."""

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._call = call(module, args, kwargs)
        self.inputs = list(self._call.feed)
        self.outputs = list(self._call.outputs)

    def run(self, feed: Feed) -> dict[str, Array]:
        check_names(feed, self.inputs)
        return self._call.run(feed)


def place_of(path: str) -> str:
    """A module in words, by its path; the model itself has the empty one."""
    return f"module {path}" if path else "model"


def refuse_training(module: nn.Module) -> None:
    """Checks that eval() reached every module. Raises StageError for one that is still in training mode."""
    for path, inner in module.named_modules():
        if inner.training:
            what = f"the {type(inner).__name__} is still in training mode after eval()"
            hint = "its train() or eval() is overridden, or it is switched back: let eval() reach it"
            raise StageError(what, where=place_of(path), hint=hint)


def check_range(call: Call, name: str, low: int, high: int) -> None:
    """Checks a declared range of an integer input, or of a mask, where it says what is fed beside the example.

    Raises ConfigError: no such input, not of integers, or the example lies outside.
    """
    where = f"ranges.{name}"
    array = call.feed.get(name)
    if array is None:
        raise ConfigError(f"unknown input {name!r}", where=where, hint=f"the model takes {', '.join(call.feed)}")
    if padded_masks.fits(array, low, high):
        return
    if array.dtype.kind not in "iu":
        raise ConfigError(f"input {name!r} is {array.dtype}: ranges are for integers", where=where)
    # An empty input keeps to any range.
    least, greatest = low, high
    if array.size:
        least, greatest = int(array.min()), int(array.max())
    if low > high or least < low or greatest > high:
        raise ConfigError(f"the range is {low} to {high}; the example holds {least} to {greatest}", where=where)


def _named(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[tuple[str, Any]]]:
    """Argument names in the order of forward()'s parameters, and every leaf of the arguments with its name."""
    _spell_out(module, kwargs)
    try:
        bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        method = f"{type(module).__name__}.forward()"
        raise TaskError(f"the inputs do not fit {method}: {error}", where="example_inputs") from error
    _register(bound)
    leaves_by_path, _ = pytree.tree_flatten_with_path(bound)
    return list(bound), [(_name(path), leaf) for path, leaf in leaves_by_path]


def _leaves(result: Any) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """The tensors of a result with their names, and the numbers and text beside them; None is left out."""
    _register(result)
    tensors: list[tuple[str, Tensor]] = []
    constants: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        # A tensor alone, or one of a tuple, has no field's name to go by.
        named_path: tuple[Any, ...] = path
        if not path or isinstance(path[0], pytree.SequenceKey):
            named_path = ("output", *path)
        name = _name(named_path)
        if isinstance(leaf, Tensor):
            tensors.append((name, leaf))
        elif isinstance(leaf, _CONSTANTS):
            constants[name] = leaf
        elif leaf is not None:
            kind = type(leaf).__name__
            raise StageError(
                f"forward() returns a {kind}, which is not made of tensors",
                where=f"output {name}",
                hint="return tensors in its place: switch it off by an argument (use_cache=False for a cache), or "
                "wrap the model in a module that returns only what is needed",
            )
    if not tensors:
        returned = ", ".join(f"{name} = {value!r}" for name, value in constants.items()) or "None"
        what = f"forward() returns no tensor, only {returned}"
        raise StageError(what, where="model", hint="return the model's results as tensors")
    return tensors, constants


def _portable(what: str, tensor: Tensor) -> Array:
    """A tensor that goes in or out, as an array."""
    kind: Any = None
    if tensor.dtype in NOT_IN_NUMPY or tensor.is_quantized:
        kind = tensor.dtype
    elif tensor.layout is not torch.strided:
        kind = tensor.layout
    if kind is not None:
        refusal = f"a tensor of {str(kind).removeprefix('torch.')} can't be an input or output: numpy lacks this kind"
        hint = "let forward() take and return float32, dense: .float(), .to_dense(); quantize chooses half precision"
        raise StageError(refusal, where=what, hint=hint)
    return array(tensor)


def _refuse_second(what: str, name: str, taken: Mapping[str, Array]) -> None:
    """Refuses a second tensor of one name."""
    if name in taken:
        raise TaskError(
            f"two {what}s would both be called {name!r}: a name joins the parameter (or field), keys and positions "
            "by _",
            where=f"{what} {name}",
            hint=f"rename a key or a parameter, or wrap the model in a module whose {what}s have distinct names",
        )


def _register(tree: Any) -> None:
    """Registers every dataclass in the tree with torch, so that pytree and the exporter see its fields."""
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            _register([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


def _spell_out(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Gives a forward(**kwargs) the parameters it is called with: the exporter has no names for collected ones."""
    signature = inspect.signature(module.forward)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    collects = len(parameters) < len(signature.parameters)
    collected = [name for name in kwargs if name not in signature.parameters]
    if not collects or not collected:
        return
    forward = module.forward

    def spelt_out(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in collected]
    spelt_out.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    module.forward = spelt_out


def _name(path: Sequence[Any]) -> str:
    """Joins the parts of a pytree path: MappingKey has `key`, SequenceKey `idx`, GetAttrKey `name`."""
    parts = []
    for part in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(part, attribute):
                part = getattr(part, attribute)
                break
        parts.append(str(part))
    return "_".join(parts)
