"""Guards: what a trace assumes about dynamic sizes, and the sizes at which that does not hold.

Where forward() asks for a size (`if x.shape[1] == 7`), torch.export follows the answer of the example and records the
condition as a guard. The ONNX has only that branch, so a comparison must include sizes that break a guard.

`ExportedProgram.module(check_guards=True)` refuses these sizes, but it does not tell the source line, and it can't be
asked for sizes. So guards are read while torch takes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from layerline.backends.base import Feed
from layerline.export import torch_private
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.export_errors import places
from layerline.graph.io.module_identity import source
from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.errors import brief

ALL = 512
"""Sizes of an axis up to which each is tried; of a longer one, those around the example's and the guard's numbers."""
TRIES = 8192
"""Greatest number of combinations that are tried for one guard, those next to the example's first."""
# Guards taken below this file are about how torch's kernels lay out memory, not about what is computed.
_KERNELS = "fake_impls.py"
_OURS = Path(__file__).parent


Symbols = Mapping[str, tuple[str, int]]
"""The axis that each of torch's symbols stands for, and the number that its size is divided by."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A condition on sizes under which the traced program computes what forward() does.

    Attributes:
        text: for people: `t != 7`.
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
        """Whether forward() branches on it: its own lines ask, and tracing did not only fix one size in passing."""
        fixes_one_size = isinstance(self.expr, sympy.Eq) and self.expr.args[1].is_number
        return bool(self.line) and not fixes_one_size

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds at these sizes by axis name."""
        values = {symbol: sizes[name] // step for symbol, (name, step) in self.symbols.items()}
        return bool(torch_private.evaluate(self.expr, values))

    def broken(self, dims: Mapping[str, Dim], example: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Sizes that break it, by axis name, those next to the example's first; none if it holds in all of `dims`."""
        ranges: dict[Any, tuple[int, int]] = {}
        for symbol, (name, step) in self.symbols.items():
            ranges[symbol] = (dims[name].min // step, dims[name].max // step)
        if torch_private.is_constant(self.expr, ranges):
            # One answer for every size; and it holds at the example's.
            return

        def distance(combination: Sequence[int]) -> float:
            return sum(abs(math.log(size / example[name])) for name, size in zip(self.names, combination, strict=True))

        # The nearest first: a user who reads the report knows these sizes.
        for combination in sorted(self._combinations(dims, example), key=distance)[:TRIES]:
            sizes = dict(zip(self.names, combination, strict=True))
            if not self.holds(sizes):
                yield sizes

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text

    def _combinations(self, dims: Mapping[str, Dim], example: Mapping[str, int]) -> set[tuple[int, ...]]:
        """One axis over all it takes, the others over a few sizes; each in turn."""
        numbers = {step for _, step in self.symbols.values()}
        for number in self.expr.atoms(sympy.Number):
            if number.is_finite and abs(number) < 2**31:
                numbers.add(int(number))
        # Numbers in the condition, and their products: `n // 3 != 50` is about 150.
        numbers.update([math.prod(pair) for pair in itertools.product(numbers, repeat=2)])
        few: list[Sequence[int]] = []
        full: list[Sequence[int]] = []
        for name in self.names:
            full.append(_candidates(dims[name], example[name], numbers))
            few.append(sorted({full[-1][0], full[-1][-1], example[name]}))
        combinations: set[tuple[int, ...]] = set()
        for axis, sizes in enumerate(full):
            combinations.update(itertools.product(*few[:axis], sizes, *few[axis + 1 :]))
        return combinations


def _candidates(dim: Dim, example: int, numbers: Iterable[int]) -> Sequence[int]:
    """Sizes to try: all of a short axis; of a long one both ends, and those around the example's and the numbers."""
    every = dim.sizes()
    if len(every) <= ALL:
        return every
    step = dim.multiple
    # Sizes next to the example's are the likely ones at run time.
    candidates = set(range(example - ALL // 4 * step, example + ALL // 4 * step, step))
    for number in numbers:
        # From one step below to two above: the number itself may lie between two steps.
        nearest = number // step * step
        candidates.update(range(nearest - step, nearest + 3 * step, step))
    # Membership of a range takes no time; to go through it may take forever.
    return sorted({every[0], every[-1], *filter(every.__contains__, candidates)})


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Guards that were recorded, each with the line of the user's file that asked for it; empty where torch did.

    The shape environments, by id, tell where a symbol comes from; several where torch tried several ways of
    tracing.
    """

    lines: dict[Any, str] = field(default_factory=dict)
    environments: dict[int, ShapeEnv] = field(default_factory=dict)


@contextmanager
def noting(root: Path) -> Iterator[Taken]:
    """Records every guard that is taken inside, with its line in a file of the project."""
    taken = Taken()

    def note(env: ShapeEnv, guard: Any, frame: FrameType | None) -> None:
        taken.environments[id(env)] = env
        # From torch's shape environment out to this package.
        frames: list[torch_private.Frame] = []
        while frame is not None and Path(frame.f_code.co_filename).parent != _OURS:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        if any(file.endswith(_KERNELS) for file, _ in frames):
            return
        line = source(reversed(frames), root) or source(torch_private.stack_read_by_dynamo(), root)
        taken.lines.setdefault(guard, line)

    with torch_private.on_guard(note):
        yield taken


def symbols(taken: Taken, call: Call, axes: Axes) -> Symbols:
    """The axis that each of torch's symbols stands for, as far as guards were taken."""
    axis_names = dict(axes.names)
    # Dynamo names the axes by their place: it numbers the leaves of all arguments.
    inputs = iter(call.feed)
    for position, leaf in enumerate(pytree.tree_leaves((call.args, dict(call.kwargs)))):
        if isinstance(leaf, Tensor):
            input_name = next(inputs)
            for axis in range(leaf.ndim):
                if (input_name, axis) in axes.names:
                    axis_names[f"flat_args_{position}", axis] = axes.names[input_name, axis]
    meanings: dict[str, tuple[str, int]] = {}
    for environment in taken.environments.values():
        for symbol, sources in environment.var_to_sources.items():
            for size_source in sources:
                name = axis_names.get([*places(size_source.name), ("", 0)][0])
                if name is not None:
                    meanings[symbol.name] = (name, 1)
                    break
        for guard in environment.guards:
            if not isinstance(guard.expr, sympy.Eq):
                continue
            # With a multiple declared, s7 is the size and Eq(s7, 4*s3) says what s3 is.
            size, steps = guard.expr.args
            size_name = getattr(size, "name", "")
            if size_name in meanings and len(steps.free_symbols) == 1:
                name, _ = meanings[size_name]
                meanings.setdefault(next(iter(steps.free_symbols)).name, (name, axes.bounds[name].step))
    return meanings


def guards(taken: Taken, symbols: Symbols) -> tuple[Guard, ...]:
    """The guards on named axes alone. A guard on a size that depends on values is left out."""
    by_text: dict[str, Guard] = {}
    for expr, line in taken.lines.items():
        free = {symbol.name: symbol for symbol in expr.free_symbols}
        meanings: dict[Any, tuple[str, int]] = {}
        texts: dict[Any, str] = {}
        for symbol_name, (name, step) in symbols.items():
            if symbol_name in free:
                meanings[free[symbol_name]] = name, step
                texts[free[symbol_name]] = name if step == 1 else f"({name}//{step})"
        if not meanings or len(meanings) < len(free):
            continue
        # Two places of one axis are equal, or a size equals its steps: a definition that forward() did not ask for.
        distinct_axes = {name for name, _ in meanings.values()}
        if isinstance(expr, sympy.Eq) and len(distinct_axes) < len(meanings):
            continue
        text = torch_private.as_python(expr, texts)
        by_text.setdefault(text, Guard(text=text, line=line, expr=expr, symbols=meanings))
    return tuple(by_text.values())


def elsewhere(call: Call, axes: Axes, feed: Feed, root: Path) -> tuple[Guard, ...] | str:
    """The guards that forward() takes at the sizes of another feed, or what keeps torch from tracing it there."""
    args, kwargs = call.arguments(feed)
    # AUTO: if forward() admits a single size here, torch fixes the size instead of raising.
    auto = {name: dict.fromkeys(dims, torch.export.Dim.AUTO) for name, dims in axes.specs().items()}
    try:
        with torch_private.any_names(), noting(root) as taken:
            torch.export.export(call.module, args, kwargs, dynamic_shapes=call.shapes(auto), strict=False)
    except Exception as error:  # noqa: BLE001 - torch raises errors of many kinds on a module that it can't trace
        return brief(error)
    return guards(taken, symbols(taken, call, axes))
