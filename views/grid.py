"""Tables of the HTML page. A cell is turned into text once, here; the browser searches and sorts the text it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Formats any scalar; None, which was not measured, is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _nonfinite(value) or f"{value:.4g}"
    return str(value)


def is_size(name: str) -> bool:
    """Whether a measurement counts bytes."""
    return "bytes" in name.split("_")


def amount(name: str, value: Scalar) -> str:
    """Formats the value of a measurement; bytes in the largest unit that leaves a whole number."""
    if not is_size(name) or not isinstance(value, int | float) or isinstance(value, bool):
        return figure(value)
    size = float(value)
    for unit in ("B", "kB", "MB"):
        if size < 999.5:  # from here on three digits would round to 1000
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def decibels(value: float | None) -> str:
    """A signal-to-noise ratio in dB; infinity means that both sides are equal."""
    if value is None:
        return ""
    if value == math.inf:
        return "equal"
    # Adding 0.0 turns -0.0 into 0.0.
    return _nonfinite(value) or f"{round(value, 1) + 0.0:.1f}"


def error(value: float | None) -> str:
    """An error of any magnitude, to three digits."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return _nonfinite(value) or f"{value:#.3g}".rstrip(".")


def similarity(value: float | None) -> str:
    """A cosine to six places, truncated instead of rounded, so that only 1 reads 1."""
    if value is None:
        return ""
    return _nonfinite(value) or f"{math.trunc(value * 1e6) / 1e6:.6f}"


def outcome(passed: bool) -> str:
    """A verdict in words: colour alone says nothing in print or to a colour-blind reader."""
    return "passed" if passed else f"{FAILED} failed"


def verdict(record: LayerDiff) -> str:
    """Whether a value passed; empty where it has no tolerance."""
    if record.passed and record.tolerance is None:
        return ""
    return outcome(record.passed)


def heading(key: str) -> str:
    """The key of a measurement as words: `isolated_sqnr_db` reads `isolated SQNR dB`."""
    spelled = key.replace("sqnr_db", "SQNR dB").replace("samples_s", "samples/s")
    return " ".join("size" if word == "bytes" else word for word in spelled.split("_"))


def count(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def records_view(records: Iterable[LayerDiff], order: Order = "error") -> View:
    """All measurements of one stage, one row a value; columns without any entry are left out.

    The column `order` is the value's place in the network, whatever order the rows have.
    """
    placed = list(enumerate(records, 1))
    if order == "own":
        placed.sort(key=lambda pair: pair[1].own_severity)
    elif order == "error":
        placed.sort(key=lambda pair: pair[1].severity)
    rows = [record for _, record in placed]
    measured: list[tuple[Column, Callable[[LayerDiff], str]]] = [
        (Column("layer"), lambda r: r.where),
        (Column("value"), lambda r: r.name),
        (Column("op"), lambda r: r.op),
        (Column("verdict", "verdict"), verdict),
        (Column("SQNR dB", "low"), lambda r: decibels(r.sqnr_db)),
        (Column(MEASURES["rel_l2"], "high"), lambda r: error(r.rel_l2)),
        (Column(MEASURES["max_abs"], "high"), lambda r: error(r.max_abs)),
        (Column(MEASURES["mean_abs"], "high"), lambda r: error(r.mean_abs)),
        (Column("cosine", "low"), lambda r: similarity(r.cosine)),
        (Column("tolerance", "number"), lambda r: error(r.tolerance)),
        (Column("judged by"), lambda r: "" if r.tolerance is None else MEASURES[r.judged]),
        (Column("NaN/Inf a", "high"), lambda r: str(r.nonfinite_a or "")),
        (Column("NaN/Inf b", "high"), lambda r: str(r.nonfinite_b or "")),
        (Column("one side only", "high"), lambda r: str(r.one_sided or "")),
    ]
    described: list[tuple[Column, Callable[[LayerDiff], str]]] = [
        (Column("shape"), lambda r: shape(r.shape, " × ")),
        (Column("dtype"), lambda r: r.dtype),
    ]
    return filled(
        [
            *((column, list(map(text, rows))) for column, text in measured),
            *_free_columns([record.extra for record in rows], worse="high"),
            *((column, list(map(text, rows))) for column, text in described),
            (Column("order", "number"), [str(place) for place, _ in placed]),
        ]
    )


def free_view(rows: Sequence[Mapping[str, Scalar]]) -> View:
    """A stage's own list of rows; a column for every key, in order of first appearance."""
    return filled(_free_columns(rows, worse="number"))


def filled(columns: Sequence[tuple[Column, Sequence[str]]]) -> View:
    """A view of the columns that have any entry."""
    kept = [pair for pair in columns if any(pair[1])]
    rows = list(zip(*(cells for _, cells in kept), strict=True))
    return View("", tuple(column for column, _ in kept), rows)


def grid(views: Sequence[View], caption: str, *, stage: str = "", follow: bool = False) -> str:
    """A plain table, which page.js turns into a searchable and sortable one with all rows.

    Args:
        views: the first one is shown; the others can be chosen.
        caption: names the table, also for a screen reader.
        stage: set where the rows are a stage's records.
        follow: rows open into what every stage measured.
    """
    first = views[0]
    classes = "grid follow" if follow else "grid"
    stage_attribute = f' data-stage="{escape(stage)}"' if stage else ""
    shown, total = first.rows[:ROWS_AT_FIRST], len(first.rows)
    row_count = f"{len(shown)} of {total} rows" if len(shown) < total else ""
    data = []
    for view in views:
        heads = [column.label for column in view.columns]
        kinds = [column.kind for column in view.columns]
        data.append({"label": view.label, "heads": heads, "kinds": kinds, "rows": view.rows})
    return (
        f'<div class="{classes}"{stage_attribute}>'
        f'<div class="tools"></div>{scrolling(table(View("", first.columns, shown), caption), caption)}'
        f'<p class="count">{row_count}</p>'
        f'<script type="application/json">{_embedded({"first": ROWS_AT_FIRST, "views": data})}</script></div>'
    )


def table(view: View, caption: str) -> str:
    """A plain HTML table."""
    heads = "".join(f'<th scope="col" class="{c.kind}">{escape(c.label)}</th>' for c in view.columns)
    body = "".join(f"<tr>{_row(view.columns, row)}</tr>" for row in view.rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def scrolling(inner: str, label: str) -> str:
    """A region that scrolls by itself, also by keyboard, where its content is wider than the window."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>'


def _row(columns: Sequence[Column], row: Sequence[str]) -> str:
    if not row:
        return ""
    cells = [f'<th scope="row"><span>{escape(row[0])}</span></th>']
    for column, text in zip(columns[1:], row[1:], strict=True):
        cells.append(f'<td class="{column.kind}{_look(column.kind, text)}">{escape(text)}</td>')
    return "".join(cells)


def _look(kind: Kind, text: str) -> str:
    """The second class of a cell, with a space before it."""
    if kind == "text":
        return " long" if len(text) > LONG else ""
    return " bad" if text.startswith(FAILED) else ""


def all_keys(rows: Iterable[Mapping[str, Scalar]]) -> list[str]:
    """The keys of all rows, in order of first appearance."""
    keys: dict[str, None] = {}
    for row in rows:
        keys.update(dict.fromkeys(row))
    return list(keys)


def _free_columns(rows: Sequence[Mapping[str, Scalar]], *, worse: Kind) -> list[tuple[Column, list[str]]]:
    return [_free_column(key, rows, worse) for key in all_keys(rows)]


def _free_column(key: str, rows: Sequence[Mapping[str, Scalar]], worse: Kind) -> tuple[Column, list[str]]:
    cells = [row.get(key) for row in rows]
    numbers: list[float | None] = []
    for cell in cells:
        if cell is None:
            numbers.append(None)
        elif isinstance(cell, bool | str):  # one text makes the whole column text
            return Column(heading(key)), list(map(figure, cells))
        else:
            numbers.append(float(cell))
    if key.endswith("_db"):
        return Column(heading(key), "low"), list(map(decibels, numbers))
    if key == SHARE:
        return Column(f"{key} %", worse), [figure(None if n is None else 100 * n) for n in numbers]
    return Column(heading(key), worse), list(map(figure, cells))


def _nonfinite(value: float) -> str:
    """`NaN`, `inf` or `-inf`; empty for every finite number."""
    if math.isnan(value):
        return "NaN"
    if math.isfinite(value):
        return ""
    return "inf" if value > 0 else "-inf"


def _embedded(data: object) -> str:
    """JSON inside a script element: without `<` nothing in it can end the element or open a comment."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
