"""Every private part of torch that the export relies on. tests/export/test_torch_private.py fails if one goes.

- `ShapeEnv._log_guard`: torch keeps the guards of a trace, but only one frame of where each comes from, which often
  lies inside torch. The hook sees the whole stack while the guard is taken.
- `torch.fx.graph._format_target`: it writes attribute paths into Python code unquoted, so that a module called `class`
  gives a syntax error.
- `_dispatch_cache` of operators: torch 2.13 exchanges the decompositions of LSTM and GRU while it exports, and keeps
  the cached choice. A second LSTM exported in one process would have its sequence length fixed.
- `torch._guards.TracingContext`: the stack of code that dynamo reads without running it.
- `torch._C._dispatch_has_kernel_for_dispatch_key`: whether an operator can be traced.
- `torch.utils._sympy`, `ShapeGuardPythonPrinter`: evaluation, bounds and text of expressions over symbolic sizes.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeGuardPythonPrinter
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

_libraries: list[Any] = []  # a library's kernels go when it goes
Frame = tuple[str, int]
"""File and line."""


@contextmanager
def on_guard(hook: Callable[[ShapeEnv, Any, FrameType], None]) -> Iterator[None]:
    """Inside, every guard is passed to the hook, with its environment and the frame that torch takes it in."""
    original = ShapeEnv._log_guard

    def log_guard(env: ShapeEnv, prefix: str, guard: Any, forcing_spec: bool) -> None:
        hook(env, guard, sys._getframe(1))
        original(env, prefix, guard, forcing_spec)

    with _replaced(ShapeEnv, "_log_guard", log_guard):
        yield


def stack_read_by_dynamo() -> list[Frame]:
    """The user's stack, outermost first, where dynamo reads forward() instead of running it; empty elsewhere."""
    return [(frame.filename, frame.lineno or 0) for frame in TracingContext.extract_stack()]


@contextmanager
def any_names() -> Iterator[None]:
    """Inside, torch's generated code reads modules called `class`, `a"b` or the like by a literal of their name."""
    with _replaced(torch.fx.graph, "_format_target", _attribute):
        yield


def forget_decompositions() -> None:
    """Clears the cached decompositions of LSTM and GRU."""
    # The cached choice of the first export would hold for all later ones.
    for op in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        op._dispatch_cache.clear()


@cache
def give_fake_quantisation_shapes() -> None:
    """Tells torch the shapes of its fake quantisation operators that have kernels and no form for tracing."""
    for name in (
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "fake_quantize_per_tensor_affine_cachemask",
        "fake_quantize_per_channel_affine_cachemask",
    ):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            continue
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        library.impl(name, lambda x, *_: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)), "Meta")
        _libraries.append(library)


def evaluate(expr: Any, values: Mapping[Any, int]) -> Any:
    """The value of an expression over symbolic sizes."""
    return sympy_interp(PythonReferenceAnalysis, dict(values), expr)


def is_constant(expr: Any, ranges: Mapping[Any, tuple[int, int]]) -> bool:
    """Whether interval arithmetic shows one value of the expression over ranges of its symbols."""
    bounds = {symbol: ValueRanges(low, high) for symbol, (low, high) in ranges.items()}
    return bool(bound_sympy(expr, bounds).is_singleton())


def as_python(expr: Any, names: Mapping[Any, str]) -> str:
    """An expression as Python code, with names in place of its symbols."""
    sources = {symbol: [name] for symbol, name in names.items()}
    text: str = ShapeGuardPythonPrinter(sources, lambda name: name, sources).doprint(expr)
    return text


def _attribute(base: str, target: str) -> str:
    for name in target.split("."):
        # A literal of any other name, so that nothing of it becomes code.
        if name.isidentifier() and not keyword.iskeyword(name):
            base = f"{base}.{name}"
        else:
            base = f"getattr({base}, {name!r})"
    return base


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
