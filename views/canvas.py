"""Draws a figure for four widths; page.css shows the one that the window has room for.

Scaling one picture would shrink its letters too. Laying it out for each width keeps letters readable, and keeps labels
off the border and off each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

WIDTHS = (1160, 840, 600, 440)
"""User units; page.css keeps a unit between 0.83 and 1.17 pixels in windows of 400 pixels and more."""
LEFT, RIGHT = 80, 12  # beside the strips; the left margin holds the figures of the scale
TOP, HEAD, STRIP, GAP = 2, 24, 96, 12  # heights; HEAD is above each strip and holds its title
TITLE = 10  # from the baseline of a title down to its strip
DOT = 4.5  # a dot's width in page.css; where they would touch, the line alone is drawn

_CHARACTER, _WIDE = 6.9, 11.5  # user units of a label's character: of a usual one, and of the widest ones


def at_each_width(draw: Callable[[int], str]) -> str:
    """The pictures that `draw` makes for each of WIDTHS, one after the other."""
    return "".join(map(draw, WIDTHS))


def svg(width: int, height: float, label: str, body: str, /, **data: float) -> str:
    """A picture with a label for screen readers, and figures for page.js as data attributes."""
    attributes = "".join(f' data-{name}="{value:g}"' for name, value in data.items())
    size = f'class="w{width}" viewBox="0 0 {width} {height:g}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}"{attributes}>{body}</svg>'


def title(text: str, top: float) -> str:
    """The title of the strip that begins at `top`."""
    return f'<text class="stage" x="0" y="{top - TITLE:g}">{escape(text)}</text>'


def tick(text: str, y: float, width: int) -> str:
    """A line across a strip with its label."""
    return (
        f'<path class="tick" d="M{LEFT} {y:g}H{width - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y + 4:g}">{text}</text>'
    )


def has_room_for_dots(count: int, width: int) -> bool:
    """Whether so many dots side by side stay apart."""
    return count * DOT <= width - LEFT - RIGHT


def span(text: str) -> float:
    """User units that a label takes, with some air."""
    wide = sum(c in "@%MWmw" for c in text)
    return (len(text) - wide) * _CHARACTER + wide * _WIDE + 6


def shortened(path: str, room: float) -> str:
    """The end of a module path that is too long for its room: whole parts where one fits, else single characters.

    The end is kept because it tells a module from its neighbours.
    """
    rest = cut = path
    while span(cut) > room and len(cut) > 2:
        rest = rest.partition(".")[2] or rest[1:]
        cut = f"…{rest}"
    return cut


def thinned(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest and the highest point of each column of the picture, so that no spike is lost."""
    kept: list[tuple[float, float]] = []
    for _, column in groupby(line, key=lambda point: round(point[0])):
        inside = list(column)
        lowest = min(inside, key=lambda point: point[1])
        highest = max(inside, key=lambda point: point[1])
        kept += sorted({lowest, highest})
    return kept


def joined(points: Sequence[tuple[float, float]]) -> str:
    """Points in the syntax of an SVG path."""
    return "L".join(f"{x:g} {y:g}" for x, y in points)
