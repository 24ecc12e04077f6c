"""State as data: any nest of dicts, lists, numbers and tensors as one JSON text and one flat table of tensors.

Nothing is pickled, so a checkpoint can be read by anyone and can run nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerline.pipeline.errors import StageError

Tensors = dict[str, Tensor]
_TAG = "$"


def pack(tree: Any, prefix: str, tensors: Tensors) -> Any:
    """JSON for `tree`; its tensors go to `tensors` under `prefix/path/in/the/tree`.

    Raises:
        StageError: a value that is neither a plain number, text or container nor a tensor; names its path.
    """
    if isinstance(tree, Tensor):
        tensors[prefix] = tree.detach()
        return {_TAG: "tensor"}
    if isinstance(tree, np.ndarray):
        tensors[prefix] = torch.from_numpy(np.ascontiguousarray(tree))
        return {_TAG: "array"}
    if tree is None or isinstance(tree, str | bool | int):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {_TAG: "float", "value": repr(tree)}
    if isinstance(tree, Mapping):
        return _pack_mapping(tree, prefix, tensors)
    if isinstance(tree, list | tuple):
        items = [pack(v, f"{prefix}/{i}", tensors) for i, v in enumerate(tree)]
        return items if isinstance(tree, list) else {_TAG: "tuple", "items": items}
    raise StageError(
        f"a {type(tree).__name__} cannot be saved",
        where=prefix,
        hint="state may hold tensors, arrays, numbers, text, lists, tuples and dicts",
    )


def unpack(node: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that was packed under `prefix`."""
    if isinstance(node, list):
        return [unpack(v, f"{prefix}/{i}", tensors) for i, v in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kind = node.get(_TAG)
    if kind is None:
        return {k: unpack(v, f"{prefix}/{k}", tensors) for k, v in node.items()}
    if kind == "tensor":
        return tensors[prefix]
    if kind == "array":
        return tensors[prefix].numpy()
    if kind == "float":
        return float(node["value"])
    if kind == "tuple":
        return tuple(unpack(v, f"{prefix}/{i}", tensors) for i, v in enumerate(node["items"]))
    return {_key(k): unpack(v, f"{prefix}/{k}", tensors) for k, v in node["items"]}


def _pack_mapping(tree: Mapping[Any, Any], prefix: str, tensors: Tensors) -> Any:
    if all(isinstance(k, str) and k != _TAG for k in tree):
        return {k: pack(v, f"{prefix}/{k}", tensors) for k, v in tree.items()}
    for key in tree:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise StageError(f"a key of type {type(key).__name__} cannot be saved", where=prefix)
    return {_TAG: "dict", "items": [[_coded(k), pack(v, f"{prefix}/{_coded(k)}", tensors)] for k, v in tree.items()]}


def _coded(key: str | int) -> str:
    return f"i{key}" if isinstance(key, int) else f"s{key}"


def _key(coded: str) -> str | int:
    return int(coded[1:]) if coded[0] == "i" else coded[1:]
