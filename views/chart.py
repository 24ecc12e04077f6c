"""The SQNR of every layer as one SVG: a strip for each stage, all over the same topological order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from markupsafe import Markup

from layerline.pipeline.report import LayerDiff
from layerline.views import canvas
from layerline.views.canvas import GAP, HEAD, LEFT, RIGHT, STRIP, TOP, Scale
from layerline.views.follow import Followed

CLEAR = 17  # inside a strip, above and below the points
BOTTOM = 18  # below all strips, for the names of groups
FLAT = 8  # height of a strip whose layers are all equal: it has no curve to show
LEAST_SPAN_DB = 20.0
LEAST_DB, MOST_DB = -60.0, 200.0  # float32 can't lose or hold more; one figure further out would flatten all others
NAMED_AT_MOST = 3
LEAST_RUN, LEAST_NUMBERED_RUN = 44, 12  # user units; some of the numbered ones go without their number
BELOW = 15  # from a point down to the baseline of its name: clear of the line, which comes from above the lowest
BESIDE = 8  # from a point to its name
LEAST_BORDERED = 6  # user units a run of layers; closer borders would look like a grey field


@dataclass(frozen=True)
class Point:
    """One layer in one stage.

    Attributes:
        slot: its place in the topological order.
        db: from LEAST_DB to MOST_DB, figures beyond are drawn at that end; inf where both sides are equal, -inf where
            nothing comparable is left.
    """

    slot: int
    db: float
    passed: bool

    @property
    def place(self) -> tuple[float, float]:
        return self.slot + 0.5, self.db


@dataclass(frozen=True)
class Label:
    """A name beside its point: where it is anchored, and where point and name together begin and end on the x axis."""

    text: str
    x: float
    anchor: str
    left: float
    right: float


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers whose module paths begin alike: slots from `start` up to, not including, `stop`."""

    path: tuple[str, ...]
    start: int
    stop: int


def chart(rows: Sequence[Followed], stages: Sequence[str]) -> Markup:
    """The figure at each width, or nothing where no stage measured an SQNR.

    Args:
        rows: in topological order; each has one slot on the horizontal axis.
        stages: in the order they ran.
    """
    strips = {}
    for stage in stages:
        points = _points(rows, stage)
        if points:
            strips[stage] = points
    if not strips:
        return Markup("")
    return canvas.at_each_width(partial(_figure, rows, strips))


def _figure(rows: Sequence[Followed], strips: Mapping[str, Sequence[Point]], width: int) -> Markup:
    drawn = Markup("")
    top = TOP
    for stage, points in strips.items():
        scale = _scale(points, top + HEAD, len(rows), width)
        drawn += _strip(stage, points, rows, scale)
        top += HEAD + scale.height + GAP
    label = f"SQNR of {len(rows)} layers in topological order in {', '.join(strips)}; the next table has the figures"
    body = _groups(rows, top, width) + drawn + canvas.path("cursor", "")
    return canvas.svg(width, top + BOTTOM, label, body, slots=len(rows), left=LEFT, right=width - RIGHT, height=top)


def _points(rows: Sequence[Followed], stage: str) -> list[Point]:
    points = []
    for slot, row in enumerate(rows):
        record = row.records.get(stage)
        if record is not None and (record.sqnr_db is not None or record.one_sided):
            points.append(Point(slot, _level(record), record.passed))
    return points


def _level(record: LayerDiff) -> float:
    if record.sqnr_db is None or math.isnan(record.sqnr_db) or record.one_sided:
        return -math.inf
    if math.isinf(record.sqnr_db):
        return record.sqnr_db
    return min(max(record.sqnr_db, LEAST_DB), MOST_DB)


def _scale(points: Sequence[Point], top: int, slots: int, width: int) -> Scale:
    """Whole tens around the figures, at least LEAST_SPAN_DB apart, so that noise doesn't fill the strip."""
    finite = [point.db for point in points if math.isfinite(point.db)] or [0.0]
    low = min(math.floor(min(finite) / 10) * 10.0, MOST_DB - LEAST_SPAN_DB)
    high = max(math.ceil(max(finite) / 10) * 10.0, low + LEAST_SPAN_DB)
    all_equal = all(point.db == math.inf for point in points)
    height = FLAT if all_equal else STRIP
    return Scale(width, 0, slots, low, high, top, height, CLEAR)


def _strip(stage: str, points: Sequence[Point], rows: Sequence[Followed], scale: Scale) -> Markup:
    crosses = ""
    for point in points:
        if not point.passed:
            x, y = scale.at(point.place)
            crosses += f"M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8"
    body = canvas.title(stage, scale.top) + _ticks(points, scale)
    body += canvas.path("line", _line(points, scale)) + _dots(points, scale) + canvas.path("crosses", crosses)
    for point, label in _named(points, rows, scale):
        # At the lower edge no line passes, and there is no room below.
        baseline = scale.at(point.place)[1] + (4 if point.db == -math.inf else BELOW)
        kind = "name" if point.passed else "name bad"
        body += canvas.label(kind, label.x, baseline, label.text, text_anchor=label.anchor)
    return canvas.element("g", body)


def _line(points: Sequence[Point], scale: Scale) -> str:
    """Joins neighbours; the line breaks where a layer has no finite figure."""
    path = ""
    for finite, run in groupby(points, key=lambda point: math.isfinite(point.db)):
        if finite:
            path += f"M{canvas.joined(scale.line([point.place for point in run]))}"
    return path


