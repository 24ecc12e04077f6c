"""Draws a figure for four widths; page.css shows the one that the window has room for.

Scaling one picture would shrink its letters too. Laying it out for each width keeps letters readable, and keeps labels
off the border and off each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

# User units; page.css keeps a unit between 0.83 and 1.17 pixels in windows of 400 pixels and more.
WIDTHS = (1160, 840, 600, 440)
LEFT, RIGHT = 80, 12  # beside the strips; the left margin holds the figures of the scale
TOP, HEAD, STRIP, GAP = 2, 24, 96, 12  # heights; HEAD is above each strip and holds its title
EDGE = 8  # from a strip's border to its highest and lowest point
TITLE = 10  # from the baseline of a title down to its strip
DOT = 4.5  # a dot's width in page.css; where they would touch, the line alone is drawn

_CHARACTER, _WIDE = 6.9, 11.5  # user units of a label's character: of a usual one, and of the widest ones


def at_each_width(draw: Callable[[int], Markup]) -> Markup:
    """The pictures that `draw` makes for each of WIDTHS, one after the other."""
    return Markup("").join(map(draw, WIDTHS))


def element(tag: str, inner: str = "", /, **attributes: str | float) -> Markup:
    """An element of a picture. Attributes and text are escaped; `inner` may be markup that was made here.

    `class_` stands for the attribute `class`, `text_anchor` for `text-anchor`.
    """
    written = Markup("")
    for name, value in attributes.items():
        text = value if isinstance(value, str) else f"{value:.9g}"
        written += Markup(' {}="{}"').format(name.strip("_").replace("_", "-"), text)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, written, inner)


def path(kind: str, d: str) -> Markup:
    return element("path", class_=kind, d=d)


def label(kind: str, x: float, y: float, text: str, /, **attributes: str) -> Markup:
    return element("text", text, class_=kind, x=x, y=y, **attributes)


def svg(width: int, height: float, label: str, body: Markup, /, **data: float) -> Markup:
    """A picture with a label for screen readers, and figures for page.js as data attributes."""
    attributes: dict[str, str | float] = {f"data_{name}": value for name, value in data.items()}
    view = f"0 0 {width} {height:g}"
    return element("svg", body, class_=f"w{width}", viewBox=view, role="img", aria_label=label, **attributes)


def title(text: str, top: float) -> Markup:
    """The title of the strip that begins at `top`."""
    return label("stage", 0, top - TITLE, text)


def tick(text: str, y: float, width: int) -> Markup:
    """A line across a strip with its label."""
    return path("tick", f"M{LEFT} {y:g}H{width - RIGHT}") + label("tick", LEFT - 6, y + 4, text)


@dataclass(frozen=True)
class Scale:
    """Places a point in a strip, in user units."""

    width: int  # of the picture
    first: float  # what is at the left end of the horizontal axis
    last: float  # what is at its right end
    low: float = 0.0  # the lowest value
    high: float = 0.0  # the highest value
    top: float = 0.0  # where the strip begins

    def x(self, place: float) -> float:
        extent = (self.last - self.first) or 1  # one place alone is drawn at the left
        return round(LEFT + (place - self.first) / extent * (self.width - RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        if self.high == self.low:
            return self.top + STRIP / 2
        share = (self.high - value) / (self.high - self.low)
        return round(self.top + EDGE + share * (STRIP - 2 * EDGE), 1)

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])

    def line(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The points of a line, as many as can be told apart."""
        return thinned([self.at(point) for point in points])


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
