"""Tables of the HTML page. A cell is turned into text once, here; the browser searches and sorts the text it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from layerline.pipeline.report import LayerDiff, Measure, Order, Scalar
from layerline.views.formatting import shape

# Which end of a column is the worse one: "low" for decibels, "high" for errors; the others have none.
Kind = Literal["text", "verdict", "number", "low", "high"]
FAILED = "✗"
ROWS_AT_FIRST = 25
SHARE = "clipped"  # the column that holds a share of 1, and is shown in per cent
LONG = 48  # characters; a longer text is wrapped, as in page.js
MEASURES: Mapping[Measure, str] = {"rel_l2": "relative L2", "max_abs": "max |a-b|", "mean_abs": "mean |a-b|"}


@dataclass(frozen=True)
class Column:
    """A heading, and how its cells compare."""

    label: str
    kind: Kind = "text"


@dataclass(frozen=True)
class View:
    """One table: cells are text in the order shown at first; the first cell heads its row."""

    label: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[str]]


def figure(value: Scalar) -> str:
    """Any scalar as a person reads it; what was not measured is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _rarely(value) or f"{value:.4g}"
    return str(value)


def is_size(name: str) -> bool:
    """Whether a measurement counts bytes."""
    return "bytes" in name.split("_")


def amount(name: str, value: Scalar) -> str:
    """The value of a measurement as a person reads it; bytes in the largest unit that leaves a whole number."""
    if not is_size(name) or not isinstance(value, int | float) or isinstance(value, bool):
        return figure(value)
    count = float(value)
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def decibels(value: float | None) -> str:
    """A signal-to-noise ratio in dB; without any noise the two sides are equal."""
    if value is None:
        return ""
    return "equal" if value == math.inf else _rarely(value) or f"{round(value, 1) + 0.0:.1f}"


def error(value: float | None) -> str:
    """An error of any magnitude, to three digits."""
    if value is None:
        return ""
    return _rarely(value) or (f"{value:#.3g}".rstrip(".") if value else "0")


def similarity(value: float | None) -> str:
    """A cosine to six places, cut off and not rounded: only what is 1 reads 1."""
    if value is None:
        return ""
    return _rarely(value) or f"{math.trunc(value * 1e6) / 1e6:.6f}"


def outcome(passed: bool) -> str:
    """A verdict in words: colour alone says nothing in print or to a colour-blind reader."""
    return "passed" if passed else f"{FAILED} failed"


def verdict(record: LayerDiff) -> str:
    """Whether one value passed; empty where nothing is asked of it."""
    return "" if record.passed and record.tolerance is None else outcome(record.passed)


def heading(key: str) -> str:
    """The key of a measurement as a person reads it."""
    told = key.replace("sqnr_db", "SQNR dB").replace("samples_s", "samples/s")
    return " ".join("size" if word == "bytes" else word for word in told.split("_"))


