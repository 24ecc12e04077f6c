"""State as data: any nest of containers, numbers and tensors as one JSON text and one flat table of tensors.

Nothing is pickled. A class is looked up among those that this process has loaded, never imported, and only tensor
subclasses, enumerations, named tuples and the plain objects that the caller names are made again.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerline.pipeline.errors import StageError

Tensors = dict[str, Tensor]
Classes = Mapping[str, type]
_Held = tuple[dict[str, Any], Tensor, str]  # the node of a tensor, itself, and its name in the table
_TAG = "$"
_SEQUENCES: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_FACTORIES: Mapping[Any, str] = {dict: "dict", list: "list", set: "set", int: "int", float: "float"}
_DICTS: Mapping[str, type] = {"ordered": OrderedDict, "counter": Counter}
_MAPPINGS: Mapping[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": lambda pairs: Counter(dict(pairs))} | {
    f"default {name}": partial(defaultdict, factory) for factory, name in _FACTORIES.items()
}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def pack(tree: Any, prefix: str, tensors: Tensors, classes: Classes | None = None) -> Any:
    """JSON for `tree`; its tensors go to `tensors` under `prefix/path/in/the/tree`, one that occurs twice once.

    Args:
        classes: plain objects of these are taken apart into their attributes.

    Raises:
        StageError: a value that is no data; names its path.
    """
    try:
        return _Packer(tensors, classes or {}).node(tree, prefix)
    except RecursionError as error:
        raise StageError("it is nested too deeply, or holds itself", where=prefix) from error


def unpack(node: Any, prefix: str, tensors: Mapping[str, Tensor], classes: Classes | None = None) -> Any:
    """The tree that was packed under `prefix`; its tensors are those of `tensors`, not copies.

    Raises:
        KeyError: a tensor is missing.
        StageError: a class that this process has not loaded, or a node that `pack` does not write.
    """
    try:
        return _Reader(tensors, classes or {}).tree(node, prefix)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise StageError(f"damaged, or written by another version: {error}", where=prefix) from error


def is_compound(value: Any) -> bool:
    """Whether it is a tensor made of others by torch's protocol for subclasses; one split over ranks is not meant."""
    own = isinstance(value, Tensor) and type(value) not in _PLAIN and not hasattr(value, "full_tensor")
    return own and hasattr(value, "__tensor_flatten__")


class _Reader:
    """What `pack` writes, read back."""

    def __init__(self, tensors: Mapping[str, Tensor], classes: Classes) -> None:
        self._tensors, self._classes = tensors, classes

    def tree(self, node: Any, at: str) -> Any:
        if isinstance(node, list):
            return [self.tree(v, f"{at}/{i}") for i, v in enumerate(node)]
        if not isinstance(node, dict):
            return node
        kind = node.get(_TAG)
        if kind is None:
            return {k: self.tree(v, f"{at}/{k}") for k, v in node.items()}
        if kind in _VALUES:
            return _VALUES[kind](node)
        if kind in _TENSORS:
            tensor = self._tensors[node.get("at", at)]
            return _TENSORS[kind](torch.as_strided(tensor, *node["view"]) if "view" in node else tensor)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.tree(node["items"], at))
        if kind == "deque":
            return deque(self.tree(node["items"], at), node["maxlen"])
        if kind == "dict":
            make = _MAPPINGS[node.get("type", "dict")]
            return make([self._pair(coded, inner, f"{at}/{_segment(coded, i)}")
                         for i, (coded, inner) in enumerate(node["items"])])  # fmt: skip
        return self._of_class(node, at)

    def _pair(self, coded: Any, node: Any, at: str) -> tuple[Any, Any]:
        if isinstance(coded, str):
            key: Any = int(coded[1:]) if coded[0] == "i" else coded[1:]
        else:
            key = self.tree(coded, f"{at}/key")
        return key, self.tree(node, at)

    def _of_class(self, node: Mapping[str, Any], at: str) -> Any:
        kind, name = node[_TAG], str(node.get("class"))
        if kind == "enum":
            return _loaded(name, Enum, at)[node["name"]]
        if kind == "named":
            return _loaded(name, tuple, at)._make(self.tree(node["items"], at))
        if kind == "subclass":
            parts = {part: self.tree(inner, f"{at}/{part}") for part, inner in node["parts"].items()}
            context = self.tree(node["context"], f"{at}/context")
            make = _loaded(name, Tensor, at).__tensor_unflatten__
            return make(parts, context, torch.Size(node["size"]), tuple(node["strides"]))
        if kind == "object" and name in self._classes:
            thing: Any = object.__new__(self._classes[name])
            vars(thing).update(self.tree(node["attributes"], at))
            return thing
        raise _unmakable(name if kind == "object" else str(kind), at)


