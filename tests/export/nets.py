"""Small networks, and the way from one to an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerline.export.dynamic_axes import Axes, declare
from layerline.export.example_call import Call, call
from layerline.export.probe_files import Probe
from layerline.export.torch_export import Traced, trace
from layerline.pipeline.config.field_types import Axis


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(x)))


class Net(nn.Module):
    """Two blocks and a head that gives scores and the best class."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return {"scores": scores, "best": scores.argmax(-1)}


class Forward(nn.Module):
    """Whatever function a test wants exported, inside a module `inner` with a weight."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner = _Inner(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class _Inner(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def exported(
    module: nn.Module, args: tuple[Any, ...], dynamic: Mapping[str, Mapping[int, str]] | None = None
) -> tuple[Call, Axes, Traced]:
    """Traces a module at opset 20; sources are relative to this folder."""
    first = call(module.eval(), args, {})
    axes = declare(first.feed, {k: {i: Axis(name=n) for i, n in d.items()} for k, d in (dynamic or {}).items()})
    grown = call(module, *first.arguments(axes.grown(first.feed)))
    return grown, axes, trace(grown, axes, 20, Path(__file__).parent)


def probe(of: Call, axes: Axes | None = None, **sizes: int) -> Probe:
    """The example, or the example at other sizes."""
    feed = axes.resized(of.feed, sizes) if axes else dict(of.feed)
    return Probe(label=", ".join(f"{k}={v}" for k, v in sizes.items()) or "example", feed=feed, outputs=of.run(feed))
