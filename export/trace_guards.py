"""What the trace took for granted about dynamic sizes, and the sizes at which it does not hold.

Where forward() asks for a size (`if x.shape[1] == 7`), torch.export follows the answer that the example gives and notes
the condition down: a guard. The ONNX asks nothing. At a size that breaks a guard, the module may do something else, so
such sizes are what a comparison must not leave out.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeGuardPythonPrinter
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from layerline.backends.base import Feed
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.export_errors import place
from layerline.export.module_naming import any_names
from layerline.graph.io.module_identity import source
from layerline.pipeline.errors import brief

ALL = 512
"""Sizes of one axis up to which each is tried; of more, those around the example's and around the guard's numbers."""
TRIES = 8192
"""Combinations of sizes that are tried for one guard, those next to the example's first."""
# What lies under them is how torch's kernels lay out memory, not what is computed.
_KERNELS = "fake_impls.py"
_OURS = Path(__file__).parent


Symbols = Mapping[str, tuple[str, int]]
"""The axis that each of torch's symbols stands for, and the number that its size is divided by."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Sizes of an axis, both ends included."""

    low: int
    high: int
    step: int = 1

    def all(self) -> range:
        return range(-(-self.low // self.step) * self.step, self.high + 1, self.step)


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A condition on sizes under which the traced program is what forward() does.

    Attributes:
        text: as a person reads it: `t != 7`.
        line: where forward() asked: `task.py:10`; empty where that is not known.
        expr: the condition over torch's symbols.
        symbols: what each symbol stands for: an axis, and the number that its size is divided by.
    """

    text: str
    line: str
    expr: Any
    symbols: Mapping[Any, tuple[str, int]]

    @property
    def names(self) -> tuple[str, ...]:
        """The axes it is about."""
        return tuple(dict.fromkeys(name for name, _ in self.symbols.values()))

    @property
    def branches(self) -> bool:
        """Whether it parts forward() in two: asked by its own lines, and not that tracing fixed one size in passing."""
        return bool(self.line) and not (isinstance(self.expr, sympy.Eq) and self.expr.args[1].is_number)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is kept at these sizes by axis name."""
        values = {s: sizes[name] // step for s, (name, step) in self.symbols.items()}
        return bool(sympy_interp(PythonReferenceAnalysis, values, self.expr))

    def broken(self, spans: Mapping[str, Span], seen: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Sizes that break it, by axis name, those next to the ones seen first; empty where none in the spans do."""
        ranges = {s: ValueRanges(spans[n].low // k, spans[n].high // k) for s, (n, k) in self.symbols.items()}
        if bound_sympy(self.expr, ranges).is_singleton():
            # One answer for every size, and the one seen is yes.
            return
        tries = sorted({*self._tries(spans, seen)}, key=lambda at: _far(at, self.names, seen))
        for at in tries[:TRIES]:
            sizes = dict(zip(self.names, at, strict=True))
            if not self.holds(sizes):
                yield sizes

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text

    def _tries(self, spans: Mapping[str, Span], seen: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """One axis over all it takes, the others over a few sizes; each in turn."""
        full = {n: _candidates(spans[n], seen[n], self._numbers()) for n in self.names}
        few = {n: sorted({full[n][0], full[n][-1], seen[n]}) for n in self.names}
        for name in self.names:
            yield from itertools.product(*(full[n] if n == name else few[n] for n in self.names))

    def _numbers(self) -> set[int]:
        """Numbers in the condition, their products among them: `n // 3 != 50` is about 150."""
        whole = {int(x) for x in self.expr.atoms(sympy.Number) if x.is_finite and abs(x) < 2**31}
        whole |= {step for _, step in self.symbols.values()}
        return whole | {a * b for a in whole for b in whole}


def _candidates(span: Span, seen: int, numbers: Iterable[int]) -> Sequence[int]:
    every = span.all()
    if len(every) <= ALL:
        return every
    near = range(seen - ALL // 4 * span.step, seen + ALL // 4 * span.step, span.step)
    around = {(n // span.step + i) * span.step for n in numbers for i in (-1, 0, 1, 2)}
    return sorted({every[0], every[-1], *(s for s in {*near, *around} if s in every)})


def _far(at: Sequence[int], names: Sequence[str], seen: Mapping[str, int]) -> float:
    return sum(abs(math.log(size / seen[n])) for n, size in zip(names, at, strict=True))


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What was noted while something was traced.

    Attributes:
        lines: every guard, with the line of the user's file that asked for it; empty where torch did.
        environments: what knows where each symbol comes from; several where torch tried in several ways.
    """

    lines: dict[Any, str] = field(default_factory=dict)
    environments: dict[int, ShapeEnv] = field(default_factory=dict)


@contextmanager
def noting(root: Path) -> Iterator[Taken]:
    """Notes down every guard that is taken inside: torch keeps them, but not where they come from.

    Args:
        root: the project's folder.
    """
    taken, log = Taken(), ShapeEnv._log_guard

    def noted(env: ShapeEnv, prefix: str, g: Any, forcing_spec: bool) -> None:
        frames = list(_frames())
        if not any(file.endswith(_KERNELS) for file, _ in frames):
            # Traced by dynamo, forward() is read and not run: where it is, dynamo notes down.
            read = [(f.filename, f.lineno or 0) for f in TracingContext.extract_stack()]
            taken.lines.setdefault(g, source(reversed(frames), root) or source(read, root))
        taken.environments[id(env)] = env
        log(env, prefix, g, forcing_spec)

    with patch.object(ShapeEnv, "_log_guard", noted):
        yield taken


def symbols(taken: Taken, call: Call, axes: Axes) -> Symbols:
    """What torch's symbols stand for, as far as guards were taken."""
    named, found = {**axes.names, **_by_position(call, axes)}, dict[str, tuple[str, int]]()
    for environment in taken.environments.values():
        for symbol, sources in environment.var_to_sources.items():
            name = next((named[p] for s in sources if (p := place(s.name)) in named), None)
            if name is not None:
                found[symbol.name] = name, 1
        for size, steps in (g.expr.args for g in environment.guards if isinstance(g.expr, sympy.Eq)):
            # With a multiple declared, s7 is the size and Eq(s7, 4*s3) says what s3 is.
            if getattr(size, "name", "") in found and len(steps.free_symbols) == 1:
                name = found[size.name][0]
                found.setdefault(next(iter(steps.free_symbols)).name, (name, axes.bounds[name].multiple))
    return found


def guards(taken: Taken, symbols: Symbols) -> tuple[Guard, ...]:
    """The guards on named axes alone; a size that depends on values is none of these."""
    found: dict[str, Guard] = {}
    for expr, line in taken.lines.items():
        free = {s.name: s for s in expr.free_symbols}
        known = {free[n]: axis for n, axis in symbols.items() if n in free}
        # What says that two places of an axis have one size, or how many steps a size has, is nothing forward() asks.
        defines = isinstance(expr, sympy.Eq) and len({name for name, _ in known.values()}) < len(known)
        if known and len(known) == len(free) and not defines:
            guard = Guard(text=_text(expr, known), line=line, expr=expr, symbols=known)
            found.setdefault(guard.text, guard)
    return tuple(found.values())


def elsewhere(call: Call, axes: Axes, feed: Feed, root: Path) -> tuple[Guard, ...] | str:
    """The guards that forward() takes at the sizes of another feed, or what keeps torch from tracing it there."""
    args, kwargs = call.arguments(feed)
    # Where it asks for one size alone, that size is all there is to this part of it: automatic, not an error.
    shapes = call.shapes({n: dict.fromkeys(found, torch.export.Dim.AUTO) for n, found in axes.specs().items()})
    try:
        with any_names(), noting(root) as taken:
            torch.export.export(call.module, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # noqa: BLE001 - what of the user's module can be traced is the question
        return brief(error)
    return guards(taken, symbols(taken, call, axes))


def _frames() -> Iterator[tuple[str, int]]:
    """File and line of every frame between torch's shape environment and this package, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and Path(frame.f_code.co_filename).parent != _OURS:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _by_position(call: Call, axes: Axes) -> dict[tuple[str, int], str]:
    """The axes as dynamo calls them, which numbers all arguments through."""
    leaves, inputs = pytree.tree_leaves((call.args, dict(call.kwargs))), iter(call.feed)
    numbers = {next(inputs): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {(f"flat_args_{numbers[given]}", axis): name for (given, axis), name in axes.names.items()}


def _text(expr: Any, symbols: Mapping[Any, tuple[str, int]]) -> str:
    names = {s: [name if step == 1 else f"({name}//{step})"] for s, (name, step) in symbols.items()}
    text: str = ShapeGuardPythonPrinter(names, lambda name: name, names).doprint(expr)
    return text
