"""Where a NaN or Inf comes from: one more run of a micro-batch, every operator's result looked at.

The run is exact: the same weights, inputs, random numbers, buffers and autocast. Its backward pass starts from the
gradients that the loss sent to the model's outputs, so the loss function itself isn't needed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from layerline.training.ema import statistics
from layerline.training.names import named, unwrap
from layerline.training.replay import Apart, Draws

Phase = Literal["parameter", "input", "forward", "loss", "backward"]
_SHOWN = 8


@dataclass(frozen=True)
class Origin:
    """Where values stopped being finite.

    Attributes:
        phase: which part of the step; "loss" is everything after the model.
        module: canonical path of the innermost module at work; "" is the model itself.
        tensor: what it is: the operator and its output, a parameter's name, an input's place.
        shape, dtype: of that tensor.
        nan, inf: how many of its elements.
        samples: indices in the micro-batch that are affected; empty where the tensor has no batch axis.
        batch: samples in the micro-batch.
    """

    phase: Phase
    module: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    samples: tuple[int, ...] = ()
    batch: int = 0

    def __str__(self) -> str:
        places = {"forward": "in the forward pass", "backward": "in the backward pass", "loss": "in the loss function",
                  "input": "in the batch", "parameter": "in the weights"}  # fmt: skip
        inside = f" of {self.module or 'the model'}" if self.phase in ("forward", "backward") else ""
        counts = " and ".join(f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "Inf")) if n)
        rows = ", ".join(map(str, self.samples[:_SHOWN])) + (", …" if len(self.samples) > _SHOWN else "")
        if len(self.samples) == self.batch > 1:
            rows = f"all {self.batch}"
        which = f", sample{'s' if len(self.samples) > 1 else ''} {rows}" if self.samples else ""
        size = "×".join(map(str, self.shape)) or "scalar"
        return f"{places[self.phase]}{inside}: {self.tensor} ({self.dtype} {size}) has {counts}{which}"


@dataclass
class Pass:
    """One forward pass of the model, kept so that it can be run again.

    Attributes:
        args, kwargs: what forward was given; not copied.
        draws: the random state it began with.
        autocast: (device type, dtype, on).
        gradients: what the loss sent back, by index of the output tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draws: Draws
    autocast: tuple[str, torch.dtype, bool]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Samples: the first dimension of the first input that has one."""
        leaves = tree_leaves((self.args, self.kwargs))
        return next((len(t) for t in leaves if isinstance(t, Tensor) and t.ndim), 0)


def trace(model: nn.Module, kept: Pass) -> Origin | None:
    """Runs the pass again and finds where its first NaN or Inf that matters came from; None when all is finite.

    An operator is an origin when its result isn't finite and everything it was given is. An Inf that was written on
    purpose (a mask filled with -inf) is none, unless nothing else explains the NaN that follows.
    """
    model = unwrap(model)
    found = _given(model, kept)
    if found is not None:
        return found
    watch = _Watch(model, kept.batch)
    device, dtype, on = kept.autocast
    params = [p for p in model.parameters() if p.requires_grad]
    with (
        Apart(model.modules(), kept.draws),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        watch.tracker,
    ):
        with watch, torch.autocast(device, dtype, enabled=on):
            outputs = output_tensors(model(*kept.args, **kept.kwargs))
        if (bad := next((o for o in outputs if not _finite(o)), None)) is not None:
            return watch.origin() or _origin("forward", "", "the output", bad, kept.batch)
        for index, gradient in kept.gradients.items():
            if not _finite(gradient):
                return _origin("loss", "", f"the gradient of the model's output {index}", gradient, kept.batch)
        watch.backward = True
        ends = [(outputs[i], g) for i, g in kept.gradients.items()]
        if not ends:
            return None
        total = torch.stack([(o.to(g.dtype) * g).sum().double() for o, g in ends]).sum()
        with watch:
            gradients = torch.autograd.grad(total, params, allow_unused=True)
        if all(g is None or _finite(g) for g in gradients):
            return None
    return watch.origin()


def output_tensors(out: Any) -> list[Tensor]:
    """The tensors a model gave that a gradient can come back to, in a fixed order."""
    leaves = tree_leaves(out if isinstance(out, tuple | list | dict | Tensor) else list(getattr(out, "values", list)()))
    return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator's inputs and results, in both directions."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.backward = False
        self._root, self._batch = type(model).__name__, batch
        # (origin, made on purpose, made from Inf)
        self._births: list[tuple[Origin, bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        tensors = [t for t in given if isinstance(t, Tensor)]
        had_nan, had_inf = any(_has(t, torch.isnan) for t in tensors), any(_has(t, torch.isinf) for t in tensors)
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if had_nan or "empty" in name:  # fresh memory holds anything
            return out
        for index, result in enumerate(t for t in tree_leaves(out) if isinstance(t, Tensor)):
            nan = _has(result, torch.isnan)
            if nan or (not had_inf and _has(result, torch.isinf)):
                meant = any(isinstance(g, float) and not math.isfinite(g) for g in given)
                phase: Phase = "backward" if self.backward else "forward"
                what = f"output {index} of {name}" if index else name
                born = _origin(phase, self._module(), what, result, self._batch)
                self._births.append((born, meant and not nan, had_inf))
        return out

    def origin(self) -> Origin | None:
        """The birth that explains the first NaN; without one, the first Inf that nobody meant."""
        nan = next((i for i, (born, _, _) in enumerate(self._births) if born.nan), None)
        if nan is None:
            return next((born for born, meant, _ in self._births if not meant), None)
        born, _, from_inf = self._births[nan]
        if from_inf:
            before = [b for b, meant, _ in self._births[:nan] if not meant and not b.nan]
            return before[-1] if before else born
        return born

    def _module(self) -> str:
        path: str = max(self.tracker.parents, key=lambda n: (n != "Global", n.count("."), len(n)))
        path = path.removeprefix("Global").removeprefix(self._root).lstrip(".")
        return path.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _given(model: nn.Module, kept: Pass) -> Origin | None:
    """A fault that was there before the first operator ran."""
    known = named(model)
    running = statistics(known)  # the pass has written to them, and in training nothing reads them
    for name, tensor in known.tensors.items():
        if name not in running and _has(tensor, torch.isnan):
            return _origin("parameter", name.rpartition(".")[0], name, tensor, 0)
    places = [(f"input {i}", a) for i, a in enumerate(kept.args)] + [(f"input {k}", v) for k, v in kept.kwargs.items()]
    for place, value in places:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and _has(tensor, torch.isnan):  # an Inf may well be a mask
                return _origin("input", "", place, tensor, kept.batch)
    return None


def _origin(phase: Phase, module: str, what: str, tensor: Tensor, batch: int) -> Origin:
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Origin(phase, module, what, tuple(tensor.shape), dtype, nan, inf, _rows(tensor, batch), batch)


def _rows(tensor: Tensor, batch: int) -> tuple[int, ...]:
    """Samples with elements that are not finite, where axis 0 is the batch (or batch and positions as one)."""
    if not batch or not tensor.ndim or len(tensor) == 0 or len(tensor) % batch:
        return ()
    bad = ~torch.isfinite(tensor.detach()).reshape(batch, -1).all(1)
    rows: Sequence[int] = bad.nonzero().flatten().tolist()
    return tuple(rows)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _has(tensor: Tensor, what: Any) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(what(tensor.detach()).any())
