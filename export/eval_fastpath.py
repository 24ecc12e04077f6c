"""torch's eval fast path of nn.TransformerEncoder, which differs from its layers: it writes 0 at padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from layerline.compare.tensor_distance import diff_arrays
from layerline.export.example_call import Call
from layerline.export.probe_files import Probe

LIMIT = 1e-3
"""Relative L2 error up to which the fast path and the layers differ by rounding alone."""


@contextmanager
def switched(*, on: bool) -> Iterator[bool]:
    """Inside, the fast path is on or off. Yields whether it was on before."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    try:
        yield before
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def taken(module: nn.Module) -> bool:
    """Whether a part of the module has such a path."""
    return any(isinstance(m, nn.TransformerEncoderLayer | nn.MultiheadAttention) for m in module.modules())


def notes(call: Call, probes: Sequence[Probe]) -> list[str]:
    """That the exported layers differ from the fast path, on the first probe where they do."""
    if not taken(call.module):
        return []
    # As users of the module get it, unless they switch it off.
    with switched(on=True):
        for probe in probes:
            fast = call.run(probe.feed)
            apart = max(diff_arrays(fast[name], output).rel_l2 for name, output in probe.outputs.items())
            if apart > LIMIT:
                note = (
                    "the module is exported and compared without torch's eval fast path, which writes 0 where "
                    f"src_key_padding_mask hides a position: with it the outputs differ by {apart:.1e} "
                    f"({probe.label}). In torch, torch.backends.mha.set_fastpath_enabled(False) gives what the ONNX "
                    "gives"
                )
                return [note]
    return []
