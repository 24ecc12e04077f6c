"""What training looked like, step by step, as one SVG: the deploy gap above all, then loss and learning rate.

The deploy gap is the metric of the weights that are trained less that of the weights that would ship. A strip is drawn
for what was measured, and for nothing else.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from layerline.views import canvas
from layerline.views.canvas import GAP, HEAD, LEFT, RIGHT, STRIP, TITLE, TOP
from layerline.views.grid import figure

EDGE = 8  # from a strip's border to its highest and lowest point
APART = 14  # between the baselines of two labels
AXIS = 18  # below all strips, for the steps
STEPS_MARKED = 8  # at most

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One column of the log. `kind` is its class in page.css."""

    column: str
    label: str
    kind: str


Lines = Sequence[tuple[Line, Points]]


@dataclass(frozen=True)
class Strip:
    """Lines over one scale.

    Attributes:
        zero: keeps zero in sight.
        filled: between its two lines, or from its one line to zero.
    """

    title: str
    lines: tuple[Line, ...]
    zero: bool = False
    filled: bool = False


STRIPS = (
    Strip(
        "metric",
        (Line("metric_online", "online", "online"), Line("metric_deploy", "would ship", "main")),
        filled=True,
    ),
    Strip("deploy gap", (Line("deploy_gap", "gap", "main"),), zero=True, filled=True),
    Strip("loss", (Line("loss", "", "raw"), Line("loss_smooth", "smoothed", "main"))),
    Strip("learning rate", (Line("lr", "", "main"),), zero=True),
)


@dataclass(frozen=True)
class Scale:
    """Where a step and a value lie, in user units."""

    width: int
    first: float
    last: float
    low: float = 0.0
    high: float = 0.0
    top: float = 0.0

    def x(self, step: float) -> float:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return round(LEFT + share * (self.width - RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        if self.high == self.low:
            return self.top + STRIP / 2
        return round(self.top + EDGE + (self.high - value) / (self.high - self.low) * (STRIP - 2 * EDGE), 1)

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])

    def path(self, points: Points) -> list[tuple[float, float]]:
        return canvas.thinned([self.at(point) for point in points])


def curves(log: str) -> str:
    """The figure of a training log (the text of metrics.csv) at each width, or nothing where it holds no step."""
    rows = list(csv.DictReader(log.splitlines()))
    found = {s: [(line, points) for line in s.lines if (points := _points(rows, line.column))] for s in STRIPS}
    strips = {strip: lines for strip, lines in found.items() if lines}
    return canvas.at_each_width(partial(_figure, strips)) if strips else ""


def _figure(strips: Mapping[Strip, Lines], width: int) -> str:
    steps = [step for lines in strips.values() for _, points in lines for step, _ in points]
    axis = Scale(width, min(steps), max(steps))
    bottom = TOP + len(strips) * (HEAD + STRIP + GAP)
    body = [_axis(axis, bottom)]
    for i, (strip, lines) in enumerate(strips.items()):
        values = [v for _, points in lines for _, v in points] + [0.0] * strip.zero
        top = TOP + i * (HEAD + STRIP + GAP) + HEAD
        body.append(_strip(strip, lines, replace(axis, low=min(values), high=max(values), top=top)))
    ends = ", ".join(
        f"{strip.title} {line.label} {figure(points[-1][1])}".replace("  ", " ")
        for strip, lines in strips.items()
        for line, points in lines
    )
    label = f"{', '.join(s.title for s in strips)} over steps {axis.first:g} to {axis.last:g}; in the end {ends}"
    return canvas.svg(width, bottom + AXIS, label, "".join(body))


def validated(log: str) -> bool:
    """Whether the metric of what would ship was ever taken."""
    return any(row.get("metric_deploy") for row in csv.DictReader(log.splitlines()))


def _points(rows: Sequence[Mapping[str, str]], column: str) -> Points:
    """What was measured; a value that is not finite has no place on a scale."""
    found = [(float(row.get("step") or "nan"), float(row.get(column) or "nan")) for row in rows]
    return [point for point in found if all(map(math.isfinite, point))]


def _strip(strip: Strip, lines: Lines, scale: Scale) -> str:
    marks = {scale.low, scale.high}
    if strip.zero:  # which stands for what is too near it to be written beside it
        marks = {0.0} | {v for v in marks if abs(scale.y(v) - scale.y(0.0)) >= APART}
    ticks = "".join(canvas.tick(figure(v), scale.y(v), scale.width) for v in sorted(marks))
    drawn = "".join(_line(line, points, scale, dotted=strip.filled) for line, points in lines)
    area = _area(lines, scale) if strip.filled and len(lines) == len(strip.lines) else ""
    return f"<g>{ticks}{area}{drawn}{canvas.title(strip.title, scale.top)}{_ends(lines, scale)}</g>"


def _area(lines: Lines, scale: Scale) -> str:
    """Between two lines, or from one to zero."""
    upper = scale.path(lines[0][1])
    if len(lines) == 2:
        lower = scale.path(lines[1][1])
    else:
        lower = [(upper[0][0], scale.y(0.0)), (upper[-1][0], scale.y(0.0))]
    return f'<path class="area" d="M{canvas.joined([*upper, *reversed(lower)])}Z"/>'


def _line(line: Line, points: Points, scale: Scale, *, dotted: bool) -> str:
    path = f'<path class="line {line.kind}" d="M{canvas.joined(scale.path(points))}"/>'
    if len(points) > 1 and not (dotted and canvas.has_room_for_dots(len(points), scale.width)):
        return path
    dots = (
        f'<path class="dots {line.kind}" d="M{canvas.joined([scale.at(point)])}h0">'
        f"<title>step {point[0]:g}: {line.label} {figure(point[1])}</title></path>"
        for point in points
    )
    return path + "".join(dots)


def _ends(lines: Lines, scale: Scale) -> str:
    """The last value of each line, above the end of the strip."""
    told = [(line.kind, f"{line.label} {figure(p[-1][1])}".strip()) for line, p in lines if line.kind != "raw"]
    spans = (f'<tspan class="{kind}" dx="{12 if i else 0}">{text}</tspan>' for i, (kind, text) in enumerate(told))
    return f'<text class="end" x="{scale.width - RIGHT}" y="{scale.top - TITLE:g}">{"".join(spans)}</text>'


def _axis(scale: Scale, bottom: float) -> str:
    """Round step numbers, as many as there is room for, and lines up through all strips."""
    widest = canvas.span(f"{scale.last:.0f}")
    most = min(max(int((scale.width - RIGHT - LEFT) / (widest + 8)), 1), STEPS_MARKED)
    rough = max((scale.last - scale.first) / most, 1)
    power = 10 ** math.floor(math.log10(rough))
    size = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    parts, written = [f'<text x="0" y="{bottom + 12}">step</text>'], 0.0
    for step in range(math.ceil(scale.first / size) * size, math.floor(scale.last) + 1, size):
        x, half = scale.x(step), canvas.span(str(step)) / 2
        middle = min(x, scale.width - half)  # the last one stays inside
        parts.append(f'<path class="border" d="M{x:g} {TOP + HEAD}V{bottom - GAP}"/>')
        if middle - half >= written:
            parts.append(f'<text class="group" x="{middle:g}" y="{bottom + 12}">{step}</text>')
            written = middle + half
    return "".join(parts)
