"""What a data hook returns, and what one batch of it means: the same for training, calibration, parity and evaluation.

A source has one of three forms:

- columns: an array, or a tuple or dict of arrays (nested too) whose first axis counts samples;
- samples: a map-style Dataset;
- batches: a list of batches, a DataLoader, anything else that can be iterated.

A batch, and a sample, is an array, a tuple with the target last, or a dict by input name with the target under one of
LABELS. Inputs may be nested: `((a, b), y)` has the inputs a and b. A list of numbers inside a batch is an array.
torch is not imported: a tensor is recognised by its `detach`, an array by its shape and dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

from layerline.pipeline.errors import TaskError
from layerline.pipeline.outline import dtype_name, is_array, outlined

# Keys under which a batch that is a dict holds the answer; every other key is an input of the model.
LABELS = ("label", "labels", "target", "targets")
SLICE = "slice"
"""The key, in a dict, of the part of the data that each sample belongs to. It is no input, unless the model has one of
that name."""
Form = Literal["columns", "samples", "batches"]
_LOOKED_AT = 64
"""So many items of a list are compared to decide whether they are batches."""
_COLUMNS = "columns are a tuple (x, y), ((a, b), y) or a dict by input name; batches are a list [(x, y), …]"


def form(source: Any, hook: str) -> Form:
    """Which of the three forms a data hook returned. Raises TaskError: none of them, or it could mean two things."""
    if is_array(source) or isinstance(source, tuple | Mapping):
        _check_columns(source, hook)
        return "columns"
    # By name: torch must not be imported to look at data.
    classes = {cls.__name__ for cls in type(source).__mro__}
    if "IterableDataset" in classes:
        hint = "give a DataLoader of it: DataLoader(dataset, batch_size=64)"
        raise _wrong(hook, "an IterableDataset, whose items are samples, not batches", hint)
    if isinstance(source, list):
        _check_list(source, hook)
        return "batches"
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, str | bytes):
        _refuse_none(source, hook)
        return "samples"
    if "Dataset" in classes:
        hint = "give a map-style Dataset with __len__, or batches that can be iterated again"
        raise _wrong(hook, "a dataset without a length", hint)
    if hasattr(source, "__iter__") and not isinstance(source, str | bytes):
        if hasattr(source, "__len__"):
            _refuse_none(source, hook)
        return "batches"
    raise _wrong(hook, f"{type(source).__name__}, expected columns, a Dataset or batches", _COLUMNS)


def split(batch: Any, forward: Callable[..., Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional arguments, keyword arguments, target) of one batch or sample; target is None where there is none.

    The last item is the target unless `forward` can't be called without it, and nested inputs are spread unless it
    takes them whole.
    """
    if isinstance(batch, Mapping):
        label = answers(batch)
        keywords = {k: v for k, v in batch.items() if k != label}
        if SLICE in keywords and (forward is None or not _fits(forward, ((), keywords, None))):
            del keywords[SLICE]
        return (), keywords, batch.get(label)
    if is_array(batch):
        return (batch,), {}, None
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or not batch:
        raise TaskError(f"a batch is {type(batch).__name__}, expected (x, y) or a dict by input name", where="batch")
    # forward() decides what the last item is; where several readings fit its signature, the first is the usual one.
    readings = list(_readings(list(batch)))
    fitting = [reading for reading in readings if forward is None or _fits(forward, reading)]
    return (fitting or readings)[0]


def described(batch: Any) -> str:
    """What a batch holds, in words: `a batch x (64, 1, 8, 8) float32, y (64,) int64`."""
    try:
        args, kwargs, target = split(batch)
    except TaskError:
        return f"a batch {_kind(batch)}"
    named = {f"x{i}" if len(args) > 1 else "x": value for i, value in enumerate(args)} | kwargs
    parts = [f"{name} {_kind(value)}" for name, value in named.items()]
    if target is not None:
        parts.append(f"y {_kind(target)}")
    return f"a batch {', '.join(parts)}"


