"""The heat map: a row of cells for each stage, one for each layer in the network's order; darker is a larger error."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from markupsafe import Markup

from layerline.pipeline.report import LayerDiff
from layerline.views import canvas
from layerline.views.follow import Followed
from layerline.views.formatting import FAILED, decibels

# SQNR in dB where a lighter shade begins: 20 dB is an error of a tenth, and float32 alone leaves more than 100.
STEPS = (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 50.0, 60.0, 100.0)
BAD = "bad"
HEAD, CELL, GAP = 22, 20, 6  # heights of a stage's title and of its cells, and what is below them
TITLE = 6  # from the baseline of a title down to the cells
LEGEND, BOTTOM = 20, 18  # above all stages, and below them for the names of groups
LEGEND_CELL = 12
LEAST_APART = 6  # user units of a cell from which there is a gap beside it
LEAST_WRITTEN = 41  # user units of a cell that has room for its figure
LEAST_RUN, LEAST_NUMBERED_RUN = 44, 12  # user units; some of the numbered ones go without their number
LEAST_BORDERED = 6  # user units a run of layers; closer borders would look like a grey field


@dataclass(frozen=True)
class Cell:
    """The slots from `start` up to, not including, `stop`, and the worst record in them."""

    start: int
    stop: int
    record: LayerDiff

    @property
    def kind(self) -> str:
        """Its class in page.css."""
        if not self.record.passed:
            return BAD
        return f"h{bisect(STEPS, _level(self.record))}"


@dataclass(frozen=True)
class SlotAxis:
    """Places `count` slots side by side in a picture."""

    width: int
    count: int

    def x(self, slot: float) -> float:
        return round(slot / self.count * self.width, 1)


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers whose module paths begin alike: slots from `start` up to, not including, `stop`."""

    path: tuple[str, ...]
    start: int
    stop: int


def heat_map(rows: Sequence[Followed], stages: Sequence[str]) -> Markup:
    """The figure at each width, or nothing where no stage measured an SQNR.

    Args:
        rows: in topological order; each that was measured has one slot on the horizontal axis, as in page.js.
    """
    measured: dict[str, list[LayerDiff | None]] = {}
    rows = [row for row in rows if any(map(_measured, row.records.values()))]
    for stage in stages:
        records = [_measured(row.records.get(stage)) for row in rows]
        if any(records):
            measured[stage] = records
    if not measured:
        return Markup("")
    return canvas.at_each_width(partial(_figure, rows, measured))


def _measured(record: LayerDiff | None) -> LayerDiff | None:
    if record is None or (record.sqnr_db is None and record.passed):
        return None
    return record


def _level(record: LayerDiff) -> float:
    if record.sqnr_db is None or math.isnan(record.sqnr_db) or record.one_sided:
        return -math.inf
    return record.sqnr_db


def _text(record: LayerDiff) -> str:
    """The figure of a cell."""
    if record.one_sided:
        return "NaN"
    return decibels(record.sqnr_db)


def _severity(record: LayerDiff) -> tuple[bool, float]:
    return record.passed, _level(record)


def _figure(rows: Sequence[Followed], measured: Mapping[str, Sequence[LayerDiff | None]], width: int) -> Markup:
    slots = SlotAxis(width, len(rows))
    drawn = _legend()
    top = LEGEND
    for stage, records in measured.items():
        drawn += _title(stage, rows, records, top + HEAD - TITLE, width) + _cells(
            _binned(records, slots), top + HEAD, slots
        )
        top += HEAD + CELL + GAP
    label = (
        f"Errors of {len(rows)} layers in the network's order in {', '.join(measured)}; the next table has the figures"
    )
    body = _groups(rows, top, slots) + drawn + canvas.path("cursor", "")
    return canvas.svg(width, top + BOTTOM, label, body, slots=len(rows), height=top)


def _legend() -> Markup:
    """All shades, with the figures of the darkest and the lightest."""
    low, high = f"below {STEPS[0]:g} dB", f"{STEPS[-1]:g} dB or more"
    x = canvas.span(low) + 4
    drawn = canvas.label("legend", 0, 12, low)
    for level in range(len(STEPS) + 1):
        drawn += canvas.path(f"h{level}", f"M{x:g} 3h{LEGEND_CELL}v10h-{LEGEND_CELL}z")
        x += LEGEND_CELL + 1
    return drawn + canvas.label("legend", x + 6, 12, high)


