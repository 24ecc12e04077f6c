"""Training step by step as one SVG: metric and deploy gap, then loss and learning rate, as far as measured.

The deploy gap is the metric of the trained weights minus that of the weights that would ship. The convergence of a
calibration is drawn alike, over the samples read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from markupsafe import Markup

from layerline.pipeline.commands.lookup import LogRows
from layerline.pipeline.report import Scalar
from layerline.views import canvas
from layerline.views.canvas import GAP, HEAD, LEFT, RIGHT, STRIP, TITLE, TOP, Scale
from layerline.views.formatting import figure

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
    """Lines over one scale."""

    title: str
    lines: tuple[Line, ...]
    zero: bool = False  # keeps zero in sight
    dotted: bool = False  # measured now and then, so that its points are marked


STRIPS = (
    Strip(
        "metric", (Line("metric_online", "online", "online"), Line("metric_deploy", "would ship", "main")), dotted=True
    ),
    Strip("deploy gap", (Line("deploy_gap", "gap", "main"),), zero=True, dotted=True),
    Strip("loss", (Line("loss", "", "raw"), Line("loss_smooth", "smoothed", "main"))),
    Strip("learning rate", (Line("lr", "", "main"),), zero=True),
)
DRAWN = frozenset(line.column for strip in STRIPS for line in strip.lines) | {"step"}


CONVERGENCE_STRIPS = (
    Strip(
        "change of the scales",
        (Line("greatest_change", "greatest", "online"), Line("median_change", "median", "main")),
        zero=True,
    ),
    Strip("share of values that moved", (Line("moving", "", "main"),), zero=True),
    Strip("95 % interval of a scale, relative", (Line("interval", "", "main"),), zero=True),
)


def convergence(rows: Sequence[Mapping[str, Scalar]]) -> Markup:
    """The figure of a calibration: how far scales moved as more samples were read."""
    log = []
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        # The rows of a calibration count samples where a training counts steps.
        log.append({**numbers, "step": numbers.get("samples", math.nan)})
    return curves(log, CONVERGENCE_STRIPS, "samples")


def curves(rows: LogRows, drawn: Sequence[Strip] = STRIPS, axis_name: str = "steps") -> Markup:
    """The figure of a log at each width, or nothing where it holds no step."""
    strips = {}
    for strip in drawn:
        lines = [(line, _points(rows, line.column)) for line in strip.lines]
        # A training without validation has no metric, and no strip for one.
        measured = [(line, points) for line, points in lines if points]
        if measured:
            strips[strip] = measured
    if not strips:
        return Markup("")
    return canvas.at_each_width(partial(_figure, strips, axis_name))


def _figure(strips: Mapping[Strip, Lines], axis_name: str, width: int) -> Markup:
    steps: list[float] = []
    last_values: list[str] = []
    for strip, lines in strips.items():
        for line, points in lines:
            steps += [step for step, _ in points]
            name = f"{strip.title} {line.label}".strip()
            last_values.append(f"{name} {figure(points[-1][1])}")
    axis = Scale(width, min(steps), max(steps))
    bottom = TOP + len(strips) * (HEAD + STRIP + GAP)
    body = _axis(axis, bottom, axis_name)
    top = TOP + HEAD
    for strip, lines in strips.items():
        # One scale for all lines of a strip, so that they can be compared.
        values = [0.0] if strip.zero else []
        for _, points in lines:
            values += [value for _, value in points]
        body += _strip(strip, lines, replace(axis, low=min(values), high=max(values), top=top))
        top += HEAD + STRIP + GAP
    titles = ", ".join(strip.title for strip in strips)
    label = f"{titles} over {axis_name} {axis.first:g} to {axis.last:g}; in the end {', '.join(last_values)}"
    return canvas.svg(width, bottom + AXIS, label, body)


def validated(rows: LogRows) -> bool:
    """Whether the metric of the weights that would ship was ever measured."""
    return any("metric_deploy" in row for row in rows)


def _points(rows: LogRows, column: str) -> Points:
    """The measurements of a column. Values that are not finite are left out: they have no place on a scale."""
    points = []
    for row in rows:
        point = (row.get("step", math.nan), row.get(column, math.nan))
        if all(map(math.isfinite, point)):
            points.append(point)
    return points


def _strip(strip: Strip, lines: Lines, scale: Scale) -> Markup:
    marks = {scale.low, scale.high}
    if strip.zero:
        # Zero is always marked; another mark so near that the labels would overlap is left out.
        marks = {0.0, *(value for value in marks if abs(scale.y(value) - scale.y(0.0)) >= APART)}
    body = Markup("")
    for value in sorted(marks):
        body += canvas.tick(figure(value), scale.y(value), scale.width)
    for line, points in lines:
        body += _line(line, points, scale, dotted=strip.dotted)
    return canvas.element("g", body + canvas.title(strip.title, scale.top) + _ends(lines, scale))


def _line(line: Line, points: Points, scale: Scale, *, dotted: bool) -> Markup:
    """A line. With `dotted`, each point is a dot with a tooltip where there is room; a single point always is."""
    drawn = canvas.path(f"line {line.kind}", f"M{canvas.joined(scale.line(points))}")
    has_room = dotted and canvas.has_room_for_dots(len(points), scale.width)
    if has_room or len(points) == 1:
        for step, value in points:
            place = canvas.joined([scale.at((step, value))])
            tooltip = canvas.element("title", f"step {step:g}: {line.label} {figure(value)}")
            drawn += canvas.element("path", tooltip, class_=f"dots {line.kind}", d=f"M{place}h0")
    return drawn


def _ends(lines: Lines, scale: Scale) -> Markup:
    """The last value of each line, above the end of the strip."""
    spans = Markup("")
    for line, points in lines:
        if line.kind != "raw":
            text = f"{line.label} {figure(points[-1][1])}".strip()
            spans += canvas.element("tspan", text, class_=line.kind, dx=12 if spans else 0)
    return canvas.label("end", scale.width - RIGHT, scale.top - TITLE, spans)


def _axis(scale: Scale, bottom: float, name: str) -> Markup:
    """Round step numbers, as many as there is room for, and lines up through all strips."""
    widest = canvas.span(f"{scale.last:.0f}")
    most = min(max(int((scale.width - RIGHT - LEFT) / (widest + 8)), 1), STEPS_MARKED)
    interval = _round_interval(max((scale.last - scale.first) / most, 1))
    drawn = canvas.label("axis", 0, bottom + 12, name)
    written = 0.0  # the end of the last label
    for step in range(math.ceil(scale.first / interval) * interval, math.floor(scale.last) + 1, interval):
        x = scale.x(step)
        half = canvas.span(str(step)) / 2
        middle = min(x, scale.width - half)  # the last one stays inside
        drawn += canvas.path("border", f"M{x:g} {TOP + HEAD}V{bottom - GAP}")
        if middle - half >= written:
            drawn += canvas.label("group", middle, bottom + 12, str(step))
            written = middle + half
    return drawn


def _round_interval(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … that is at least `least`, which is 1 or more."""
    power: int = 10 ** math.floor(math.log10(least))
    for factor in (1, 2, 5):
        if power * factor >= least:
            return power * factor
    return power * 10