class _Packer:
    """One call of `pack`: remembers which tensors it has stored."""

    def __init__(self, tensors: Tensors, classes: Classes) -> None:
        self._tensors, self._classes = tensors, classes
        self._held: dict[object, _Held] = {}
        self._buffers: dict[object, list[_Held]] = {}

    def node(self, tree: Any, at: str) -> Any:
        if tree is None or isinstance(tree, bool):
            return tree
        if isinstance(tree, Tensor):
            return self._tensor(tree, at)
        if isinstance(tree, Enum):
            return {_TAG: "enum", "class": _name(type(tree)), "name": tree.name}
        if isinstance(tree, np.ndarray | np.generic) and not isinstance(tree, str | bytes):
            return self._array(tree, at)
        if isinstance(tree, str | int):
            return tree
        if isinstance(tree, float):
            return tree if math.isfinite(tree) else {_TAG: "float", "value": repr(tree)}
        if isinstance(tree, Mapping):
            return self._mapping(tree, at)
        if isinstance(tree, list | tuple | set | frozenset | deque):
            return self._sequence(tree, at)
        return self._other(tree, at)

    def _tensor(self, tensor: Tensor, at: str) -> Any:
        if is_compound(tensor):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: self.node(getattr(tensor, name), f"{at}/{name}") for name in names}
            return {_TAG: "subclass", "class": _name(type(tensor)), "parts": parts, "size": list(tensor.shape),
                    "strides": list(tensor.stride()), "context": self.node(context, f"{at}/context")}  # fmt: skip
        plain = not hasattr(tensor, "full_tensor") and tensor.layout is torch.strided and not tensor.is_meta
        key: object = id(tensor)
        if plain and tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._held:
            node, _, name = self._held[key]
            node.setdefault("at", name)
            return node
        name = at
        while name in self._tensors:  # keys with a slash in them: {"a/b": …} beside {"a": {"b": …}}
            name += "'"
        held = self._held[key] = ({_TAG: "tensor"} if name == at else {_TAG: "tensor", "at": name}, tensor, name)
        others = self._buffers.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []) if plain else []
        others.append(held)
        self._tensors[name] = tensor.detach()
        for other in others[:-1]:
            if _overlap(other[1], tensor):
                self._share(other, held)
                break
        return held[0]

    def _share(self, first: _Held, second: _Held) -> None:
        """Two views of one buffer stay that: what is written through one is read through the other."""
        base = first[0].setdefault("at", first[2])
        del self._tensors[second[2]]
        whole = torch.empty(0, dtype=first[1].dtype, device=first[1].device)
        self._tensors[base] = whole.set_(first[1].untyped_storage())
        for node, view, _ in (first, second):
            node |= {"at": base, "view": [list(view.shape), list(view.stride()), view.storage_offset()]}

    def _array(self, array: Any, at: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(array, order="K"))
        except TypeError as error:
            raise StageError(f"an array of {array.dtype} cannot be saved", where=at) from error
        return {**self._tensor(tensor, at), _TAG: "scalar" if isinstance(array, np.generic) else "array"}

    def _mapping(self, tree: Mapping[Any, Any], at: str) -> Any:
        kind = next((kind for kind, cls in _DICTS.items() if isinstance(tree, cls)), "dict")
        if isinstance(tree, defaultdict):
            if tree.default_factory not in _FACTORIES:
                raise StageError(f"a defaultdict of {tree.default_factory} cannot be saved", where=at)
            kind = f"default {_FACTORIES[tree.default_factory]}"
        if kind == "dict" and all(isinstance(k, str) and k != _TAG for k in tree):
            return {k: self.node(v, f"{at}/{k}") for k, v in tree.items()}
        items = []
        for index, (key, value) in enumerate(tree.items()):
            coded = self._key(key, f"{at}/k{index}/key")
            items.append([coded, self.node(value, f"{at}/{_segment(coded, index)}")])
        return {_TAG: "dict", "items": items, **({} if kind == "dict" else {"type": kind})}

    def _key(self, key: Any, at: str) -> Any:
        if isinstance(key, Tensor):
            raise StageError("a key of type Tensor cannot be saved", where=at)
        if type(key) is int:
            return f"i{key}"
        return f"s{key}" if type(key) is str else self.node(key, at)

    def _sequence(self, tree: Any, at: str) -> Any:
        # A set has no order of its own, and the same content gives the same file.
        ordered = sorted(tree, key=repr) if isinstance(tree, set | frozenset) else tree
        items = [self.node(v, f"{at}/{i}") for i, v in enumerate(ordered)]
        if isinstance(tree, list):
            return items
        if isinstance(tree, deque):
            return {_TAG: "deque", "items": items, "maxlen": tree.maxlen}
        if hasattr(tree, "_fields"):
            return {_TAG: "named", "class": _name(type(tree)), "items": items}
        kind = next(k for k in ("size", "frozenset", "set", "tuple") if isinstance(tree, _SEQUENCES[k]))
        return {_TAG: kind, "items": items}

    def _other(self, tree: Any, at: str) -> Any:
        if isinstance(tree, complex):
            return {_TAG: "complex", "real": repr(tree.real), "imag": repr(tree.imag)}
        if isinstance(tree, bytes):
            return {_TAG: "bytes", "value": tree.hex()}
        if isinstance(tree, torch.dtype | torch.device):
            kind = "dtype" if isinstance(tree, torch.dtype) else "device"
            return {_TAG: kind, "value": str(tree).removeprefix("torch.")}
        if self._classes.get(_name(type(tree))) is type(tree):
            return {_TAG: "object", "class": _name(type(tree)), "attributes": self.node(vars(tree), at)}
        raise StageError(
            f"a {type(tree).__name__} cannot be saved",
            where=at,
            hint="state may hold tensors, arrays, numbers, text, and the containers of python",
        )