def count(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def records_view(records: Iterable[LayerDiff], order: Order = "error") -> View:
    """Everything measured about each value of one stage, in an order; columns without any entry are left out.

    `order` is the value's place in the topological order.
    """
    placed = list(enumerate(records, 1))
    if order == "own":
        placed.sort(key=lambda p: p[1].own_severity)
    elif order == "error":
        placed.sort(key=lambda p: p[1].severity)
    rows = [record for _, record in placed]
    return filled(
        [
            (Column("layer"), [r.where for r in rows]),
            (Column("value"), [r.name for r in rows]),
            (Column("op"), [r.op for r in rows]),
            (Column("verdict", "verdict"), [verdict(r) for r in rows]),
            (Column("SQNR dB", "low"), [decibels(r.sqnr_db) for r in rows]),
            (Column(MEASURES["rel_l2"], "high"), [error(r.rel_l2) for r in rows]),
            (Column(MEASURES["max_abs"], "high"), [error(r.max_abs) for r in rows]),
            (Column(MEASURES["mean_abs"], "high"), [error(r.mean_abs) for r in rows]),
            (Column("cosine", "low"), [similarity(r.cosine) for r in rows]),
            (Column("tolerance", "number"), [error(r.tolerance) for r in rows]),
            (Column("judged by"), ["" if r.tolerance is None else MEASURES[r.judged] for r in rows]),
            (Column("NaN/Inf a", "high"), [str(r.nonfinite_a or "") for r in rows]),
            (Column("NaN/Inf b", "high"), [str(r.nonfinite_b or "") for r in rows]),
            (Column("one side only", "high"), [str(r.one_sided or "") for r in rows]),
            *_free_columns([r.extra for r in rows], worse="high"),
            (Column("shape"), [shape(r.shape, " × ") for r in rows]),
            (Column("dtype"), [r.dtype for r in rows]),
            (Column("order", "number"), [str(i) for i, _ in placed]),
        ]
    )


def free_view(rows: Sequence[Mapping[str, Scalar]]) -> View:
    """A stage's own list of rows; a column for every key, in order of first appearance."""
    return filled(_free_columns(rows, worse="number"))


def filled(columns: Sequence[tuple[Column, Sequence[str]]]) -> View:
    """A view of the columns that have any entry."""
    kept = [(column, cells) for column, cells in columns if any(cells)]
    return View("", tuple(column for column, _ in kept), list(zip(*(cells for _, cells in kept), strict=True)))


def grid(views: Sequence[View], caption: str, *, stage: str = "", follow: bool = False) -> str:
    """A table that is read as it is, and that page.js makes searchable, sortable and complete.

    Args:
        views: the first one is shown; the others can be chosen.
        caption: names the table, also for a screen reader.
        stage: set where the rows are a stage's records.
        follow: rows open into what every stage measured.
    """
    first = views[0]
    of = f' data-stage="{escape(stage)}"' if stage else ""
    shown, total = first.rows[:ROWS_AT_FIRST], len(first.rows)
    cut = "" if len(shown) == total else f"{len(shown)} of {total} rows"
    data = [
        {"label": v.label, "heads": [c.label for c in v.columns], "kinds": [c.kind for c in v.columns], "rows": v.rows}
        for v in views
    ]
    return (
        f'<div class="grid{" follow" if follow else ""}"{of}>'
        f'<div class="tools"></div>{scrolling(table(View("", first.columns, shown), caption), caption)}'
        f'<p class="count">{cut}</p>'
        f'<script type="application/json">{_embedded({"first": ROWS_AT_FIRST, "views": data})}</script></div>'
    )


def table(view: View, caption: str) -> str:
    """A plain HTML table."""
    heads = "".join(f'<th scope="col" class="{c.kind}">{escape(c.label)}</th>' for c in view.columns)
    body = "".join(f"<tr>{_row(view.columns, row)}</tr>" for row in view.rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def scrolling(inner: str, label: str) -> str:
    """What may be wider than the window scrolls by itself, also by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>'


def _row(columns: Sequence[Column], row: Sequence[str]) -> str:
    cells = [f'<th scope="row"><span>{escape(row[0])}</span></th>'] if row else []
    for column, text in zip(columns[1:], row[1:], strict=True):
        cells.append(f'<td class="{column.kind}{_look(column.kind, text)}">{escape(text)}</td>')
    return "".join(cells)


def _look(kind: Kind, text: str) -> str:
    if kind == "text":
        return " long" if len(text) > LONG else ""
    return " bad" if text.startswith(FAILED) else ""


def _free_columns(rows: Sequence[Mapping[str, Scalar]], *, worse: Kind) -> list[tuple[Column, list[str]]]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [_free_column(key, [row.get(key) for row in rows], worse) for key in keys]


def _free_column(key: str, cells: Sequence[Scalar], worse: Kind) -> tuple[Column, list[str]]:
    numbers = [float(c) for c in cells if isinstance(c, int | float) and not isinstance(c, bool)]
    if len(numbers) < sum(c is not None for c in cells):
        return Column(heading(key)), [figure(c) for c in cells]
    if key.endswith("_db"):
        return Column(heading(key), "low"), [decibels(None if c is None else float(c)) for c in cells]
    if key == SHARE:
        return Column(f"{key} %", worse), ["" if c is None else figure(100 * float(c)) for c in cells]
    return Column(heading(key), worse), [figure(c) for c in cells]


def _rarely(value: float) -> str:
    """The words for what is no finite number; empty for every other."""
    if math.isnan(value):
        return "NaN"
    return "" if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _embedded(data: object) -> str:
    """JSON inside a script element: without `<` nothing in it can end the element or open a comment."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
