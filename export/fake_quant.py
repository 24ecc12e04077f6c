"""Fake quantisation on its way out: what torch lacks to trace it, and its switches as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize

from layerline.pipeline.errors import StageError

_TENSOR_SCALES = "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
_libraries: list[torch.library.Library] = []  # a library's kernels go with it


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Inside, fake quantisation can be traced: its two switches are tensors, on which tracing can't branch.

    Raises:
        StageError: an observer that is on: each call would change the scale.
    """
    _give_shapes()
    changed: list[Any] = []
    for path, inner in module.named_modules():
        if not isinstance(inner, FakeQuantize) or "forward" in vars(inner):
            continue
        if int(inner.observer_enabled[0]):
            raise StageError(
                "the observer of this FakeQuantize is on, so each call changes its scale",
                where=f"module {path}" if path else "model",
                hint="model().apply(torch.ao.quantization.disable_observer) keeps the scales as they are",
            )
        changed.append(inner)
        changed[-1].forward = partial(_forward, inner, quantizes=bool(inner.fake_quant_enabled[0]))
    try:
        yield
    finally:
        for inner in changed:
            del inner.forward


def _forward(module: Any, x: Tensor, *, quantizes: bool) -> Tensor:
    """What FakeQuantize.forward() does where the observer is off."""
    if not quantizes:
        return x
    low, high = module.activation_post_process.quant_min, module.activation_post_process.quant_max
    if module.is_per_channel:
        return torch.fake_quantize_per_channel_affine(x, module.scale, module.zero_point, module.ch_axis, low, high)
    return torch.fake_quantize_per_tensor_affine(x, module.scale, module.zero_point, low, high)


@cache
def _give_shapes() -> None:
    """Tells torch the shapes of the one such operator that has a kernel and no form for tracing dynamic sizes."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_TENSOR_SCALES}", "Meta"):
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        library.impl(_TENSOR_SCALES, lambda x, *_: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)), "Meta")
        _libraries.append(library)
