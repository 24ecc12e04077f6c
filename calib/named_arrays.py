"""Arrays by the names of a model's inputs, from a batch, a sample or columns as a task's data hook gives them.

pipeline/inputs/batches.py says which forms are accepted and what they mean. Tensors are recognised by their `detach`,
so that torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from layerline.pipeline.errors import TaskError, first_line
from layerline.pipeline.inputs.batches import SLICE, answers, leaves, mapped, with_arrays
from layerline.pipeline.inputs.input_checks import checked_cast
from layerline.pipeline.outline import is_array, outlined

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]


class Input(Protocol):
    """One input of the model: its name, numpy's name of its type, and its shape (symbolic sizes by name)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int | str, ...]: ...


@dataclass(frozen=True, eq=False)
class NamedArrays:
    """Arrays by input name, the target and the slices; None where there are none."""

    feed: dict[str, Array]
    target: Any = None
    slices: Array | None = None

    def select(self, rows: Positions) -> NamedArrays:
        """Some rows; an array without axes stays as it is, for all of them."""

        def chosen(array: Array | None) -> Array | None:
            if array is None or not array.ndim:
                return array
            picked: Array = array[rows]
            return picked

        return NamedArrays(*mapped((self.feed, self.target, self.slices), chosen))


def named(raw: Any, inputs: Sequence[Input], hook: str) -> NamedArrays:
    """A batch, a sample or columns, each array under the name of its input.

    Raises:
        TaskError: the names or the number of the arrays are not those of the inputs.
    """
    raw = with_arrays(raw)
    if isinstance(raw, Mapping):
        return _from_mapping(raw, inputs, hook)
    items = [raw]
    if isinstance(raw, tuple | list):
        items = list(raw)
    # (inputs, target) with the inputs as a dict by name, as loaders of tokenised text give it.
    if items and len(items) <= 2 and isinstance(items[0], Mapping):
        target = None
        if len(items) == 2 and items[1] is not None:
            target = target_arrays(items[1])
        return NamedArrays(_by_name(items[0], inputs, hook), target)
    # A tuple holds the inputs alone or, where that is one array too many, the inputs and the target.
    for count in (len(items), len(items) - 1):
        arrays = list(leaves(items[:count]))
        if len(arrays) == len(inputs):
            feed = {declared.name: as_array(array) for declared, array in zip(inputs, arrays, strict=True)}
            target = None
            if count < len(items) and items[count] is not None:
                target = target_arrays(items[count])
            return NamedArrays(feed, target)
    names_in_order = [declared.name for declared in inputs]
    raise TaskError(
        f"{hook}() gives {len(list(leaves(items)))} arrays a batch, {outlined(raw)}; "
        f"the model takes {len(inputs)}: {', '.join(names_in_order)}",
        where=hook,
        hint="give the inputs in this order, then optionally the target, or a dict by input name",
    )


def _from_mapping(raw: Mapping[Any, Any], inputs: Sequence[Input], hook: str) -> NamedArrays:
    # A key that the model has an input of is that input, whatever else it may mean.
    input_names = {declared.name for declared in inputs}
    label = answers([str(key) for key in raw], input_names)
    others = {label, SLICE} - input_names
    target, slices = None, None
    if label and raw[label] is not None:
        target = target_arrays(raw[label])
    if SLICE in others and SLICE in raw:
        slices = as_array(raw[SLICE])
    # What is left is an input, or a mistake that _by_name() names.
    feed = {key: value for key, value in raw.items() if str(key) not in others}
    return NamedArrays(_by_name(feed, inputs, hook), target, slices)


def _by_name(raw: Mapping[Any, Any], inputs: Sequence[Input], hook: str) -> dict[str, Array]:
    names = [declared.name for declared in inputs]
    prefix = _dict_prefix([str(key) for key in raw], names)
    feed = {f"{prefix}{key}": as_array(value) for key, value in raw.items()}
    unknown = sorted(set(feed) - set(names))
    missing = sorted(set(names) - set(feed))
    if not unknown and not missing:
        return feed
    # An unknown name first: where both are wrong, it is mostly the missing one with a slip.
    what = f"unknown input {unknown[0]!r}" if unknown else f"input {missing[0]!r} is missing"
    hint = f"the model takes {', '.join(sorted(names))}; a target goes under 'label'"
    raise TaskError(what, where=hook, hint=hint)


def _dict_prefix(keys: Sequence[str], names: Sequence[str]) -> str:
    """What the exporter puts before the keys of a dict that forward() takes whole: its parameter's name."""
    prefixes = set[str]()
    for name in names:
        for key in keys:
            if name != key and name.endswith(f"_{key}"):
                prefixes.add(name.removesuffix(key))
    # One prefix has to explain all names: a dict that holds only some of the inputs has none.
    for prefix in sorted(prefixes):
        if {prefix + key for key in keys} == set(names):
            return prefix
    return ""


def as_array(value: Any) -> Array:
    """Converts numbers in any container to an array; tensors are detached and copied to the CPU."""
    if hasattr(value, "detach"):
        try:
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":
                value = value.float()  # numpy has no bfloat16; float32 holds all its values
            value = value.numpy()
        except (TypeError, RuntimeError) as error:  # a sparse, nested or quantized tensor, or one without data
            raise TaskError(
                f"a tensor in the data cannot become an array: {first_line(str(error))}",
                hint="give plain tensors with data: .to_dense() of a sparse one, .dequantize() of a quantized one",
            ) from error
    return np.asarray(value)


def target_arrays(target: Any) -> Any:
    """Converts a target to arrays. Tuples and dicts stay; a list of numbers becomes one array."""
    if isinstance(target, Mapping):
        return {key: target_arrays(value) for key, value in target.items()}
    # A list of arrays holds one target for each output; numpy would stack them, or fail where their shapes differ.
    is_nested = isinstance(target, list) and any(is_array(v) or isinstance(v, Mapping | tuple) for v in target)
    if isinstance(target, tuple) or is_nested:
        return tuple(target_arrays(value) for value in target)
    return as_array(target)


def samples_in(feed: Mapping[str, Array], inputs: Sequence[Input]) -> int:
    """Samples of a batch: the first dimension of the first input that has one."""
    for declared in inputs:
        array = feed[declared.name]
        if declared.shape and array.ndim:
            return int(array.shape[0])
    return 1


def as_declared(array: Array, declared: Input, hook: str, where: str, numbers: Sequence[int] | None = None) -> Array:
    """An array in the model's type.

    Args:
        where: the batch, for messages.
        numbers: its samples' places in the whole data, where it is a part of it.

    Raises:
        TaskError: its shape or kind is not the model's.
        ConfigError: names the first number that the model's type does not hold.
    """
    fits = array.ndim == len(declared.shape)
    for size, actual in zip(declared.shape, array.shape, strict=False):
        # A size that is a name takes any number; its bounds are checked where the model is run.
        if not isinstance(size, str) and size != actual:
            fits = False
    if not fits:
        raise TaskError(
            f"{hook}() gives shape {array.shape}; the model takes ({', '.join(map(str, declared.shape))})",
            where=f"{hook}: {declared.name}",
        )
    if declared.dtype == "bfloat16":
        raise TaskError("bfloat16 inputs cannot be fed from numpy", hint="export with float32 inputs")
    dtype = np.dtype(declared.dtype)
    # Types of one kind: whether each number fits, the cast checks.
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TaskError(
            f"{hook}() gives {array.dtype}; the model takes {declared.dtype}", where=f"{hook}: {declared.name}"
        )
    return np.ascontiguousarray(checked_cast(array, dtype, declared.name, where, numbers))