def _overlap(*tensors: Tensor) -> bool:
    """Whether the memory from the first to the last element of one meets that of the other."""
    starts = [t.storage_offset() for t in tensors]
    ends = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors]
    return all(t.numel() for t in tensors) and max(starts) <= min(ends)


def _segment(coded: Any, index: int) -> str:
    """A key's part of the path."""
    return coded if isinstance(coded, str) else f"k{index}"


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _loaded(name: str, base: type, where: str) -> Any:
    """A class by name, among the modules that are loaded already: nothing in a file may have a module imported."""
    module, _, path = name.partition(":")
    thing: Any = sys.modules.get(module)
    for part in path.split("."):
        thing = getattr(thing, part, None)
    if isinstance(thing, type) and issubclass(thing, base) and _name(thing) == name:
        return thing
    raise _unmakable(name, where)


def _unmakable(name: str, where: str) -> StageError:
    return StageError(f"the checkpoint holds a {name}, which cannot be made here", where=where,
                      hint="make the optimizer that wrote it, of the same version, before loading")  # fmt: skip


def _dtype(node: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(node["value"]), None)
    if not isinstance(dtype, torch.dtype):
        raise _unmakable(str(node["value"]), "dtype")
    return dtype


_VALUES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda node: float(node["value"]),
    "complex": lambda node: complex(float(node["real"]), float(node["imag"])),
    "bytes": lambda node: bytes.fromhex(node["value"]),
    "device": lambda node: torch.device(node["value"]),
    "dtype": _dtype,
}
_TENSORS: Mapping[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "array": lambda tensor: tensor.numpy(),
    "scalar": lambda tensor: tensor.numpy()[()],
}
