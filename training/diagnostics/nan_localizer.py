"""Where a NaN or Inf comes from: one more run of a micro-batch, every operator's result looked at.

The run is exact: the same weights, inputs, random numbers, buffers and autocast. Its backward pass starts from the
gradients that the loss sent to the model's outputs, so the loss function itself isn't needed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from layerline.training.model.canonical_names import modules, named, unwrap
from layerline.training.randomness.rng_snapshot import Apart, Past

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
        start: the buffers and the random state it began with.
        autocast: (device type, dtype, on).
        gradients: what the loss sent back, by index of the output tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: Past
    autocast: tuple[str, torch.dtype, bool]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether the model was in training mode."""
        return self.start.modes[0][1]

    @property
    def batch(self) -> int:
        """Samples: the first dimension of the first input that has one."""
        leaves = tree_leaves((self.args, self.kwargs))
        return next((len(t) for t in leaves if isinstance(t, Tensor) and t.ndim), 0)


def trace(model: nn.Module, kept: Pass) -> Origin | None:
    """Runs the pass again and finds where its first NaN or Inf that matters came from; None when all is finite.

    An operator is an origin when its result isn't finite and everything it was given is. An Inf that was written on
    purpose (a mask filled with -inf) is no origin, unless nothing else explains the NaN that follows. A weight, a
    buffer or an input with an Inf may be such a mask, too: it is the origin when no operator explains what follows, and
    every sample that has the Inf was spoilt.
    """
    model = unwrap(model)
    given = list(_given(model, kept))
    if (nan := next((g for g in given if _has(g.tensor, torch.isnan)), None)) is not None:
        return nan.origin()
    watch = _Watch(model, kept.batch)
    device, dtype, on = kept.autocast
    params = [p for p in model.parameters() if p.requires_grad]
    with (
        Apart(model.modules(), kept.start),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        watch.tracker,
    ):
        with watch, torch.autocast(device, dtype, enabled=on):
            outputs = output_tensors(model(*kept.args, **kept.kwargs))
        if (bad := next((o for o in outputs if not _finite(o)), None)) is not None:
            return _explain(watch, given, _rows(bad, kept.batch)) or _origin(
                "forward", "", "the output", bad, kept.batch
            )
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
    return _explain(watch, given, ())


def weights(model: nn.Module) -> Origin | None:
    """The first trained parameter that is not finite."""
    for name, param in named(model).params.items():
        if param.requires_grad and not _finite(param):
            return _origin("parameter", name.rpartition(".")[0], name, param, 0)
    return None


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
        # Where a NaN or an Inf first appeared: (origin, written on purpose, whether an input had an Inf)
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

    def origin(self) -> tuple[Origin | None, bool]:
        """The operator that explains the first NaN (without a NaN, the first Inf that was not written on purpose), and
        whether the cause is an Inf that no operator made."""
        nan = next((i for i, (born, _, _) in enumerate(self._births) if born.nan), None)
        if nan is None:
            first = next((born for born, meant, _ in self._births if not meant), None)
            return first, first is None
        born, _, from_inf = self._births[nan]
        before = [b for b, meant, _ in self._births[:nan] if from_inf and not meant and not b.nan]
        return (before[-1], False) if before else (born, from_inf)

    def _module(self) -> str:
        path: str = max(self.tracker.parents, key=lambda n: (n != "Global", n.count("."), len(n)))
        path = path.removeprefix("Global").removeprefix(self._root).lstrip(".")
        return path.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@dataclass(frozen=True)
class _Given:
    """A tensor that was there before the first operator ran."""

    phase: Phase
    what: str
    tensor: Tensor
    batch: int
    trained: bool = False

    def origin(self) -> Origin:
        module = self.what.rpartition(".")[0] if self.phase == "parameter" else ""
        return _origin(self.phase, module, self.what, self.tensor, self.batch)

    def explains(self, spoilt: tuple[int, ...]) -> bool:
        """Whether its Inf, if it has one, goes with the samples that were spoilt; () is all of them."""
        if not _has(self.tensor, torch.isinf):
            return False
        own, everywhere = _rows(self.tensor, self.batch), not spoilt or len(spoilt) == self.batch
        return self.trained or everywhere or (bool(own) and set(own) <= set(spoilt))


def _given(model: nn.Module, kept: Pass) -> Iterator[_Given]:
    for name, param in named(model).params.items():
        yield _Given("parameter", name, param, 0, param.requires_grad)
    paths = {id(m): path for path, m in modules(model)}
    training = {id(m) for m, mode in kept.start.modes if mode}
    for module, name, buffer in kept.start.buffers:
        # In training nothing reads running statistics.
        if not (isinstance(module, nn.modules.batchnorm._NormBase) and id(module) in training):
            yield _Given("parameter", f"{paths.get(id(module), '')}.{name}".lstrip("."), buffer, 0)
    places = [(f"input {i}", a) for i, a in enumerate(kept.args)] + [(f"input {k}", v) for k, v in kept.kwargs.items()]
    for place, value in places:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                yield _Given("input", place, tensor, kept.batch)


def _explain(watch: _Watch, given: Sequence[_Given], spoilt: tuple[int, ...]) -> Origin | None:
    born, from_inf = watch.origin()
    if from_inf:
        rows = born.samples if born is not None else spoilt
        if (first := next((g for g in given if g.explains(rows)), None)) is not None:
            return first.origin()
    return born


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
