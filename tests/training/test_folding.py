"""Names that differ in one number are written as one, and every name can be read back."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layerline import ModelOptimizer
from layerline.training.setup.folding import folded
from layerline.training.setup.plan import LISTED


def unfolded(name: str) -> list[str]:
    """What a shell makes of the braces."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if found is None:
        return [name]
    before, ranges, after = found.groups()
    spans = [[int(n) for n in part.split("..")] for part in ranges.split(",")]
    return [f"{before}{i}{after}" for a, *b in spans for i in range(a, (b or [a])[0] + 1)]


@given(
    st.dictionaries(
        st.lists(
            st.sampled_from(["a", "b", "0", "1", "2", "3", "12", "007", "²", "9" * 5000]), min_size=1, max_size=4
        ).map(".".join),
        st.sampled_from(["x", "y"]),
    )
)
def test_nothing_is_lost_and_each_name_is_told_once(told: dict[str, str]) -> None:
    rows = list(folded(told))
    back = [(name, what) for text, _, what in rows for name in unfolded(text)]
    assert len(back) == len(told) and dict(back) == told
    assert all(count == len(unfolded(text)) for text, count, _ in rows)


def test_the_number_by_which_most_are_alike_is_folded() -> None:
    names = [f"stages.{i}.blocks.{j}.w" for i in range(2) for j in range(4)] + ["stages.7.blocks.0.w", "head"]
    assert [(text, count) for text, count, _ in folded(dict.fromkeys(names, 1))] == [
        ("stages.0.blocks.{0..3}.w", 4),
        ("stages.1.blocks.{0..3}.w", 4),
        ("stages.7.blocks.0.w", 1),
        ("head", 1),
    ]
    apart = {f"layer.{i}.w": ("decay" if i in (2, 3) else "no decay") for i in range(7)}
    assert [text for text, _, _ in folded(apart)] == ["layer.{0..1,4..6}.w", "layer.{2..3}.w"]


def layers(count: int) -> list[str]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    text = str(ModelOptimizer(model, {}).plan())
    return text[text.index("groups") : text.index("bytes")].splitlines()


def test_a_plan_of_many_parameters_is_folded_and_one_of_few_is_not() -> None:
    assert len([line for line in layers(LISTED // 2) if "decay" in line]) == LISTED
    many = layers(LISTED)
    assert many[1:3] == [
        "  {0..59}.weight  decay     weight               16 x 60",
        "  {0..59}.bias    no decay  bias                  4 x 60",
    ]
    assert "  step         0 to 999  1.000e-03" in many


def test_the_curve_has_a_line_for_each_rate() -> None:
    scheduler = {"name": "cosine", "total_steps": 101, "warmup_steps": 1}
    text = str(ModelOptimizer(nn.Linear(2, 2), {"scheduler": scheduler}).plan())
    assert len(re.findall(r"^  step +\d+  \d", text, re.M)) == 11
