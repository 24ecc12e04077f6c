"""The SQNR of every layer as one SVG: a strip for each stage, all over the same topological order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from layerline.pipeline.report import LayerDiff
from layerline.views.follow import Followed

WIDTH, LEFT, RIGHT = 1240, 104, 12
STRIP, GAP, CLEAR, TOP, BOTTOM = 96, 20, 17, 10, 30
FLAT = 22  # of a strip whose layers are all equal: nothing in it has a height
LEAST_SPAN_DB = 20.0
DOTS_UP_TO = 240
NAMED_AT_MOST = 3
LEAST_RUN, LEAST_NUMBERED_RUN = 44, 12  # user units; of numbered ones some go without their number
BELOW = 14  # from a point down to the baseline of its name: clear of the line, which comes from above the lowest
CHARACTER, WIDE = 6.6, 11.0  # widths of a label's character, in user units: in the mean, and of the widest ones
LEAST_BORDERED = 6  # user units a run of layers; borders closer than that are a grey field


@dataclass(frozen=True)
class Point:
    """One layer in one stage. `db` is inf where the two sides are equal, -inf where nothing comparable is left."""

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
    height: int = STRIP

    def x(self, slot: float) -> float:
        return round(LEFT + slot * (WIDTH - RIGHT - LEFT) / self.slots, 1)

    def y(self, db: float) -> float:
        if math.isinf(db):
            return self.top + (0.0 if db > 0 else self.height)
        return round(self.top + CLEAR + (self.high - db) / (self.high - self.low) * (self.height - 2 * CLEAR), 1)

    def at(self, point: Point) -> tuple[float, float]:
        return self.x(point.slot + 0.5), self.y(point.db)


def chart(rows: Sequence[Followed], stages: Sequence[str]) -> str:
    """The figure, or nothing where no stage measured an SQNR.

    Args:
        rows: in topological order; each has one slot on the horizontal axis.
        stages: in the order they ran.
    """
    strips = {stage: points for stage in stages if (points := _points(rows, stage))}
    if not strips:
        return ""
    drawn, top = [], TOP
    for stage, points in strips.items():
        scale = _scale(points, top, len(rows))
        drawn.append(_strip(stage, points, rows, scale))
        top += scale.height + GAP
    height = top + BOTTOM
    label = f"SQNR of {len(rows)} layers in topological order in {', '.join(strips)}; the next table has the figures"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" data-slots="{len(rows)}" '
        f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-height="{height - BOTTOM}">'
        f'{_groups(rows, height)}{"".join(drawn)}<path class="cursor" d=""/></svg>'
    )


def _points(rows: Sequence[Followed], stage: str) -> list[Point]:
    found = [(i, row.records.get(stage)) for i, row in enumerate(rows)]
    return [Point(i, _level(r), r.passed) for i, r in found if r is not None and (r.sqnr_db is not None or r.one_sided)]


def _level(record: LayerDiff) -> float:
    if record.sqnr_db is None or math.isnan(record.sqnr_db) or record.one_sided:
        return -math.inf
    return record.sqnr_db


def _scale(points: Sequence[Point], top: int, slots: int) -> Scale:
    """Whole tens around the figures, at least LEAST_SPAN_DB apart: noise is not blown up to fill the strip."""
    finite = [p.db for p in points if math.isfinite(p.db)] or [0.0]
    low = math.floor(min(finite) / 10) * 10.0
    height = FLAT if all(p.db == math.inf for p in points) else STRIP
    return Scale(low, max(math.ceil(max(finite) / 10) * 10.0, low + LEAST_SPAN_DB), top, slots, height)


def _strip(stage: str, points: Sequence[Point], rows: Sequence[Followed], scale: Scale) -> str:
    crosses = "".join(f"M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8" for x, y in (scale.at(p) for p in points if not p.passed))
    dots = [p for p in points if p.passed] if len(points) <= DOTS_UP_TO else []
    names = "".join(_name(p, rows[p.slot], scale) for p in _named(points, rows, scale))
    middle = scale.top + (15 if scale.height == FLAT else scale.height / 2)  # clear of the tick
    return (
        f'<g><text class="stage" x="0" y="{middle + 4:g}">{escape(stage)}</text>{_ticks(points, scale)}'
        f'<path class="line" d="{_line(points, scale)}"/>'
        f'<path class="dots" d="{_dots([p for p in dots if p.db != math.inf], scale)}"/>'
        f'<path class="dots equal" d="{_dots([p for p in dots if p.db == math.inf], scale)}"/>'
        f'<path class="crosses" d="{crosses}"/>{names}</g>'
    )


def _line(points: Sequence[Point], scale: Scale) -> str:
    """Joins neighbours; it breaks where a layer has no place on the scale."""
    runs = [list(run) for finite, run in groupby(points, key=lambda p: math.isfinite(p.db)) if finite]
    return "".join("M" + "L".join(f"{x:g} {y:g}" for x, y in map(scale.at, run)) for run in runs)


def _dots(points: Sequence[Point], scale: Scale) -> str:
    return "".join(f"M{x:g} {y:g}h0" for x, y in map(scale.at, points))


def _named(points: Sequence[Point], rows: Sequence[Followed], scale: Scale) -> list[Point]:
    """The points to write a name beside: the worst failing ones that leave each other room, or else the lowest."""
    named: dict[tuple[float, float], Point] = {}
    for point in sorted((p for p in points if not p.passed), key=lambda p: p.db):
        left, right = _extent(point, rows[point.slot], scale)
        if len(named) < NAMED_AT_MOST and all(right < a or left > b for a, b in named):
            named[left, right] = point
    lowest = min(points, key=lambda p: p.db)
    return list(named.values()) or ([lowest] if math.isfinite(lowest.db) else [])


def _extent(point: Point, row: Followed, scale: Scale) -> tuple[float, float]:
    """From where to where a point and the name beside it reach: to the left of the point in the right half."""
    x, width = scale.at(point)[0], _width(row.layer) + 8
    return (x - width, x + 4) if x > (LEFT + WIDTH) / 2 else (x - 4, x + width)


def _name(point: Point, row: Followed, scale: Scale) -> str:
    x, y = scale.at(point)
    left = x - _extent(point, row, scale)[0] > 4
    kind = "name" if point.passed else "name bad"
    return (
        f'<text class="{kind}" x="{x - 8 if left else x + 8:g}" y="{y + BELOW:g}" '
        f'text-anchor="{"end" if left else "start"}">{escape(row.layer)}</text>'
    )


def _ticks(points: Sequence[Point], scale: Scale) -> str:
    seen = {p.db for p in points}
    texts = {math.inf: "equal", scale.high: f"{scale.high:.0f} dB", scale.low: f"{scale.low:.0f}", -math.inf: "NaN"}
    wanted = [db for db in texts if (any(map(math.isfinite, seen)) if math.isfinite(db) else db in seen)]
    return "".join(
        f'<path class="tick" d="M{LEFT} {scale.y(db):g}H{WIDTH - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{scale.y(db) + 3.5:g}">{texts[db]}</text>'
        for db in wanted
    )


def _groups(rows: Sequence[Followed], height: int) -> str:
    """Borders and names of the runs of layers that share the beginning of their module path."""
    parts, written, scale = [], 0.0, Scale(0, 1, TOP, len(rows))
    for path, start, stop in _runs([tuple(row.layer.split(".")) for row in rows], 0, len(rows), 1):
        left, right = scale.x(start), scale.x(stop)
        middle = (left + right) / 2
        text = _label(path, right - left)
        if start and right - left >= LEAST_BORDERED:
            parts.append(f'<path class="border" d="M{left:g} {TOP}V{height - BOTTOM}"/>')
        if written <= middle - _width(text) / 2 and middle + _width(text) / 2 <= WIDTH:
            parts.append(f'<text class="group" x="{middle:g}" y="{height - 10}">{escape(text)}</text>')
            written = middle + _width(text) / 2
    return "".join(parts)


def _runs(
    paths: Sequence[tuple[str, ...]], start: int, stop: int, depth: int
) -> list[tuple[tuple[str, ...], int, int]]:
    """Runs of equal beginnings as (beginning, first slot, slot behind), each as deep as its parts find room."""
    found: list[tuple[tuple[str, ...], int, int]] = []
    at = start
    for beginning, run in groupby(paths[start:stop], key=lambda p: p[:depth]):
        end = at + len(list(run))
        inner = _runs(paths, at, end, depth + 1) if any(len(p) > depth for p in paths[at:end]) else []
        least = LEAST_NUMBERED_RUN if all(path[-1].isdigit() for path, _, _ in inner) else LEAST_RUN
        roomy = len(inner) * least < (end - at) * (WIDTH - RIGHT - LEFT) / len(paths)
        found += inner if inner and roomy else [(beginning, at, end)]
        at = end
    return found


def _label(path: Sequence[str], width: float) -> str:
    """The path where there is room, or else its last part; a number says nothing without the part before it."""
    kept = path if _width(".".join(path)) < width else path[-2 if path[-1].isdigit() else -1 :]
    return ("…" if len(kept) < len(path) else "") + ".".join(kept)


def _width(text: str) -> float:
    wide = sum(c in "@%MWmw" for c in text)
    return (len(text) - wide) * CHARACTER + wide * WIDE + 6
