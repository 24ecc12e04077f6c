"""What forward() asks of its sizes is found, with its line, and so are the sizes at which the answer changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv, Mod

from layerline.export import trace_guards
from layerline.export.dynamic_axes import declare
from layerline.export.example_call import call
from layerline.export.torch_export import trace
from layerline.export.trace_guards import Guard, elsewhere
from layerline.pipeline.config.field_types import Axis, Dim

A, B = sympy.symbols("a b", integer=True, positive=True)


def guard(expr: Any, steps: Mapping[str, int] | None = None) -> Guard:
    symbols = {s: (s.name, (steps or {}).get(s.name, 1)) for s in sorted(expr.free_symbols, key=str)}
    return Guard(text=str(expr), line="", expr=expr, symbols=symbols)


@pytest.mark.parametrize(
    ("expr", "broken"),
    [
        (sympy.Ne(A, 7), [7]),
        (sympy.Le(A, 5), [6, 7, 8, 9, 10, 11, 12]),
        (sympy.Ge(A, 3), [2, 1]),
        (sympy.Ne(Mod(A, 4), 0), [4, 8, 12]),
        (sympy.Eq(Mod(A, 4), 1), [6, 4, 7, 3, 8, 10, 11, 2, 12]),
        (sympy.Ne(FloorDiv(A, 2), 5), [10, 11]),
        (sympy.Or(A < 3, A > 11, sympy.Ne(A, 9)), [9]),
        (sympy.Le(A, 12), []),
        (sympy.Ne(A, 13), []),
        (sympy.Ne(2 * A, 9), []),
    ],
)
def test_every_size_that_breaks_a_guard_the_nearest_first(expr: Any, broken: list[int]) -> None:
    found = [at["a"] for at in guard(expr).broken({"a": Dim(min=1, max=12)}, {"a": 5})]
    assert sorted(found) == sorted(broken)
    assert found[:1] == broken[:1]


@pytest.mark.parametrize(
    ("expr", "high", "nearest"),
    [
        (sympy.Ne(A, 70_000), 10**6, 70_000),
        (sympy.Ne(FloorDiv(A, 300), 150), 10**6, 45_000),
        (A <= 9_999, 10**5, 10_000),
    ],
)
def test_far_sizes_come_from_the_numbers_of_the_guard(expr: Any, high: int, nearest: int) -> None:
    assert next(guard(expr).broken({"a": Dim(min=1, max=high)}, {"a": 5})) == {"a": nearest}


def test_several_axes_at_once() -> None:
    spans, seen = {"a": Dim(min=1, max=8), "b": Dim(min=1, max=16)}, {"a": 2, "b": 5}
    assert all(at["a"] * at["b"] > 64 for at in guard(A * B <= 64).broken(spans, seen))
    assert next(guard(A * B <= 64).broken(spans, seen)) == {"a": 8, "b": 9}
    assert list(guard(A * B <= 128).broken(spans, seen)) == []
    assert next(guard(sympy.Ne(A, B)).broken(spans, seen)) == {"a": 2, "b": 2}
    assert next(guard(A + B < 24).broken(spans, seen)) == {"a": 8, "b": 16}


def test_sizes_in_steps() -> None:
    of = guard(sympy.Ne(A, 3), {"a": 4})  # the symbol counts the steps
    assert list(of.broken({"a": Dim(min=4, max=40, multiple=4)}, {"a": 8})) == [{"a": 12}]
    assert list(guard(sympy.Ne(A, 10)).broken({"a": Dim(min=4, max=40, multiple=4)}, {"a": 8})) == []


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 8), st.sampled_from([sympy.Ne, sympy.Le, sympy.Eq]))
def test_what_is_found_is_what_breaks(number: int, factor: int, rest: int, relation: Any) -> None:
    of, seen = guard(relation(factor * A + rest, number)), {"a": 6}
    right = {sympy.Ne: lambda n: n != number, sympy.Le: lambda n: n <= number, sympy.Eq: lambda n: n == number}[
        relation
    ]
    if of.expr in (sympy.true, sympy.false) or not right(6 * factor + rest):
        return  # a guard is what held at the size seen
    found = {at["a"] for at in of.broken({"a": Dim(min=1, max=40)}, seen)}
    assert found == {n for n in range(1, 41) if not right(factor * n + rest)}


class Asks(nn.Module):
    """Its answer depends on what `condition` says of its arguments' sizes."""

    def __init__(self, condition: Callable[..., bool]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor, extra: dict[str, Any], *, mask: Tensor) -> Tensor:
        if self.condition(x, extra["pair"][1], mask):
            return x * 2
        return x


