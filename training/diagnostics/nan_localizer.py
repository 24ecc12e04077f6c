"""Finds the origin of a NaN or Inf: runs a micro-batch again and checks the result of every operator. The second run
has the same weights, inputs, random numbers, buffers and autocast. Its backward pass starts from the gradients that the
loss sent to the model's outputs, so the loss function is not called again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from layerline.training.model.canonical_names import bare, modules, named, unwrap
from layerline.training.randomness.rng_state import Apart, Past

Phase = Literal["parameter", "input", "forward", "loss", "backward"]
_SHOWN = 8


_PLACES: Mapping[Phase, str] = {
    "forward": "in the forward pass of ", "backward": "in the backward pass of ", "loss": "in the loss function",
    "input": "in the batch", "parameter": "in the weights",
}  # fmt: skip


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first tensor that is not finite."""

    phase: Phase  # part of the step; "loss" is everything after the model
    module: str  # canonical path of the innermost module that ran; "" is the model itself
    tensor: str  # the operator and its output, a parameter's name, or an input's place
    shape: tuple[int, ...]  # shape, dtype: of that tensor
    dtype: str
    nan: int  # nan, inf: numbers of such elements
    inf: int
    samples: tuple[int, ...] = ()  # affected indices in the micro-batch; empty where the tensor has no batch axis
    batch: int = 0  # samples in the micro-batch

    def __str__(self) -> str:
        place = _PLACES[self.phase]
        if place.endswith(" of "):
            place += self.module or "the model"
        counts = " and ".join(f"{count} {kind}" for count, kind in ((self.nan, "NaN"), (self.inf, "Inf")) if count)
        size = "×".join(map(str, self.shape)) or "scalar"
        text = f"{place}: {self.tensor} ({self.dtype} {size}) has {counts}"
        if not self.samples:
            return text
        if len(self.samples) == self.batch > 1:
            return f"{text}, samples all {self.batch}"
        if len(self.samples) == 1:
            return f"{text}, sample {self.samples[0]}"
        rows = [*map(str, self.samples[:_SHOWN])]
        if len(self.samples) > _SHOWN:
            rows.append("…")
        return f"{text}, samples {', '.join(rows)}"


@dataclass
class Pass:
    """One forward pass of the model, recorded so that it can be run again."""

    args: tuple[Any, ...]  # args, kwargs: the arguments of forward; not copied
    kwargs: dict[str, Any]
    start: Past  # the buffers and the random state before the pass
    autocast: tuple[str, torch.dtype, bool]  # (device type, dtype, enabled)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # what the loss sent back, by index of the output tensor
    finite: list[Tensor] = field(default_factory=list)  # of each output tensor, whether it was finite in this pass

    @property
    def batch(self) -> int:
        """Number of samples: the first dimension of the first input that has one."""
        leaves = tree_leaves((self.args, self.kwargs))
        return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)


def trace(model: nn.Module, recorded: Pass) -> NonFiniteOrigin | None:
    """Runs the pass again and finds the origin of its first relevant NaN or Inf; None where everything is finite.

    An operator is an origin when its result isn't finite and all its inputs are. An Inf that was written on purpose (a
    mask filled with -inf) is not an origin. A weight, a buffer or an input with an Inf may be such a mask, too: it is
    the origin when no operator explains the NaN, and every sample with the Inf has a NaN.
    """
    model = unwrap(model)
    sources = list(_sources(model, recorded))
    for source in sources:
        if _has(source.tensor, torch.isnan):
            return source.origin()
    watch = _Watch(model, recorded.batch)
    device, dtype, enabled = recorded.autocast
    params = [p for p in model.parameters() if p.requires_grad]
    eager = torch.compiler.set_stance("force_eager")
    with Apart(model.modules(), recorded.start), torch.enable_grad(), eager, watch.tracker:
        with watch, torch.autocast(device, dtype, enabled=enabled):
            outputs = output_tensors(model(*recorded.args, **recorded.kwargs))
        for output in outputs:
            if not _finite(output):
                origin = _explain(watch, sources, _rows(output, recorded.batch))
                return origin or _origin("forward", "", "the output", output, recorded.batch)
        for index, gradient in recorded.gradients.items():
            if not _finite(gradient):
                return _origin("loss", "", f"the gradient of the model's output {index}", gradient, recorded.batch)
        if not recorded.gradients:  # the loss did not come from this pass
            return None
        watch.phase = "backward"
        starts = [outputs[index] for index in recorded.gradients]
        with watch:
            gradients = torch.autograd.grad(starts, params, list(recorded.gradients.values()), allow_unused=True)
        if all(g is None or _finite(g) for g in gradients):
            return None
    return _explain(watch, sources, ())


def weights(model: nn.Module) -> NonFiniteOrigin | None:
    """The first trained parameter that is not finite."""
    for name, param in named(model).params.items():
        if param.requires_grad and not _finite(param):
            return _Source("parameter", name, param, 0).origin()
    return None


