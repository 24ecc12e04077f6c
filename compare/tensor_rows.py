"""Report rows of plain tensors: weights, and the outputs of modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from layerline.backends.base import Array
from layerline.compare.tensor_distance import diff_arrays
from layerline.pipeline.report import LayerDiff


class Tensor(Protocol):
    """The part of torch.Tensor that is used here, so that torch is not imported."""

    def detach(self) -> Tensor: ...
    def numpy(self) -> Array: ...


class TensorPair(Protocol):
    """One tensor of each side, with the module that it belongs to."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def before(self) -> Tensor: ...
    @property
    def after(self) -> Tensor: ...


def rows(pairs: Iterable[TensorPair]) -> tuple[LayerDiff, ...]:
    """One row a pair, nothing gated."""
    return tuple(_row(p, p.before.detach().numpy(), p.after.detach().numpy()) for p in pairs)


def _row(pair: TensorPair, a: Array, b: Array) -> LayerDiff:
    measures = diff_arrays(a, b).measures()
    return LayerDiff(
        name=pair.name, op=pair.op, module=pair.module, shape=tuple(b.shape), dtype=b.dtype.name, **measures
    )