def taken(condition: Callable[..., bool], bounds: Axis | None = None) -> tuple[list[str], set[str]]:
    """Texts and lines of the guards; x is (b, t, 3), the second of the pair (c, 4), the mask (b, m)."""
    args = (torch.randn(2, 8, 3), {"pair": (torch.zeros(1), torch.randn(3, 4))})
    of = call(Asks(condition).eval(), args, {"mask": torch.ones(2, 6)})
    tied = {0: Axis(name="b"), 1: bounds or Axis(name="t")}
    axes = declare(
        of.feed,
        {
            "x": tied,
            "extra_pair_1": {0: Axis(name="c")},
            "mask": {0: Axis(name="b"), 1: Axis(name="m")},
        },
    )
    found = trace(of, axes, 20, Path(__file__).parent).guards
    return [g.text for g in found], {g.line for g in found}


@pytest.mark.parametrize(
    ("condition", "texts"),
    [
        (lambda x, p, m: x.shape[1] == 7, ["t != 7"]),
        (lambda x, p, m: p.shape[0] % 4 == 0, ["(c % 4) != 0"]),
        (lambda x, p, m: m.shape[1] > 9 and m.shape[1] < 12, ["m <= 9"]),
        (lambda x, p, m: x.shape[1] * p.shape[0] > 64, ["t*c <= 64"]),
        (lambda x, p, m: m.shape[1] == x.shape[1], ["t != m"]),
        (lambda x, p, m: m.size(1) // 2 == 5, ["(m // 2) != 5"]),
        (lambda x, p, m: math.ceil(m.shape[1] / 4) == 5, ["math.ceil(m / 4) != 5"]),
        (lambda x, p, m: False, []),
    ],
)
def test_guards_in_the_names_of_the_axes(condition: Callable[..., bool], texts: list[str]) -> None:
    found, lines = taken(condition)
    normal = [t.replace("c*t", "t*c").replace("m != t", "t != m") for t in found]
    assert normal == texts
    assert all(line.startswith("test_trace_guards.py:") for line in lines)


def test_a_guard_on_an_axis_in_steps() -> None:
    found, _ = taken(lambda x, p, m: x.shape[1] == 16, Axis(name="t", multiple=4))
    assert found == ["t != 16"]


def test_what_is_asked_elsewhere() -> None:
    """Behind a guard that is broken, forward() may ask further."""

    def condition(x: Tensor, pair: Tensor, mask: Tensor) -> bool:
        return x.shape[1] > 7 and x.shape[1] == 13

    of = call(
        Asks(condition).eval(),
        (torch.randn(2, 9, 3), {"pair": (torch.zeros(1), torch.randn(3, 4))}),
        {"mask": torch.ones(1)},
    )
    axes = declare(of.feed, {"x": {1: Axis(name="t")}})
    found = elsewhere(of, axes, of.feed, Path(__file__).parent)
    assert not isinstance(found, str)
    assert {t for t in range(2, 20) if all(g.holds({"t": t}) for g in found)} == {*range(8, 20)} - {13}
    thirteen = {**of.feed, "x": torch.randn(2, 13, 3).numpy()}
    only = elsewhere(of, axes, thirteen, Path(__file__).parent)
    assert not isinstance(only, str)
    assert {t for t in range(2, 20) if all(g.holds({"t": t}) for g in only)} == {13}
    assert math.prod(thirteen["x"].shape) == 78


def test_of_a_long_axis_the_sizes_that_matter_are_tried() -> None:
    sizes = trace_guards._candidates(Dim(min=1, max=2**31 - 1), 100, {4096})
    assert {1, 99, 101, 4095, 4096, 4097, 2**31 - 1} <= set(sizes)
    assert len(sizes) < 300