def output_tensors(out: Any) -> list[Tensor]:
    """The output tensors of a model that receive gradients, in a fixed order."""
    if not isinstance(out, tuple | list | dict | Tensor):
        out = list(getattr(out, "values", list)())
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


@dataclass(frozen=True)
class _Birth:
    """A result that is not finite although no input has a NaN."""

    origin: NonFiniteOrigin
    intended: bool
    from_inf: bool


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the inputs and results of every operator in the forward and the backward pass."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.phase: Phase = "forward"
        self._root, self._batch = type(model).__name__, batch
        self._births: list[_Birth] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = tree_leaves((args, kwargs))
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        # Before the call: it may write into its inputs.
        had_nan = any(_has(t, torch.isnan) for t in tensors)
        had_inf = any(_has(t, torch.isinf) for t in tensors)
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if had_nan or "empty" in name:  # uninitialised memory may hold a NaN
            return out
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for index, result in enumerate(results):
            nan = _has(result, torch.isnan)
            if nan or (not had_inf and _has(result, torch.isinf)):
                got_inf = any(isinstance(a, float) and not math.isfinite(a) for a in arguments)
                what = name
                if index:
                    what = f"output {index} of {name}"
                path: str = max(self.tracker.parents, key=lambda n: (n != "Global", n.count("."), len(n)))
                path = bare(path.removeprefix("Global").removeprefix(self._root).lstrip("."))
                origin = _origin(self.phase, path, what, result, self._batch)
                self._births.append(_Birth(origin, intended=got_inf and not nan, from_inf=had_inf))
        return out

    def origin(self) -> tuple[NonFiniteOrigin | None, bool]:
        """The operator that explains the first NaN (without a NaN, the first Inf that was not written on purpose), and
        whether the cause is an Inf that no operator computed."""
        computed_infs: list[NonFiniteOrigin] = []
        for birth in self._births:
            if birth.origin.nan:
                if birth.from_inf and computed_infs:
                    return computed_infs[-1], False
                return birth.origin, birth.from_inf
            if not birth.intended:
                computed_infs.append(birth.origin)
        if computed_infs:
            return computed_infs[0], False
        return None, True


@dataclass(frozen=True)
class _Source:
    """A tensor that existed before the first operator ran."""

    phase: Phase
    what: str
    tensor: Tensor
    batch: int
    trained: bool = False

    def origin(self) -> NonFiniteOrigin:
        # Of "input 0" nothing lies before the last dot.
        return _origin(self.phase, self.what.rpartition(".")[0], self.what, self.tensor, self.batch)

    def explains(self, affected: tuple[int, ...]) -> bool:
        """Whether it has an Inf in no other samples than those affected; () stands for all samples."""
        if not _has(self.tensor, torch.isinf):
            return False
        if self.trained or not affected or len(affected) == self.batch:
            return True
        rows = _rows(self.tensor, self.batch)
        return bool(rows) and set(rows) <= set(affected)


def _sources(model: nn.Module, recorded: Pass) -> Iterator[_Source]:
    for name, param in named(model).params.items():
        yield _Source("parameter", name, param, 0, param.requires_grad)
    paths = {id(m): path for path, m in modules(model)}
    training = {id(m) for m, mode in recorded.start.modes if mode}
    for module, name, buffer in recorded.start.buffers:
        # In training mode nothing reads running statistics.
        if not (isinstance(module, nn.modules.batchnorm._NormBase) and id(module) in training):
            yield _Source("parameter", f"{paths.get(id(module), '')}.{name}".lstrip("."), buffer, 0)
    arguments: dict[Any, Any] = {**dict(enumerate(recorded.args)), **recorded.kwargs}
    for key, value in arguments.items():
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                yield _Source("input", f"input {key}", tensor, recorded.batch)


def _explain(watch: _Watch, sources: Sequence[_Source], affected: tuple[int, ...]) -> NonFiniteOrigin | None:
    operator, from_inf = watch.origin()
    if operator is not None:
        affected = operator.samples
    for source in sources:
        if from_inf and source.explains(affected):
            return source.origin()
    return operator


def _origin(phase: Phase, module: str, what: str, tensor: Tensor, batch: int) -> NonFiniteOrigin:
    nan = int(torch.isnan(tensor).sum())
    inf = int(torch.isinf(tensor).sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return NonFiniteOrigin(phase, module, what, tuple(tensor.shape), dtype, nan, inf, _rows(tensor, batch), batch)


def _rows(tensor: Tensor, batch: int) -> tuple[int, ...]:
    """Samples with non-finite elements, where axis 0 is the batch, or batch and positions flattened together."""
    if not batch or not tensor.ndim or len(tensor) == 0 or len(tensor) % batch:
        return ()
    not_finite = ~torch.isfinite(tensor.detach()).reshape(batch, -1).all(1)
    rows: Sequence[int] = not_finite.nonzero().flatten().tolist()
    return tuple(rows)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _has(tensor: Tensor, test: Any) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(test(tensor.detach()).any())