def _dots(points: Sequence[Point], scale: Scale) -> Markup:
    """A dot for each layer that passed.

    Where dots have no room, the line alone shows the layers. Equal layers are on no line, so neighbours become a bar.
    """
    roomy = canvas.has_room_for_dots(len(points), scale.width)
    single = ""
    bars: list[list[Point]] = []
    previous_is_equal = False
    for point in points:
        is_equal = point.passed and point.db == math.inf
        if is_equal and previous_is_equal and not roomy:
            bars[-1].append(point)
        elif is_equal:
            bars.append([point])
        elif roomy and point.passed:
            x, y = scale.at(point.place)
            single += f"M{x:g} {y:g}h0"
        previous_is_equal = is_equal
    joined = ""
    for bar in bars:
        joined += f"M{canvas.joined([scale.at(bar[0].place)])}H{scale.at(bar[-1].place)[0]:g}"
    return canvas.path("dots", single) + canvas.path("dots equal", joined)


def _named(points: Sequence[Point], rows: Sequence[Followed], scale: Scale) -> list[tuple[Point, Label]]:
    """The points that get a name: the worst failing ones whose names don't overlap, or else the lowest."""
    named: list[tuple[Point, Label]] = []
    for point in sorted(points, key=lambda point: point.db):
        if point.passed or len(named) == NAMED_AT_MOST:
            continue
        label = _label_of(point, rows[point.slot], scale)
        if all(label.right < other.left or label.left > other.right for _, other in named):
            named.append((point, label))
    if named:
        return named
    lowest = min(points, key=lambda point: point.db)
    if not math.isfinite(lowest.db):
        return []
    return [(lowest, _label_of(lowest, rows[lowest.slot], scale))]


def _label_of(point: Point, row: Followed, scale: Scale) -> Label:
    """The name of a point, to its left in the right half of the strip."""
    x = scale.x(point.slot + 0.5)
    is_left = point.slot + 0.5 > scale.last / 2
    if is_left:
        text = canvas.shortened(row.layer, x - LEFT - BESIDE)
        return Label(text, x - BESIDE, "end", x - BESIDE - canvas.span(text), x + 4)
    text = canvas.shortened(row.layer, scale.width - x - BESIDE)
    return Label(text, x + BESIDE, "start", x - 4, x + BESIDE + canvas.span(text))


def _ticks(points: Sequence[Point], scale: Scale) -> Markup:
    levels = {point.db for point in points}
    # Figures beyond the limits are drawn at the limit, which its tick says.
    high, low = f"{scale.high:.0f} dB", f"{scale.low:.0f}"
    if MOST_DB in levels:
        high = f"≥ {high}"
    if LEAST_DB in levels:
        low = f"≤ {low}"
    ticks = Markup("")
    if math.inf in levels:
        ticks += canvas.tick("equal", scale.y(math.inf), scale.width)
    if any(map(math.isfinite, levels)):
        ticks += canvas.tick(high, scale.y(scale.high), scale.width)
        ticks += canvas.tick(low, scale.y(scale.low), scale.width)
    if -math.inf in levels:
        ticks += canvas.tick("NaN", scale.y(-math.inf), scale.width)
    return ticks


def _groups(rows: Sequence[Followed], bottom: int, width: int) -> Markup:
    """Borders and names of the runs of layers whose module paths begin alike; long runs are named first."""
    drawn = Markup("")
    written: list[tuple[float, float]] = []
    scale = Scale(width, 0, len(rows))
    runs = _runs([tuple(row.layer.split(".")) for row in rows], 0, len(rows), 1, scale)
    for run in sorted(runs, key=lambda run: run.start - run.stop):
        left, right = scale.x(run.start), scale.x(run.stop)
        text = _label(run.path, right - left)
        middle, half = (left + right) / 2, canvas.span(text) / 2
        if run.start and right - left >= LEAST_BORDERED:
            drawn += canvas.path("border", f"M{left:g} {TOP}V{bottom}")
        is_free = all(middle + half <= begin or middle - half >= end for begin, end in written)
        if is_free and half <= middle <= width - half:
            drawn += canvas.label("group", middle, bottom + 12, text)
            written.append((middle - half, middle + half))
    return drawn


def _runs(paths: Sequence[tuple[str, ...]], start: int, stop: int, depth: int, scale: Scale) -> list[LayerRun]:
    """The layers from `start` to `stop` as runs, split to the depth at which their names still have room."""
    runs: list[LayerRun] = []
    begin = start
    for beginning, group in groupby(paths[start:stop], key=lambda path: path[:depth]):
        end = begin + len(list(group))
        inner: list[LayerRun] = []
        if any(len(path) > depth for path in paths[begin:end]):
            inner = _runs(paths, begin, end, depth + 1, scale)
        if inner and _have_room(inner, scale):
            runs += inner
        else:
            runs.append(LayerRun(beginning, begin, end))
        begin = end
    return runs


def _have_room(runs: Sequence[LayerRun], scale: Scale) -> bool:
    width = scale.x(runs[-1].stop) - scale.x(runs[0].start)
    if all(run.path[-1].isdigit() for run in runs):
        return len(runs) * LEAST_NUMBERED_RUN < width
    if len(runs) * LEAST_RUN >= width:
        return False
    return all(_fits(run.path, scale.x(run.stop) - scale.x(run.start)) for run in runs)


def _fits(path: Sequence[str], width: float) -> bool:
    return canvas.span(".".join(path)) < width


def _label(path: Sequence[str], width: float) -> str:
    """The path where there is room, or else its last part; a number says nothing without the part before it."""
    if _fits(path, width):
        return ".".join(path)
    last = path[-2:] if path[-1].isdigit() else path[-1:]
    dots = "…" if len(last) < len(path) else ""
    return dots + ".".join(last)
