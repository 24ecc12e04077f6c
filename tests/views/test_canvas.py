"""A figure fits its window: one of its pictures is shown, at a size at which letters can be read."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from layerline.views.canvas import (
    LEFT,
    RIGHT,
    WIDTHS,
    at_each_width,
    element,
    has_room_for_dots,
    shortened,
    span,
    svg,
    thinned,
)

STYLE = resources.files("layerline.views").joinpath("page.css").read_text("utf-8")
PRINTED = "  .w1160, .w600, .w440 { display: none; }\n  .w840 { display: block; }\n"
REM = 16


def shown(window: int) -> list[int]:
    """The widths whose pictures page.css shows in a window so wide: of its rules that apply the last one counts."""
    state: dict[str, str] = {}
    for line in STYLE.replace(PRINTED, "").splitlines():
        (limit,) = re.findall(r"^@media \(max-width: (\d+)px\)", line) or [str(window)]
        if window <= int(limit):
            state |= dict(re.findall(r"\.w(\d+) \{ display: (\w+); \}", line))
    return [int(width) for width, display in state.items() if display == "block"]


def room(window: int) -> float:
    """What page.css leaves the figures of a window."""
    padding = 0.9 * REM if window <= 640 else 1.4 * REM
    return min(window, 1320) - 2 * padding


@pytest.mark.parametrize("window", [*range(400, 1601, 10), 529, 531, 641, 744, 746, 1009, 1011])
def test_one_picture_is_shown_and_its_letters_are_readable(window: int) -> None:
    assert "main { max-width: 1320px; margin: 0 auto; padding: 2.2rem 1.4rem 4rem; }" in STYLE
    assert "svg { display: none; width: 100%; height: auto;" in STYLE
    assert "main { padding: 1.2rem .9rem 3rem; }" in STYLE and "svg text { font-size: 12px;" in STYLE
    (width,) = shown(window)
    assert 0.83 <= room(window) / width <= 1.17


def test_on_paper_one_picture_is_shown() -> None:
    assert PRINTED in STYLE.partition("@media print {")[2]
    assert {f"w{width}" for width in WIDTHS} == set(re.findall(r"w\d+", PRINTED))


def test_a_figure_is_drawn_for_each_width() -> None:
    assert at_each_width(lambda width: Markup("<{}>").format(width)) == "".join(f"<{width}>" for width in WIDTHS)
    assert svg(600, 84.5, "a < b", element("g", "&"), slots=7) == (
        '<svg class="w600" viewBox="0 0 600 84.5" role="img" aria-label="a &lt; b" data-slots="7"><g>&amp;</g></svg>'
    )


PATHS = [
    ("layer1.0.conv1", 1000.0, "layer1.0.conv1"),
    ("model.layers.31.self_attn.q_proj", 130.0, "…self_attn.q_proj"),
    ("model.layers.31.self_attn.q_proj", 70.0, "…q_proj"),
    ("model.layers.31.self_attn.q_proj", 45.0, "…proj"),
    ("encoder", 30.0, "…er"),
    ("encoder", 0.0, "…r"),
    ("x", 0.0, "x"),
]


@pytest.mark.parametrize(("path", "width", "kept"), PATHS)
def test_of_a_path_too_long_the_end_stays_in_whole_parts(path: str, width: float, kept: str) -> None:
    assert shortened(path, width) == kept


@given(st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="._@/")), st.floats(35, 500))
def test_a_shortened_label_fits_and_is_an_end(path: str, width: float) -> None:
    kept = shortened(path, width)
    assert span(kept) <= width or len(kept) <= 2
    assert path.endswith(kept.removeprefix("…")) and (kept == path) == (span(path) <= width or len(path) <= 2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4000), st.sampled_from(WIDTHS))
def test_thinning_keeps_every_spike(values: list[float], width: int) -> None:
    apart = (width - LEFT - RIGHT) / len(values)
    line = [(round(LEFT + i * apart, 1), v) for i, v in enumerate(values)]
    kept = thinned(line)
    assert set(kept) <= set(line) and len(kept) <= 2 * (width - LEFT - RIGHT + 1)
    assert kept == sorted(kept, key=lambda p: p[0])
    assert {min(v for _, v in kept), max(v for _, v in kept)} == {min(values), max(values)}


def test_dots_are_drawn_where_they_do_not_touch() -> None:
    most = [max(n for n in range(1000) if has_room_for_dots(n, width)) for width in WIDTHS]
    assert most == [237, 166, 112, 77], "of 4.5 user units each"
    assert "svg .dots { stroke: var(--strip); stroke-width: 4.5;" in STYLE