def _title(stage: str, rows: Sequence[Followed], records: Sequence[LayerDiff | None], y: float, width: int) -> Markup:
    """The stage, and at the other end the name and figure of its worst layer."""
    slot, worst = min(
        ((slot, r) for slot, r in enumerate(records) if r is not None), key=lambda pair: _severity(pair[1])
    )
    name = canvas.shortened(stage, width / 2)
    drawn = canvas.label("stage", 0, y, name)
    level = _level(worst)
    if worst.passed and level == math.inf:
        return drawn + canvas.label("end", width, y, "all equal")
    kind, figure = "end", _text(worst)
    if math.isfinite(level):
        figure += " dB"
    if not worst.passed:
        kind, figure = f"end {BAD}", f"{FAILED} {figure}"
    layer = canvas.shortened(rows[slot].layer, width - canvas.span(name) - canvas.span(f"  {figure}") - 16)
    return drawn + canvas.label(kind, width, y, f"{layer}  {figure}")


def _binned(records: Sequence[LayerDiff | None], slots: SlotAxis) -> list[Cell]:
    """A cell for each record; where slots are narrower than a user unit, the worst of a unit is its cell."""
    bins = min(slots.count, slots.width)
    cells = []
    for i in range(bins):
        start, stop = i * slots.count // bins, (i + 1) * slots.count // bins
        inside = [record for record in records[start:stop] if record is not None]
        if inside:
            cells.append(Cell(start, stop, min(inside, key=_severity)))
    return cells


def _cells(cells: Sequence[Cell], top: float, slots: SlotAxis) -> Markup:
    """One path for each shade. Where cells are too narrow for a gap, neighbours of one shade are one area."""
    unit = slots.width / slots.count
    gap = int(unit >= LEAST_APART)
    areas: dict[str, list[tuple[float, float]]] = {}
    figures = Markup("")
    for cell in cells:
        left, right = slots.x(cell.start), slots.x(cell.stop) - gap
        area = areas.setdefault(cell.kind, [])
        if area and area[-1][1] == left:
            left, _ = area.pop()
        area.append((left, right))
        if unit >= LEAST_WRITTEN:
            figures += canvas.label(f"figure on-{cell.kind}", (left + right) / 2, top + 14, _text(cell.record))
    drawn = canvas.path("empty", f"M0 {top:g}H{slots.width}v{CELL}H0z")
    for kind, spans in areas.items():
        drawn += canvas.path(kind, "".join(f"M{left:g} {top:g}H{right:g}v{CELL}H{left:g}z" for left, right in spans))
    return canvas.element("g", drawn + figures)


def _groups(rows: Sequence[Followed], bottom: int, slots: SlotAxis) -> Markup:
    """Borders and names of the runs of layers whose module paths begin alike, as deep as the names have room."""
    paths = [tuple(row.layer.split(".")) for row in rows]
    runs = _runs(paths, 1)
    for depth in range(2, max(map(len, paths)) + 1):
        deeper = _runs(paths, depth)
        room = 0
        for run in deeper:
            room += LEAST_NUMBERED_RUN if run.path[-1].isdigit() else LEAST_RUN
        if room > slots.width:
            break
        runs = deeper
    drawn = Markup("")
    written: list[tuple[float, float]] = []
    # Long runs are named first; a name that would touch another one is left out.
    for run in sorted(runs, key=lambda run: run.start - run.stop):
        left, right = slots.x(run.start), slots.x(run.stop)
        text = _label(run.path, right - left)
        middle, half = (left + right) / 2, canvas.span(text) / 2
        if run.start and right - left >= LEAST_BORDERED:
            drawn += canvas.path("border", f"M{left:g} {LEGEND}V{bottom}")
        is_free = all(middle + half <= begin or middle - half >= end for begin, end in written)
        if is_free and half <= middle <= slots.width - half:
            drawn += canvas.label("group", middle, bottom + 12, text)
            written.append((middle - half, middle + half))
    return drawn


def _runs(paths: Sequence[tuple[str, ...]], depth: int) -> list[LayerRun]:
    """Neighbours whose paths are the same up to a depth."""
    runs: list[LayerRun] = []
    start = 0
    for path, group in groupby(paths, key=lambda path: path[:depth]):
        stop = start + len(list(group))
        runs.append(LayerRun(path, start, stop))
        start = stop
    return runs


def _label(path: Sequence[str], width: float) -> str:
    """The path where there is room, or else its last part; a number says nothing without the part before it."""
    whole = ".".join(path)
    last = path[-1:]
    if path[-1].isdigit():
        last = path[-2:]
    if canvas.span(whole) < width or len(last) == len(path):
        return whole
    return f"…{'.'.join(last)}"
