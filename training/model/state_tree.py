"""Serialises nested containers, numbers and tensors as one JSON text and one flat table of tensors, without pickle.
Reading never imports a module: a class is looked up among those that this process has loaded, and only tensor
subclasses, enumerations, named tuples and plain objects of classes that the caller lists are created."""

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
from layerline.training.model.tensor_forms import dense, last_element, overlap

Tensors = dict[str, Tensor]
Classes = Mapping[str, type]
# A stored tensor: its JSON node, the tensor itself, and its name in the table.
_Stored = tuple[dict[str, Any], Tensor, str]
# The key that marks a JSON object as a node of this format.
_TAG = "$"
_SEQUENCES: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_FACTORIES: Mapping[Any, str] = {dict: "dict", list: "list", set: "set", int: "int", float: "float"}
_DICTS: Mapping[str, type] = {"ordered": OrderedDict, "counter": Counter}
_MAPPINGS: Mapping[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": lambda pairs: Counter(dict(pairs))} | {
    f"default {name}": partial(defaultdict, factory) for factory, name in _FACTORIES.items()
}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def pack(tree: Any, prefix: str, tensors: Tensors, classes: Classes | None = None) -> Any:
    """JSON for `tree`. Adds its tensors to `tensors` as `prefix/path/in/the/tree`, a shared one only once."""
    try:
        return _Packer(tensors, classes or {}).node(tree, prefix)
    except RecursionError as error:
        raise StageError("it is nested too deeply, or holds itself", where=prefix) from error


def unpack(node: Any, prefix: str, tensors: Mapping[str, Tensor], classes: Classes | None = None) -> Any:
    """The tree that was packed under `prefix`. Its tensors are those of `tensors`, not copies."""
    try:
        return _Reader(tensors, classes or {}).tree(node, prefix)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise StageError(f"damaged, or written by another version: {error}", where=prefix) from error


def is_compound(value: Any) -> bool:
    """Whether it is a tensor subclass that consists of other tensors. A DTensor, which is split over ranks, is not."""
    if not isinstance(value, Tensor) or type(value) in _PLAIN or hasattr(value, "full_tensor"):
        return False
    return hasattr(value, "__tensor_flatten__")


class _Reader:
    """One call of `unpack`."""

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
        # Plain numbers and types, then tensors, then containers, then objects of classes.
        if kind in _VALUES:
            return _VALUES[kind](node)
        if kind in _TENSORS:
            tensor = self._tensors[node.get("at", at)]
            if "view" in node:
                tensor = torch.as_strided(tensor, *node["view"])
            return _TENSORS[kind](tensor)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.tree(node["items"], at))
        if kind == "deque":
            return deque(self.tree(node["items"], at), node["maxlen"])
        if kind == "dict":
            pairs = []
            for index, (encoded_key, inner) in enumerate(node["items"]):
                place = f"{at}/{_segment(encoded_key, index)}"
                key = self._key(encoded_key, place)
                pairs.append((key, self.tree(inner, place)))
            return _MAPPINGS[node.get("type", "dict")](pairs)
        return self._instance(node, at)

    def _key(self, encoded: Any, at: str) -> Any:
        """A key of a mapping: `i3` is the number 3, `sname` the text "name"; others are nodes."""
        if not isinstance(encoded, str):
            return self.tree(encoded, f"{at}/key")
        if encoded[0] == "i":
            return int(encoded[1:])
        return encoded[1:]

    def _instance(self, node: Mapping[str, Any], at: str) -> Any:
        kind = node[_TAG]
        name = str(node.get("class"))
        if kind == "enum":
            return _loaded(name, Enum, at)[node["name"]]
        if kind == "named":
            return _loaded(name, tuple, at)._make(self.tree(node["items"], at))
        if kind == "subclass":
            parts = {part: self.tree(inner, f"{at}/{part}") for part, inner in node["parts"].items()}
            context = self.tree(node["context"], f"{at}/context")
            unflatten = _loaded(name, Tensor, at).__tensor_unflatten__
            return unflatten(parts, context, torch.Size(node["size"]), tuple(node["strides"]))
        if kind != "object":
            raise _unknown_class(str(kind), at)
        if name not in self._classes:
            raise _unknown_class(name, at)
        # The attributes are the whole state: __init__ may have side effects and must not run.
        instance: Any = object.__new__(self._classes[name])
        vars(instance).update(self.tree(node["attributes"], at))
        return instance


