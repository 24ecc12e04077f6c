"""The SQNR of every layer as one SVG: a strip for each stage, all over the same topological order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby

from layerline.pipeline.report import LayerDiff
from layerline.views import canvas
from layerline.views.canvas import GAP, HEAD, LEFT, RIGHT, STRIP, TOP
from layerline.views.follow import Followed

CLEAR, BOTTOM = 17, 18  # inside a strip, above and below what has a figure; below all strips, for the names of groups
FLAT = 8  # of a strip whose layers are all equal: nothing in it has a height
LEAST_SPAN_DB = 20.0
LEAST_DB, MOST_DB = -60.0, 200.0  # beyond what float32 can lose and hold; one figure out there would flatten all others
NAMED_AT_MOST = 3
LEAST_RUN, LEAST_NUMBERED_RUN = 44, 12  # user units; of numbered ones some go without their number
BELOW = 15  # from a point down to the baseline of its name: clear of the line, which comes from above the lowest
BESIDE = 8  # from a point to its name
LEAST_BORDERED = 6  # user units a run of layers; borders closer than that are a grey field


@dataclass(frozen=True)
class Point:
    """One layer in one stage. `db` is inf where the two sides are equal, -inf where nothing comparable is left, and
    else from LEAST_DB to MOST_DB: what lies beyond is drawn at that end."""

    slot: int
    db: float
    passed: bool


@dataclass(frozen=True)
class Scale:
    """Where a layer lies in one strip, in user units. Equal layers sit on its upper edge, lost ones on the lower."""

    low: float
    high: float
    top: int
    slots: int
    width: int
    height: int = STRIP

    def x(self, slot: float) -> float:
        return round(LEFT + slot * (self.width - RIGHT - LEFT) / self.slots, 1)

    def y(self, db: float) -> float:
        if math.isinf(db):
            return self.top + (0.0 if db > 0 else self.height)
        return round(self.top + CLEAR + (self.high - db) / (self.high - self.low) * (self.height - 2 * CLEAR), 1)

    def at(self, point: Point) -> tuple[float, float]:
        return self.x(point.slot + 0.5), self.y(point.db)


@dataclass(frozen=True)
class Label:
    """A name beside its point: to the left of it in the right half. `left` and `right` are how far both reach."""

    text: str
    left: float
    right: float
    before: bool


def chart(rows: Sequence[Followed], stages: Sequence[str]) -> str:
    """The figure at each width, or nothing where no stage measured an SQNR.

    Args:
        rows: in topological order; each has one slot on the horizontal axis.
        stages: in the order they ran.
    """
    strips = {stage: points for stage in stages if (points := _points(rows, stage))}
    return canvas.at_each_width(partial(_figure, rows, strips)) if strips else ""


def _figure(rows: Sequence[Followed], strips: Mapping[str, Sequence[Point]], width: int) -> str:
    drawn, top = [], TOP
    for stage, points in strips.items():
        scale = _scale(points, top + HEAD, len(rows), width)
        drawn.append(_strip(stage, points, rows, scale))
        top += HEAD + scale.height + GAP
    label = f"SQNR of {len(rows)} layers in topological order in {', '.join(strips)}; the next table has the figures"
    body = f'{_groups(rows, top, width)}{"".join(drawn)}<path class="cursor" d=""/>'
    return canvas.svg(width, top + BOTTOM, label, body, slots=len(rows), left=LEFT, right=width - RIGHT, height=top)


def _points(rows: Sequence[Followed], stage: str) -> list[Point]:
    found = [(i, row.records.get(stage)) for i, row in enumerate(rows)]
    return [Point(i, _level(r), r.passed) for i, r in found if r is not None and (r.sqnr_db is not None or r.one_sided)]


def _level(record: LayerDiff) -> float:
    if record.sqnr_db is None or math.isnan(record.sqnr_db) or record.one_sided:
        return -math.inf
    if math.isinf(record.sqnr_db):
        return record.sqnr_db
    return min(max(record.sqnr_db, LEAST_DB), MOST_DB)


def _scale(points: Sequence[Point], top: int, slots: int, width: int) -> Scale:
    """Whole tens around the figures, at least LEAST_SPAN_DB apart: noise is not blown up to fill the strip."""
    finite = [p.db for p in points if math.isfinite(p.db)] or [0.0]
    low = min(math.floor(min(finite) / 10) * 10.0, MOST_DB - LEAST_SPAN_DB)
    height = FLAT if all(p.db == math.inf for p in points) else STRIP
    return Scale(low, max(math.ceil(max(finite) / 10) * 10.0, low + LEAST_SPAN_DB), top, slots, width, height)


def _strip(stage: str, points: Sequence[Point], rows: Sequence[Followed], scale: Scale) -> str:
    crosses = "".join(f"M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8" for x, y in (scale.at(p) for p in points if not p.passed))
    names = "".join(_name(p, label, scale) for p, label in _named(points, rows, scale))
    return (
        f"<g>{canvas.title(stage, scale.top)}{_ticks(points, scale)}"
        f'<path class="line" d="{_line(points, scale)}"/>{_dots(points, scale)}'
        f'<path class="crosses" d="{crosses}"/>{names}</g>'
    )


def _line(points: Sequence[Point], scale: Scale) -> str:
    """Joins neighbours; it breaks where a layer has no place on the scale."""
    runs = [list(run) for finite, run in groupby(points, key=lambda p: math.isfinite(p.db)) if finite]
    return "".join(f"M{canvas.joined(canvas.thinned(list(map(scale.at, run))))}" for run in runs)


def _dots(points: Sequence[Point], scale: Scale) -> str:
    """A dot for each layer that passed. Where they have no room, equal ones, which no line joins, are bars."""
    roomy = canvas.has_room_for_dots(len(points), scale.width)
    dots = [p for p in points if roomy and p.passed and p.db != math.inf]
    runs = groupby(points, key=lambda p: (p.passed and p.db == math.inf, roomy and p.slot))
    bars = [list(run) for (equal, _), run in runs if equal]
    single = "".join(f"M{x:g} {y:g}h0" for x, y in map(scale.at, dots))
    joined = "".join(f"M{canvas.joined([scale.at(bar[0])])}H{scale.at(bar[-1])[0]:g}" for bar in bars)
    return f'<path class="dots" d="{single}"/><path class="dots equal" d="{joined}"/>'


def _named(points: Sequence[Point], rows: Sequence[Followed], scale: Scale) -> list[tuple[Point, Label]]:
    """The points to write a name beside: the worst failing ones that leave each other room, or else the lowest."""
    named: list[tuple[Point, Label]] = []
    for point in sorted((p for p in points if not p.passed), key=lambda p: p.db):
        label = _label_of(point, rows[point.slot], scale)
        if len(named) < NAMED_AT_MOST and all(label.right < o.left or label.left > o.right for _, o in named):
            named.append((point, label))
    lowest = min(points, key=lambda p: p.db)
    return named or ([(lowest, _label_of(lowest, rows[lowest.slot], scale))] if math.isfinite(lowest.db) else [])


def _label_of(point: Point, row: Followed, scale: Scale) -> Label:
    x, before = scale.x(point.slot + 0.5), point.slot + 0.5 > scale.slots / 2
    text = canvas.shortened(row.layer, (x - LEFT if before else scale.width - x) - BESIDE)
    reach = BESIDE + canvas.span(text)
    return Label(text, x - reach, x + 4, before) if before else Label(text, x - 4, x + reach, before)


def _name(point: Point, label: Label, scale: Scale) -> str:
    x, y = scale.at(point)
    baseline = y + (4 if point.db == -math.inf else BELOW)  # at the lower edge no line passes, and there is no room
    kind = "name" if point.passed else "name bad"
    return (
        f'<text class="{kind}" x="{x - BESIDE if label.before else x + BESIDE:g}" y="{baseline:g}" '
        f'text-anchor="{"end" if label.before else "start"}">{escape(label.text)}</text>'
    )


def _ticks(points: Sequence[Point], scale: Scale) -> str:
    seen = {p.db for p in points}
    high = f"{'≥ ' if MOST_DB in seen else ''}{scale.high:.0f} dB"
    low = f"{'≤ ' if LEAST_DB in seen else ''}{scale.low:.0f}"
    texts = {math.inf: "equal", scale.high: high, scale.low: low, -math.inf: "NaN"}
    wanted = [db for db in texts if (any(map(math.isfinite, seen)) if math.isfinite(db) else db in seen)]
    return "".join(canvas.tick(texts[db], scale.y(db), scale.width) for db in wanted)


def _groups(rows: Sequence[Followed], bottom: int, width: int) -> str:
    """Borders and names of the runs of layers that share the beginning of their module path, long runs first."""
    parts: list[str] = []
    written: list[tuple[float, float]] = []
    scale = Scale(0, 1, TOP, len(rows), width)
    runs = _runs([tuple(row.layer.split(".")) for row in rows], 0, len(rows), 1, scale)
    for path, start, stop in sorted(runs, key=lambda run: run[1] - run[2]):
        left, right = scale.x(start), scale.x(stop)
        text = _label(path, right - left)
        middle, half = (left + right) / 2, canvas.span(text) / 2
        if start and right - left >= LEAST_BORDERED:
            parts.append(f'<path class="border" d="M{left:g} {TOP}V{bottom}"/>')
        free = all(middle + half <= a or middle - half >= b for a, b in written)
        if free and half <= middle <= width - half:
            parts.append(f'<text class="group" x="{middle:g}" y="{bottom + 12}">{escape(text)}</text>')
            written.append((middle - half, middle + half))
    return "".join(parts)


def _runs(
    paths: Sequence[tuple[str, ...]], start: int, stop: int, depth: int, scale: Scale
) -> list[tuple[tuple[str, ...], int, int]]:
    """Runs of equal beginnings as (beginning, first slot, slot behind), each as deep as its parts find room."""
    found: list[tuple[tuple[str, ...], int, int]] = []
    at = start
    for beginning, run in groupby(paths[start:stop], key=lambda p: p[:depth]):
        end = at + len(list(run))
        inner = _runs(paths, at, end, depth + 1, scale) if any(len(p) > depth for p in paths[at:end]) else []
        numbered = all(path[-1].isdigit() for path, _, _ in inner)
        least = LEAST_NUMBERED_RUN if numbered else LEAST_RUN
        roomy = len(inner) * least < scale.x(end) - scale.x(at) and (
            numbered or all(_whole(path, scale.x(b) - scale.x(a)) for path, a, b in inner)
        )
        found += inner if inner and roomy else [(beginning, at, end)]
        at = end
    return found


def _whole(path: Sequence[str], width: float) -> bool:
    return canvas.span(".".join(path)) < width


def _label(path: Sequence[str], width: float) -> str:
    """The path where there is room, or else its last part; a number says nothing without the part before it."""
    kept = path if _whole(path, width) else path[-2 if path[-1].isdigit() else -1 :]
    return ("…" if len(kept) < len(path) else "") + ".".join(kept)
