"""One description of the tables: columns with headings, rows of text. The terminal and the page both draw it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import compress
from typing import Any, Literal

from layerline.pipeline.report import CLIPPED, GAIN, LayerDiff, Order, Report, Scalar
from layerline.views import formatting
from layerline.views.formatting import MEASURES, decibels, error, figure, heading, shape

# Which end of a column is the worse one: "low" for decibels, "high" for errors; the others have none.
Kind = Literal["text", "verdict", "number", "low", "high"]

# A terminal drops the column with the smallest number first.
PAGE_ONLY = -1  # never on a terminal
_SHAPE, _MAX_ABS, _COSINE, _REL_L2, _EXTRA, _OP = 1, 2, 3, 4, 5, 1000
_DROP = {"network_layer": 0, "type": None, "precision": None}  # a layer of an engine usually has its node's name


@dataclass(frozen=True)
class Column:
    """A heading, and how its cells compare."""

    label: str  # the heading
    kind: Kind = "text"  # how cells are sorted and coloured
    drop: int | None = None  # a narrow terminal drops the column with the smallest number first; None always stays
    wrap: bool = False  # whether a narrow terminal may wrap its cells


@dataclass(frozen=True)
class TableView:
    """One table: cells are text in the order shown at first; the first cell heads its row."""

    label: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[str]]


def filled(columns: Sequence[Column], rows: Sequence[Sequence[str]], label: str = "") -> TableView:
    """A table without the columns that have no entry."""
    is_kept = [any(cells) for cells in zip(*rows, strict=True)]
    kept = tuple(compress(columns, is_kept))
    return TableView(label, kept, [tuple(compress(row, is_kept)) for row in rows])


def records_table(
    records: Sequence[LayerDiff],
    order: Order = "error",
    then: Mapping[str, LayerDiff] | None = None,
    top: int | None = None,
) -> TableView:
    """The measurements of one stage, one row a value; columns without any entry are left out.

    Args:
        records: in the network's order; the column `order` holds a value's place in it.
        then: the records of another run by value name, to be shown beside these.
    """
    placed = list(enumerate(records, 1))
    if order != "network":
        placed.sort(key=lambda pair: pair[1].severity_by(order))
    placed = placed[:top]
    extra = _free_columns([record.extra for _, record in placed], worse="high")
    columns = (
        Column("layer", wrap=True),
        Column("value", wrap=True),
        Column("op", drop=_OP),
        Column("verdict", "verdict"),
        Column("SQNR dB", "low"),
        Column("then dB", "low"),
        Column(MEASURES["rel_l2"], "high", _REL_L2),
        Column(MEASURES["max_abs"], "high", _MAX_ABS),
        Column(MEASURES["mean_abs"], "high", PAGE_ONLY),
        Column("cosine", "low", _COSINE),
        Column("tolerance", "number", PAGE_ONLY),
        Column("judged by", drop=PAGE_ONLY),
        Column("NaN/Inf a", "high", PAGE_ONLY),
        Column("NaN/Inf b", "high", PAGE_ONLY),
        Column("one side only", "high"),
        *(column for column, _ in extra.values()),
        Column("shape", drop=_SHAPE),
        Column("dtype", drop=PAGE_ONLY),
        Column("order", "number", PAGE_ONLY),
    )
    if then is not None:
        columns = (*columns[:4], replace(columns[4], label="now dB"), *columns[5:])
    rows = []
    for place, record in placed:
        earlier, judged = "", ""
        if then is not None and record.name in then:
            earlier = decibels(then[record.name].sqnr_db)
        if record.tolerance is not None:
            judged = MEASURES[record.judged]
        row = [record.where, record.name, record.op, formatting.verdict(record), decibels(record.sqnr_db), earlier]
        row += [error(record.rel_l2), error(record.max_abs), error(record.mean_abs)]
        row += [formatting.similarity(record.cosine), error(record.tolerance), judged]
        row += [str(number or "") for number in (record.nonfinite_a, record.nonfinite_b, record.one_sided)]
        row += [text(record.extra.get(key)) for key, (_, text) in extra.items()]
        rows.append([*row, shape(record.shape), record.dtype, str(place)])
    return filled(columns, rows)


def csv_text(report: Report, order: Order = "network", then: Report | None = None, top: int | None = None) -> str:
    """The table as CSV: columns are the fields of a record, with figures unrounded and an empty cell for what is None.

    Args:
        then: the same stage in another run; its SQNR becomes the column `then_sqnr_db`.
    """
    earlier = {record.name: record.sqnr_db for record in then.records} if then else {}
    rows: list[dict[str, Any]] = []
    for record in report.sorted(order)[:top]:
        row = {"layer": record.where, **asdict(record), "shape": "x".join(map(str, record.shape))}
        row["passed"] = record.passed
        if then is not None:
            row["then_sqnr_db"] = earlier.get(record.name)
        row.update(row.pop("extra"))
        rows.append(row)
    names = dict.fromkeys(["layer", "name"])  # as an ordered set
    for row in rows:
        names.update(dict.fromkeys(row))
    text = StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def free_table(rows: Sequence[Mapping[str, Scalar]]) -> TableView:
    """A stage's own list of rows; a column for every key, in order of first appearance."""
    columns = _free_columns(rows, worse="number")
    cells: list[list[str]] = [[] for _ in rows]
    for key, (_, text) in columns.items():
        for row, written in zip(rows, cells, strict=True):
            written.append(text(row.get(key)))
    return filled([column for column, _ in columns.values()], cells)


def _free_columns(
    rows: Sequence[Mapping[str, Scalar]], *, worse: Kind
) -> dict[str, tuple[Column, Callable[[Scalar], str]]]:
    """The column of each key, and how its cells are written."""
    texts: dict[str, bool] = {}
    for row in rows:
        for key, value in row.items():
            # One text makes the whole column text.
            texts[key] = texts.get(key, False) or isinstance(value, bool | str)
    columns: dict[str, tuple[Column, Callable[[Scalar], str]]] = {}
    for place, (key, is_text) in enumerate(texts.items()):
        kind, text = worse, figure
        if is_text:
            kind = "text"
        elif key == GAIN:
            text = _gain
        elif key.endswith("_db"):
            kind, text = "low", _decibels
        elif key in (CLIPPED, "clipped_there"):
            text = _percent
        # Of these columns a terminal drops the last one first.
        drop = _DROP.get(key, _EXTRA + len(texts) - place)
        columns[key] = (Column(heading(key), kind, drop), text)
    return columns


def _gain(value: Scalar) -> str:
    number = formatting.number(value)
    if number is None:
        return ""
    if number == math.inf:
        return "exact"
    return f"{round(number, 1) + 0.0:+.1f}"  # never -0.0


def _decibels(value: Scalar) -> str:
    return decibels(formatting.number(value))


def _percent(value: Scalar) -> str:
    return formatting.percent(formatting.number(value))