class _Packer:
    """One call of `pack`. Remembers the tensors that it has stored, so that shared memory stays shared."""

    def __init__(self, tensors: Tensors, classes: Classes) -> None:
        self._tensors, self._classes = tensors, classes
        self._stored: dict[object, _Stored] = {}
        self._by_storage: dict[object, list[_Stored]] = {}

    def node(self, tree: Any, at: str) -> Any:
        if tree is None or isinstance(tree, bool):
            return tree
        if isinstance(tree, Tensor):
            return self._tensor(tree, at)
        # Before numbers and text: an enumeration may be one of these.
        if isinstance(tree, Enum):
            return {_TAG: "enum", "class": _name(type(tree)), "name": tree.name}
        # A number of numpy that is text, or a float of python, is no array.
        if isinstance(tree, np.ndarray | np.generic) and not isinstance(tree, str | bytes):
            try:
                tensor = torch.from_numpy(np.array(tree, order="K"))
            except TypeError as error:
                raise StageError(f"an array of {tree.dtype} cannot be saved", where=at) from error
            return {**self._tensor(tensor, at), _TAG: "scalar" if isinstance(tree, np.generic) else "array"}
        if isinstance(tree, str | int):
            return tree
        if isinstance(tree, float):
            if math.isfinite(tree):
                return tree
            return {_TAG: "float", "value": repr(tree)}  # JSON has no NaN and no infinity
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
        # Only such a tensor has an address by which a second reference to the same memory is known.
        plain = not hasattr(tensor, "full_tensor") and tensor.layout is torch.strided and not tensor.is_meta
        key: object = id(tensor)
        if plain and tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._stored:
            node, _, name = self._stored[key]
            node.setdefault("at", name)
            return node
        name = at
        while name in self._tensors:  # a key may hold a slash: {"a/b": …} beside {"a": {"b": …}}
            name += "'"
        node = {_TAG: "tensor"}
        if name != at:
            node["at"] = name
        stored = (node, tensor, name)
        self._stored[key] = stored
        self._tensors[name] = tensor.detach()
        if plain and tensor.numel() and tensor.stride() != dense(tensor):
            # A view with gaps, such as a column: kernels take another path over it than over a dense copy.
            span = last_element(tensor) + 1 - tensor.storage_offset()
            self._tensors[name] = torch.as_strided(tensor.detach(), (span,), (1,))
            node |= {"at": name, "view": [list(tensor.shape), list(tensor.stride()), 0]}
        if plain:
            neighbours = self._by_storage.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), [])
            for neighbour in neighbours:
                if overlap(neighbour[1], tensor):
                    self._share(neighbour, stored)
                    break
            neighbours.append(stored)
        return node

    def _share(self, first: _Stored, second: _Stored) -> None:
        """Stores two overlapping tensors as views of one buffer, so that after loading they still share memory."""
        first_node, first_tensor, first_name = first
        base = first_node.setdefault("at", first_name)
        del self._tensors[second[2]]
        buffer = torch.empty(0, dtype=first_tensor.dtype, device=first_tensor.device)
        self._tensors[base] = buffer.set_(first_tensor.untyped_storage())
        for node, view, _ in (first, second):
            node |= {"at": base, "view": [list(view.shape), list(view.stride()), view.storage_offset()]}

    def _mapping(self, tree: Mapping[Any, Any], at: str) -> Any:
        kind = _mapping_kind(tree, at)
        if kind == "dict" and all(isinstance(k, str) and k != _TAG for k in tree):
            return {k: self.node(v, f"{at}/{k}") for k, v in tree.items()}
        items = []
        for index, (key, value) in enumerate(tree.items()):
            encoded_key = self._key(key, f"{at}/k{index}/key")
            items.append([encoded_key, self.node(value, f"{at}/{_segment(encoded_key, index)}")])
        node: dict[str, Any] = {_TAG: "dict", "items": items}
        if kind != "dict":
            node["type"] = kind
        return node

    def _key(self, key: Any, at: str) -> Any:
        if isinstance(key, Tensor):
            raise StageError("a key of type Tensor cannot be saved", where=at)
        # JSON has only text as keys: the letter says what it was.
        if type(key) is int:
            return f"i{key}"
        if type(key) is str:
            return f"s{key}"
        return self.node(key, at)

    def _sequence(self, tree: Any, at: str) -> Any:
        ordered = tree
        if isinstance(tree, set | frozenset):
            ordered = sorted(tree, key=repr)  # a set has no order, and the same content must give the same file
        items = [self.node(v, f"{at}/{i}") for i, v in enumerate(ordered)]
        if isinstance(tree, list):
            return items
        if isinstance(tree, deque):
            return {_TAG: "deque", "items": items, "maxlen": tree.maxlen}
        # A named tuple is made anew by its own class.
        if hasattr(tree, "_fields"):
            return {_TAG: "named", "class": _name(type(tree)), "items": items}
        # torch.Size is a tuple, too: the special type comes first.
        for kind in ("size", "frozenset", "set", "tuple"):
            if isinstance(tree, _SEQUENCES[kind]):
                return {_TAG: kind, "items": items}
        raise AssertionError(type(tree))

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
        hint = "state may hold tensors, arrays, numbers, text, and the containers of python"
        raise StageError(f"a {type(tree).__name__} cannot be saved", where=at, hint=hint)


def _mapping_kind(tree: Mapping[Any, Any], at: str) -> str:
    if isinstance(tree, defaultdict):
        if tree.default_factory not in _FACTORIES:
            raise StageError(f"a defaultdict of {tree.default_factory} cannot be saved", where=at)
        return f"default {_FACTORIES[tree.default_factory]}"
    for kind, cls in _DICTS.items():
        if isinstance(tree, cls):
            return kind
    return "dict"


def _segment(encoded_key: Any, index: int) -> str:
    """A key's part of the path."""
    return encoded_key if isinstance(encoded_key, str) else f"k{index}"


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _loaded(name: str, base: type, where: str) -> Any:
    """A class by name, from the modules that are loaded already. A file must not be able to import a module."""
    module, _, path = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in path.split("."):
        cls = getattr(cls, part, None)
    if isinstance(cls, type) and issubclass(cls, base) and _name(cls) == name:
        return cls
    raise _unknown_class(name, where)


def _unknown_class(name: str, where: str) -> StageError:
    return StageError(f"the checkpoint holds a {name}, which cannot be made here", where=where,
                      hint="make the optimizer that wrote it, of the same version, before loading")  # fmt: skip


def _dtype(node: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(node["value"]), None)
    if not isinstance(dtype, torch.dtype):
        raise _unknown_class(str(node["value"]), "dtype")
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
