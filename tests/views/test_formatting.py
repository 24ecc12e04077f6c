"""Shapes as people read them: what has no name is ?, what is long is short, brackets where they mean something."""

from __future__ import annotations

import pytest

from layerline.views.formatting import LONGEST, brief, shape


@pytest.mark.parametrize(
    ("dim", "shown"),
    [
        (16, "16"),
        ("batch", "batch"),
        ("stateN_dim0", "stateN_dim0"),
        ("?", "?"),
        ("", "?"),
        ("unk__4", "?"),
        ("conv2d_473.tmp_0#2", "?"),
        ("/Shape_output_0#0", "?"),
        ("2*s34", "?"),
        ("u0", "?"),
        ("s", "s"),
        ("(((h - 1)//2)) + 1", "((((h - 1)//2)) + 1)"),
        ("((h - 1)//4)*w", "(((h - 1)//4)*w)"),
        ("(height//2)", "(height//2)"),
        ("2*((height//4))", "2*((height//4))"),
        ("h - (w - 1)", "(h - (w - 1))"),
        ("Min(64, seq)", "Min(64, seq)"),
        ("p2o.DynamicDimension.3", "DynamicDi….3"),
        ("p2o.DynamicDimension.3 + 1", "(DynamicDi….3 + 1)"),
        ("x-y z)", "x-y z)"),
    ],
)
def test_a_dimension(dim: int | str, shown: str) -> None:
    assert shape((8, dim)) == f"8×{shown}"


@pytest.mark.parametrize(
    "pair", [("encoder_sequence_length", "encoder_sequence_width"), ("a.Dimension.31", "a.Dimension.32")]
)
def test_names_cut_short_stay_apart(pair: tuple[str, str]) -> None:
    first, second = map(brief, pair)
    assert first != second and max(len(first), len(second)) <= LONGEST
