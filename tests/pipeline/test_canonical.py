"""One encoding for every plain value: golden digests, and no two values that share one."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from layerline.pipeline.keys.canonical import digest, encode


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: Any = None


class Box(BaseModel):
    x: int
    y: Any = None


# Computed once; a change here means that every key of every project changes.
GOLDEN = {
    "nested": (
        {"train": {"epochs": 8, "lr": 4e-3, "tags": {"a", "b"}}, "profiles": [(1, 8), None, True]},
        "bf7a5c16946d4986a1b87b30431e9e153be0fa4edbe080c04897f99e47bb80cc",
    ),
    "empty": ({}, "b031601b41e2aea50c7aeabade325ef35f9d51ed280bc6ce0490e0895315ac44"),
    "text": ("straße ☃", "646b5e015ed59e5d3659abef0a8f446c17f3b22eeb32342d8a316f1e081e9d4d"),
    "array": (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        "c82790f3ed06b521d815511edfb204e68058bcfe43a916fd4e567887cdeb0663",
    ),
    "dataclass": (Point(1, frozenset({2, 3})), "81afbab49d930cc7c20b193de85ef6de6d5f9dc7101f5e222633dced7f5a9412"),
    "enum": (Color.RED, "dbc01474c95a36e5eb3b1b8eae81baf831b0ea2647bc6e87a7f88a84cbc61d3f"),
    "path": (Path("data/train.npz"), "e6075cb07c38f2d01fc59c2b9b33bb71921628f396c6a879fe06ace0c645127b"),
    "nan": (math.nan, "74ca34e8021820f0f5d181cf0d4e5fecf7131c5c36086d2b731bf80bd7c79a56"),
    "big": (2**70, "2429d21725a01d667b662e56b4b4975390fd5077436da8eaa69dec42c2a198e3"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_digests(name: str) -> None:
    value, expected = GOLDEN[name]
    assert digest(value) == expected


def test_the_encoding_is_what_it_says() -> None:
    assert encode([1, "é", None]) == b"l12:i1:1s2:\xc3\xa9n0:"
    assert encode({"b": True, "a": 0.5}) == b"m23:s1:af8:?\xe0\x00\x00\x00\x00\x00\x00s1:bt1:1"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_golden_digests_in_another_process_and_folder(seed: str, tmp_path: Path) -> None:
    program = "from tests.pipeline.test_canonical import GOLDEN, digest\nfor v, _ in GOLDEN.values(): print(digest(v))"
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [expected for _, expected in GOLDEN.values()], done.stderr


DIFFERENT = [
    *(None, True, False, 1, 0, -1, 1.0, 0.0, -0.0, math.nan, math.inf, -math.inf),
    *("", "1", "1.0", "True", "None", b"", b"1", Path("1"), Path("a/b"), "a/b"),
    *([], [1], ["1"], [1.0], [True], [[1]], [1, 2], [2, 1], [12], ["12"], ["1", "2"], [["1"], "2"], ["1", ["2"]]),
    *({1}, {"1"}, {}, {1: 1}, {"1": 1}, {1: "1"}, {"a": {"b": 1}}, {"a.b": 1}),
    *(Color.RED, Level.LOW, Point(1), Box(x=1), {"x": 1, "y": None}),
    *(np.array([1.0], np.float32), np.array([[1.0]], np.float32), np.array([1.0]), np.float32(1)),
    *(np.array([1], np.int64), np.array([1], np.uint64), np.array([0, 1], np.int8), np.array([256], np.int16)),
    *(np.array([], np.float32), np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32)),
    *(np.array([True]), np.array(["1"]), np.array([b"1"]), np.array(["2020-01-01"], "datetime64[D]")),
]


def test_values_that_differ_in_type_or_structure_differ() -> None:
    seen: dict[bytes, Any] = {}
    for value in DIFFERENT:
        assert encode(value) not in seen, f"{value!r} and {seen[encode(value)]!r} share an encoding"
        seen[encode(value)] = value


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1, 2], (1, 2)),
        ({1, 2, 3}, frozenset({3, 2, 1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (math.nan, float("-nan")),
        (np.float64(0.1), 0.1),
        (np.str_("a"), "a"),
        (np.float32(1.5), np.array(1.5, np.float32)),
        (np.array([1, 2], ">i4"), np.array([1, 2], "<i4")),
        (np.arange(6).reshape(2, 3).T.copy(), np.asfortranarray(np.arange(6).reshape(2, 3).T)),
        (np.arange(10)[::2], np.arange(0, 10, 2)),
        (PureWindowsPath("data\\a.npz"), PurePosixPath("data/a.npz")),
        (Path("./a"), Path("a")),
    ],
)
def test_values_that_mean_the_same_are_the_same(a: Any, b: Any) -> None:
    assert encode(a) == encode(b)


def test_order_of_sets_and_mappings_never_matters() -> None:
    words = [f"word{i}" for i in range(50)]
    assert encode(set(words)) == encode(frozenset(words[::-1]))
    assert encode(dict.fromkeys(words, 1)) == encode(dict.fromkeys(reversed(words), 1))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: 0,
        (i for i in (1,)),
        np.array([object()]),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
        np.longdouble(1),
        1j,
    ],
    ids=["object", "builtin", "function", "generator", "objects", "records", "padded", "complex"],
)
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="canonical form"):
        encode([value])


@pytest.mark.parametrize("path", [Path("/data/x"), PureWindowsPath("C:\\data"), PurePosixPath("/")])
def test_an_absolute_path_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match="absolute"):
        encode({"file": path})


def test_a_type_of_another_library_keeps_its_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    one, other = (np.zeros(2, t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
    assert encode(one) != encode(other)  # numpy calls both void


NUMBERS = st.booleans() | st.integers(-2, 12) | st.floats(-2, 2, width=16) | st.just(math.nan)
SCALARS = NUMBERS | st.none() | st.text("1a:l", max_size=3) | st.binary(max_size=2)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


def meaning(value: Any) -> Any:
    """What a value is under the stated rules, as Python can compare it."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else (value, math.copysign(1, value)))
    if isinstance(value, list | tuple):
        return ("list", tuple(map(meaning, value)))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(map(meaning, value)))
    if isinstance(value, dict):
        return ("dict", frozenset((meaning(k), meaning(v)) for k, v in value.items()))
    return (type(value).__name__, value)


@given(VALUES, VALUES)
def test_two_values_share_an_encoding_only_when_they_mean_the_same(a: Any, b: Any) -> None:
    assert (encode(a) == encode(b)) == (meaning(a) == meaning(b))


@given(st.lists(VALUES, max_size=4), st.integers(0, 4))
def test_moving_a_bracket_changes_the_encoding(items: list[Any], at: int) -> None:
    if 0 < at < len(items):
        assert encode(items) != encode([items[:at], items[at:]]) != encode([*items[:at], items[at:]])
