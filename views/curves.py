"""What training looked like, step by step, as one SVG: the deploy gap above all, then loss and learning rate.

The deploy gap is the metric of the weights that are trained less that of the weights that would ship. A strip is drawn
for what was measured, and for nothing else.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from layerline.views.chart import DOTS_UP_TO, GAP, LEFT, STRIP, TOP, WIDTH
from layerline.views.grid import figure

RIGHT = WIDTH - 148  # of it stand the last values
EDGE = 8  # from a strip's border to its highest and lowest point
APART = 14  # between the baselines of two labels
AXIS = 24
STEPS_MARKED = 8

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One column of the log. `kind` is its class in page.css."""

    column: str
    label: str
    kind: str


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

    first: float
    last: float
    low: float = 0.0
    high: float = 0.0
    top: float = 0.0

    def x(self, step: float) -> float:
        return round(LEFT + (step - self.first) / ((self.last - self.first) or 1) * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        if self.high == self.low:
            return self.top + STRIP / 2
        return round(self.top + EDGE + (self.high - value) / (self.high - self.low) * (STRIP - 2 * EDGE), 1)

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])


def curves(log: str) -> str:
    """The figure of a training log (the text of metrics.csv), or nothing where it holds no step."""
    rows = list(csv.DictReader(log.splitlines()))
    found = {line.column: _points(rows, line.column) for strip in STRIPS for line in strip.lines}
    strips = [s for s in STRIPS if any(found[line.column] for line in s.lines)]
    if not strips:
        return ""
    steps = [step for points in found.values() for step, _ in points]
    axis = Scale(min(steps), max(steps))
    bottom = TOP + len(strips) * (STRIP + GAP) - GAP
    body = [_axis(axis, bottom)]
    for i, strip in enumerate(strips):
        values = [v for line in strip.lines for _, v in found[line.column]] + [0.0] * strip.zero
        scale = Scale(axis.first, axis.last, min(values), max(values), TOP + i * (STRIP + GAP))
        body.append(_strip(strip, [(line, points) for line in strip.lines if (points := found[line.column])], scale))
    ends = ", ".join(
        f"{strip.title} {line.label} {figure(points[-1][1])}".replace("  ", " ")
        for strip in strips
        for line in strip.lines
        if (points := found[line.column])
    )
    label = f"{', '.join(s.title for s in strips)} over steps {axis.first:g} to {axis.last:g}; in the end {ends}"
    size = f'viewBox="0 0 {WIDTH} {bottom + AXIS}"'
    return f'<svg class="curves" {size} role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def validated(log: str) -> bool:
    """Whether the metric of what would ship was ever taken."""
    return any(row.get("metric_deploy") for row in csv.DictReader(log.splitlines()))


def thinned(points: Points, scale: Scale) -> list[tuple[float, float]]:
    """Points of a line as they lie: of those in one column of the picture the lowest and the highest, so that no spike
    is lost."""
    kept: list[tuple[float, float]] = []
    for _, column in groupby(points, key=lambda p: round(scale.x(p[0]))):
        inside = list(column)
        ends = {min(inside, key=lambda p: p[1]), max(inside, key=lambda p: p[1])}
        kept += [scale.at(p) for p in sorted(ends)]
    return kept


def _points(rows: Sequence[Mapping[str, str]], column: str) -> Points:
    """What was measured; a value that is not finite has no place on a scale."""
    found = [(float(row.get("step") or "nan"), float(row.get(column) or "nan")) for row in rows]
    return [point for point in found if all(map(math.isfinite, point))]


def _strip(strip: Strip, lines: Sequence[tuple[Line, Points]], scale: Scale) -> str:
    marks = {scale.low, scale.high}
    if strip.zero:  # which stands for what is too near it to be written beside it
        marks = {0.0} | {v for v in marks if abs(scale.y(v) - scale.y(0.0)) >= APART}
    ticks = "".join(
        f'<path class="tick" d="M{LEFT} {scale.y(v):g}H{RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{scale.y(v) + 3.5:g}">{figure(v)}</text>'
        for v in sorted(marks)
    )
    drawn = "".join(_line(line, points, scale, dotted=strip.filled) for line, points in lines)
    title = f'<text class="stage" x="0" y="{scale.top + STRIP / 2 + 4:g}">{strip.title}</text>'
    area = _area(lines, scale) if strip.filled and len(lines) == len(strip.lines) else ""
    return f"<g>{ticks}{area}{drawn}{title}{_labels(lines, scale)}</g>"


def _area(lines: Sequence[tuple[Line, Points]], scale: Scale) -> str:
    """Between two lines, or from one to zero."""
    upper = thinned(lines[0][1], scale)
    if len(lines) == 2:
        lower = thinned(lines[1][1], scale)
    else:
        lower = [(upper[0][0], scale.y(0.0)), (upper[-1][0], scale.y(0.0))]
    return f'<path class="area" d="M{_joined([*upper, *reversed(lower)])}Z"/>'


def _line(line: Line, points: Points, scale: Scale, *, dotted: bool) -> str:
    path = f'<path class="line {line.kind}" d="M{_joined(thinned(points, scale))}"/>'
    if len(points) > 1 and not (dotted and len(points) <= DOTS_UP_TO):
        return path
    dots = (
        f'<path class="dots {line.kind}" d="M{_joined([scale.at(point)])}h0">'
        f"<title>step {point[0]:g}: {line.label} {figure(point[1])}</title></path>"
        for point in points
    )
    return path + "".join(dots)


def _labels(lines: Sequence[tuple[Line, Points]], scale: Scale) -> str:
    """The last value of each line at its end, kept apart."""
    ends = sorted((scale.y(p[-1][1]), line.kind, f"{line.label} {figure(p[-1][1])}") for line, p in lines
                  if line.kind != "raw")  # fmt: skip
    baseline, parts = -math.inf, []
    for y, kind, text in ends:
        baseline = max(y + 4, baseline + APART)
        parts.append(f'<text class="end {kind}" x="{RIGHT + 8}" y="{baseline:g}">{text.strip()}</text>')
    return "".join(parts)


def _axis(scale: Scale, bottom: float) -> str:
    """Round step numbers, at most STEPS_MARKED of them, and lines up through all strips."""
    rough = max((scale.last - scale.first) / STEPS_MARKED, 1)
    power = 10 ** math.floor(math.log10(rough))
    size = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    marks = range(math.ceil(scale.first / size) * size, math.floor(scale.last) + 1, size)
    return "".join(
        f'<path class="border" d="M{scale.x(step):g} {TOP}V{bottom}"/>'
        f'<text class="group" x="{scale.x(step):g}" y="{bottom + 16}">{step}</text>'
        for step in marks
    ) + f'<text class="tick" x="{LEFT - 6}" y="{bottom + 16}">step</text>'  # fmt: skip


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:g} {y:g}" for x, y in points)
