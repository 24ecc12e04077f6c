"""Profiles: T27, T28 and everything else that must be told before a builder answers None."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layerline.backends.tensorrt.profiles import ShapeRange, Sizes, admitting, choose, resolve
from layerline.pipeline.config.field_types import Dim
from layerline.pipeline.errors import ConfigError, StageError

IMAGE = {"x": ("batch", 3, "h", "w")}


def bound(low: int, high: int, multiple: int = 1) -> Dim:
    return Dim(min=low, max=high, multiple=multiple)


BOUNDS = {"batch": bound(1, 16), "h": bound(32, 640, 32), "w": bound(32, 640, 32)}
FULL = {"batch": Sizes(1, 8, 16), "h": Sizes(32, 64, 640), "w": Sizes(32, 64, 640)}


def test_a_profile_by_dimension_covers_every_input_that_has_it() -> None:
    [profile] = resolve({"a": ("n", 3), "b": (2, "n")}, {}, [{"n": Sizes(1, 4, 8)}])
    assert profile == {"a": ShapeRange((1, 3), (4, 3), (8, 3)), "b": ShapeRange((2, 1), (2, 4), (2, 8))}


def test_without_a_request_one_profile_spans_the_bounds_in_multiples() -> None:
    [profile] = resolve(IMAGE, {**BOUNDS, "h": bound(40, 650, 32)}, [])
    assert profile["x"] == ShapeRange((1, 3, 64, 32), (8, 3, 352, 320), (16, 3, 640, 640))


def test_a_static_model_needs_no_profile() -> None:
    assert resolve({"x": (1, 3)}, {}, []) == ()
    assert resolve({"x": (1, 3)}, {}, [{}]) == ()


@pytest.mark.parametrize(
    ("inputs", "bounds", "requested", "told"),
    [
        ({"a": ("n", 3), "b": ("m", 3)}, {}, [{"n": Sizes(1, 2, 3)}], "b has no min/opt/max"),
        (IMAGE, {}, [{"batch": Sizes(1, 2, 3), "h": Sizes(1, 2, 3)}], "x has no min/opt/max: its dimension 'w'"),
        ({"b": ("m", 3)}, {}, [], "b has no min/opt/max"),
        ({"b": ("m", 3)}, {}, [{}], "b has no min/opt/max"),
        ({"a": (3,), "b": ("m",)}, {"n": bound(1, 2)}, [], "b has no min/opt/max"),
    ],
)
def test_t27_a_dynamic_input_without_a_profile_is_named(inputs, bounds, requested, told) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(inputs, bounds, requested)


@pytest.mark.parametrize("entry", [{"n": Sizes(0, 1, 2)}, {"n": Sizes(-1, 1, 2)}])
def test_t28_a_minimum_below_one_is_refused(entry) -> None:
    with pytest.raises(ConfigError, match=r"profiles\[0\].*min is (0|-1); an engine's sizes start at 1"):
        resolve({"a": ("n", 3)}, {}, [entry])


def test_t28_also_when_it_comes_from_the_signature() -> None:
    with pytest.raises(ConfigError, match="dimension n: min is 0"):
        resolve({"a": ("n", 3)}, {"n": bound(0, 4)}, [])


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 4, 3), (3, 2, 1)])
def test_min_opt_max_out_of_order_names_the_entry(sizes) -> None:
    with pytest.raises(ConfigError, match=r"profiles\[1\]\.n: expected min <= opt"):
        resolve({"a": ("n", 3)}, {}, [{"n": Sizes(1, 2, 3)}, {"n": Sizes(*sizes)}])


@pytest.mark.parametrize(("given", "meant"), [("bacth", "batch"), ("Batch", "batch"), ("hight", "h")])
def test_an_unknown_name_gets_the_nearest_one(given, meant) -> None:
    inputs = {"x": ("batch", 3, "height", "w")} if meant == "h" else IMAGE
    with pytest.raises(ConfigError, match=rf"no dynamic dimension '{given}'.*\n.*did you mean '{meant}"):
        resolve(inputs, {}, [{given: Sizes(1, 2, 3)}])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch": Sizes(1, 8, 17)}, "'batch' runs from 1 to 17, but the model was exported for 1 to 16"),
        ({"h": Sizes(31, 64, 640)}, "runs from 31 to 640"),
        ({"w": Sizes(32, 65, 640)}, "'w' takes multiples of 32, got 32/65/640"),
    ],
)
def test_the_signatures_bounds_hold(change, told) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(IMAGE, BOUNDS, [FULL | change])


def test_the_best_fitting_profile_is_chosen() -> None:
    profiles = resolve({"x": ("n", 3)}, {}, [{"n": Sizes(1, 1, 8)}, {"n": Sizes(1, 8, 32)}])
    assert [choose(profiles, {"x": (n, 3)}) for n in (1, 4, 5, 8, 9, 32)] == [0, 0, 1, 1, 1, 1]


def test_a_shape_outside_names_the_input_and_the_nearest_profile() -> None:
    inputs = {"x": ("n", 3), "y": ("m",)}
    profiles = resolve(
        inputs, {}, [{"n": Sizes(1, 2, 4), "m": Sizes(1, 2, 3)}, {"n": Sizes(8, 8, 16), "m": Sizes(1, 2, 3)}]
    )
    with pytest.raises(
        StageError, match=r"input x: .*\(7, 3\) fits no profile.*nearest is profile 1 of 2.*\(8, 3\) to"
    ):
        choose(profiles, {"x": (7, 3), "y": (2,)})
    with pytest.raises(StageError, match="input y"):
        choose(profiles, {"x": (8, 3), "y": (4,)})
    with pytest.raises(StageError, match="input x"):
        choose(profiles, {"x": (8,), "y": (3,)})


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_t28_an_empty_input_at_run_time_is_named(shape) -> None:
    with pytest.raises(StageError, match=r"input x: the shape .* has no elements"):
        choose([{"x": ShapeRange((1, 3), (2, 3), (4, 3))}], {"x": shape})


sizes = st.tuples(*[st.integers(1, 9)] * 3).map(lambda t: Sizes(*sorted(t)))


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9))
def test_what_is_chosen_admits_and_nothing_else_is_refused(pairs, n, m) -> None:
    profiles = resolve({"x": ("n", 2, "m")}, {}, [{"n": a, "m": b} for a, b in pairs])
    fits = [i for i, (a, b) in enumerate(pairs) if a.min <= n <= a.max and b.min <= m <= b.max]
    shapes = {"x": (n, 2, m)}
    assert admitting(profiles, shapes) == fits
    if fits:
        assert choose(profiles, shapes) in fits
    else:
        with pytest.raises(StageError):
            choose(profiles, shapes)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 16))
def test_the_default_profile_lies_within_the_bounds_on_multiples(low, extra, multiple) -> None:
    dim = bound(low, low + extra, multiple)
    assume(dim.max // multiple >= -(-dim.min // multiple))
    [profile] = resolve({"x": ("n",)}, {"n": dim}, [])
    a, b, c = profile["x"].sizes(0)
    assert dim.min <= a <= b <= c <= dim.max
    assert not any(s % multiple for s in (a, b, c))
    assert a - multiple < dim.min and c + multiple > dim.max
    # And asking for it explicitly is the same.
    assert resolve({"x": ("n",)}, {"n": dim}, [{"n": Sizes(a, b, c)}]) == ({"x": profile["x"]},)
