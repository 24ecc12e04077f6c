"""One description of the tables: columns with headings, rows of text. The terminal and the page both draw it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
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


_Cells = tuple[Column, Sequence[str]]


def filled(columns: Iterable[_Cells], label: str = "") -> TableView:
    """A table of the columns that have any entry."""
    kept = [(column, cells) for column, cells in columns if any(cells)]
    rows = list(zip(*(cells for _, cells in kept), strict=True))
    return TableView(label, tuple(column for column, _ in kept), rows)


def records_table(
    records: Sequence[LayerDiff],
    order: Order = "error",
    then: Mapping[str, LayerDiff] | None = None,
    top: int | None = None,
) -> TableView:
    """The measurements of one stage, one row a value; columns without any entry are left out.

    Args:
        records: in the network's order; the column `order` holds a value's place in it.
        order: how rows are sorted.
        then: the records of another run by value name, to be shown beside these.
        top: how many rows; None for all.
    """
    placed = list(enumerate(records, 1))
    if order != "network":
        placed.sort(key=lambda pair: pair[1].severity_by(order))
    placed = placed[:top]
    rows = [record for _, record in placed]

    def column(label: str, kind: Kind, drop: int | None, text: Callable[[LayerDiff], str]) -> _Cells:
        return Column(label, kind, drop), [text(record) for record in rows]

    columns = [
        (Column("layer", wrap=True), [record.where for record in rows]),
        (Column("value", wrap=True), [record.name for record in rows]),
        column("op", "text", _OP, lambda r: r.op),
        column("verdict", "verdict", None, formatting.verdict),
        column("SQNR dB" if then is None else "now dB", "low", None, lambda r: decibels(r.sqnr_db)),
    ]
    if then is not None:
        earlier = [then.get(record.name) for record in rows]
        cells = [decibels(record.sqnr_db) if record else "" for record in earlier]
        columns.append((Column("then dB", "low"), cells))
    columns += [
        column(MEASURES["rel_l2"], "high", _REL_L2, lambda r: error(r.rel_l2)),
        column(MEASURES["max_abs"], "high", _MAX_ABS, lambda r: error(r.max_abs)),
        column(MEASURES["mean_abs"], "high", PAGE_ONLY, lambda r: error(r.mean_abs)),
        column("cosine", "low", _COSINE, lambda r: formatting.similarity(r.cosine)),
        column("tolerance", "number", PAGE_ONLY, lambda r: error(r.tolerance)),
        column("judged by", "text", PAGE_ONLY, lambda r: "" if r.tolerance is None else MEASURES[r.judged]),
        column("NaN/Inf a", "high", PAGE_ONLY, lambda r: str(r.nonfinite_a or "")),
        column("NaN/Inf b", "high", PAGE_ONLY, lambda r: str(r.nonfinite_b or "")),
        column("one side only", "high", None, lambda r: str(r.one_sided or "")),
        *_free_columns([record.extra for record in rows], worse="high"),
        column("shape", "text", _SHAPE, lambda r: shape(r.shape)),
        column("dtype", "text", PAGE_ONLY, lambda r: r.dtype),
        (Column("order", "number", PAGE_ONLY), [str(place) for place, _ in placed]),
    ]
    return filled(columns)


def csv_text(report: Report, order: Order = "network", then: Report | None = None, top: int | None = None) -> str:
    """The table as CSV: columns are the fields of a record, with figures unrounded and an empty cell for what is None.

    Args:
        report: the report.
        order: how rows are sorted.
        then: the same stage in another run; its SQNR becomes the column `then_sqnr_db`.
        top: how many rows; None for all.
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
    return filled(_free_columns(rows, worse="number"))


def _free_columns(rows: Sequence[Mapping[str, Scalar]], *, worse: Kind) -> list[_Cells]:
    keys: dict[str, None] = {}  # as an ordered set
    for row in rows:
        keys.update(dict.fromkeys(row))
    columns = []
    for place, key in enumerate(keys):
        column, cells = _free_column(key, [row.get(key) for row in rows], worse)
        # Of these columns a terminal drops the last one first.
        drop = _DROP.get(key, _EXTRA + len(keys) - place)
        columns.append((replace(column, drop=drop), cells))
    return columns


def _free_column(key: str, values: Sequence[Scalar], worse: Kind) -> _Cells:
    label = heading(key)
    if any(isinstance(value, bool | str) for value in values):  # one text makes the whole column text
        return Column(label), [figure(value) for value in values]
    numbers = [formatting.number(value) for value in values]
    if key == GAIN:
        return Column(label, worse), ["" if number is None else f"{round(number, 1) + 0.0:+.1f}" for number in numbers]
    if key.endswith("_db"):
        return Column(label, "low"), [decibels(number) for number in numbers]
    if key in (CLIPPED, "clipped_there"):
        return Column(label, worse), [formatting.percent(number) for number in numbers]
    return Column(label, worse), [figure(value) for value in values]