def leaves(tree: Any) -> Iterator[Any]:
    """What a tree of tuples, lists and mappings holds, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with `change` applied to its leaves; lists and tuples become tuples, mappings dicts."""
    if isinstance(tree, Mapping):
        return {k: mapped(v, change) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(mapped(v, change) for v in tree)
    return change(tree)


def with_arrays(batch: Any) -> Any:
    """A batch, a sample or columns, where each list of numbers inside is an array."""
    if isinstance(batch, Mapping):
        return {k: _numbers(v) for k, v in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_numbers(v) for v in batch)
    return batch


def collate(samples: Sequence[Any], stack: Callable[[list[Any]], Any]) -> Any:
    """Samples as one batch, as torch's default_collate makes it; `stack` joins leaves. ValueError or KeyError."""
    first = samples[0]
    if isinstance(first, Mapping):
        collated = {}
        for name in first:
            collated[name] = collate([sample[name] for sample in samples], stack)
        return collated
    if isinstance(first, tuple | list):
        return tuple(collate(list(part), stack) for part in zip(*samples, strict=True))
    return stack(list(samples))


def answers(names: Collection[str], inputs: Collection[str] = ()) -> str:
    """The first of LABELS among the names of arrays that is none of the model's inputs; empty where there is none."""
    for name in LABELS:
        if name in names and name not in inputs:
            return name
    return ""


def rows(tree: Any) -> int:
    """Samples in a batch or in columns: the first dimension of the first array that has one; 1 where none has."""
    for leaf in leaves(tree):
        if is_array(leaf) and len(leaf.shape):
            return int(leaf.shape[0])
    return 1


def _readings(items: list[Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """What a tuple may mean, the most likely first: with a target or without, nested inputs spread or whole."""
    options: list[tuple[list[Any], Any]] = [(items, None)]
    if len(items) > 1:
        options.insert(0, (items[:-1], items[-1]))
    for inputs, target in options:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            yield (), {str(k): v for k, v in inputs[0].items()}, target
        else:
            spread: list[Any] = []
            for value in inputs:
                if isinstance(value, tuple | list):
                    spread += leaves(value)
                else:
                    spread.append(value)
            yield tuple(spread), {}, target
        yield tuple(inputs), {}, target


def _fits(forward: Callable[..., Any], reading: tuple[tuple[Any, ...], dict[str, Any], Any]) -> bool:
    args, kwargs, _ = reading
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # ValueError: a function without a signature
        return False
    return True


def _numbers(value: Any) -> Any:
    """A part of a batch, where each list of numbers is an array; lists become tuples, a namedtuple keeps its type."""
    if isinstance(value, list):
        array = _as_numbers(value)
        if array is not None:
            return array
    if isinstance(value, Mapping):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        parts = [_numbers(v) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return tuple(parts)
    return value


def _as_numbers(values: list[Any]) -> Any:
    """A list of plain numbers, nested or not, as an array; None where it is something else."""
    import numpy as np  # here, since planning imports this module and needs no array

    first: Any = values
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, bool | int | float):
        return None
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # rows of different lengths, or integers beyond 64 bits
        return None
    if array.dtype.kind not in "biuf":
        return None
    return array


def _check_columns(source: Any, hook: str) -> None:
    columns = with_arrays(source)
    arrays = list(leaves(columns))
    _refuse_none(arrays, hook)
    for value in arrays:
        if not is_array(value):
            what = f"a {type(source).__name__} that holds a value of type {type(value).__name__}: {outlined(source)}"
            expected = "expected arrays or tensors whose first axis counts samples"
            raise _wrong(hook, f"{what}, {expected}", f"{_COLUMNS}; of several loaders give one")
    lengths = [int(v.shape[0]) for v in arrays if len(v.shape)]
    if not lengths:
        raise _wrong(hook, f"numbers alone, {outlined(columns)}, expected a first axis of samples")
    # Arrays without axes are single numbers, the same for every sample.
    if len(set(lengths)) > 1:
        what = f"the columns of {hook}() differ in length: lengths {lengths} of {outlined(columns)}"
        raise TaskError(what, where=hook, hint=f"the first axis counts samples; {_COLUMNS}")
    _refuse_none(range(lengths[0]), hook)
    # ((a, b), (c, d)) of equal shapes may be two batches, or inputs and targets: too likely a mistake to guess.
    is_nested = isinstance(columns, tuple) and all(isinstance(part, tuple | Mapping) for part in columns)
    if is_nested and len(columns) > 1 and len({_pattern(part, sizes=True) for part in columns}) == 1:
        what = f"a tuple of {len(columns)} parts that look alike, {outlined(columns)}"
        hint = "batches are a list [(x, y), …]; for nested columns give a dict by input name, targets under 'label'"
        raise _wrong(hook, f"{what}: they could be batches, or nested inputs and targets", hint)


def _check_list(source: list[Any], hook: str) -> None:
    _refuse_none(source, hook)
    # A list of thousands of batches is not gone through for this.
    items = [with_arrays(item) for item in source[:_LOOKED_AT]]
    first, last = items[0], items[-1]
    different = [item for item in items if _pattern(item) != _pattern(first)]
    # Two arrays of equally many rows and otherwise of different shape are x and y.
    is_pair = len(source) == 2 and all(is_array(item) and len(item.shape) for item in items)
    if is_pair and first.shape[0] == last.shape[0] and first.shape != last.shape:
        different.append(last)
    if different:
        what = f"a list whose items differ: {outlined(first)} and {outlined(different[0])}"
        hint = f"for columns give a tuple; {_COLUMNS}"
        raise _wrong(hook, f"{what}; a list counts as batches, all of one form", hint)
    if _is_sample(first):
        what = f"a list whose items look like single samples: {outlined(first)}; a list counts as batches"
        raise _wrong(hook, what, "give DataLoader(samples, batch_size=64), a Dataset, or stacked arrays (x, y)")


def _is_sample(item: Any) -> bool:
    """Whether an item of a list is one sample: arrays as inputs, and a single number as the answer."""
    if not isinstance(item, tuple | Mapping) or not item:
        return False
    args, kwargs, target = split(item)
    inputs = list(leaves((args, kwargs)))
    is_scalar_array = is_array(target) and not len(getattr(target, "shape", ()))
    if not (is_scalar_array or isinstance(target, bool | int | float)):
        return False
    return bool(inputs) and all(is_array(v) and len(v.shape) for v in inputs)


def _pattern(tree: Any, *, sizes: bool = False) -> Any:
    """Structure, kinds of numbers and ranks of a tree; with `sizes` also keys, and all dimensions but the first."""
    if isinstance(tree, Mapping):
        if not sizes:
            return "dict"
        return "dict", tuple((k, _pattern(v, sizes=sizes)) for k, v in tree.items())
    if isinstance(tree, tuple | list):
        return ("tuple", *(_pattern(v, sizes=sizes) for v in tree))
    if is_array(tree):
        # float, int or complex, whatever its width: batches may differ in that.
        kind = "".join(c for c in dtype_name(tree) if c.isalpha()).removeprefix("u").removeprefix("b")
        return kind, tuple(tree.shape[1:]) if sizes else len(tree.shape)
    return type(tree).__name__


def _kind(value: Any) -> str:
    if is_array(value):
        return f"{tuple(value.shape)} {dtype_name(value)}"
    if isinstance(value, tuple | Mapping):
        return outlined(value)
    return f"of type {type(value).__name__}"


def _wrong(hook: str, what: str, hint: str = "") -> TaskError:
    return TaskError(f"{hook}() gave {what}", where=hook, hint=hint)


def _refuse_none(samples: Sized, hook: str) -> None:
    if not len(samples):
        raise _wrong(hook, "no samples", "give at least one")
