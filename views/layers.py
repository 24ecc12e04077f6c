"""The per-layer table of `pipe diff`, in the columns that the terminal has room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from layerline.pipeline.report import LayerDiff
from layerline.views import grid
from layerline.views.formatting import shape

_EXTRAS = {
    "isolated_sqnr_db": "own dB",
    "weight_sqnr_db": "weight dB",
    grid.SHARE: f"{grid.SHARE} %",
    "network_layer": "engine layer",
}
# An engine's layer is most often its node under another name; what it computes in is why one looks.
_FIRST_TO_GO, _STAY = "network_layer", ("type", "precision")
_NAMES = ("layer", "value")
_LEAST_NAME = 12
_GAP = "  "
_LONGEST = 60
LEAST_SHARE = 0.01  # in percent; below it a share is only said not to be nothing


@dataclass(frozen=True)
class Column:
    """A heading and its cells. `drop` orders what a narrow terminal goes without; None always stays."""

    label: str
    cells: Sequence[Text]
    drop: int | None = None
    right: bool = True

    @property
    def width(self) -> int:
        return max(cell_len(self.label), *(cell.cell_len for cell in self.cells), 0)


def columns(records: Sequence[LayerDiff], then: Mapping[str, LayerDiff] | None) -> list[Column]:
    """Every column that has an entry, in the order shown.

    Args:
        records: the rows.
        then: the other run's records by value name, or None where there is no other run.
    """
    extras = list(dict.fromkeys(name for r in records for name in r.extra))
    found = [
        _column("layer", records, lambda r: r.module, right=False),
        _column("value", records, lambda r: r.name, right=False),
        _column("op", records, lambda r: r.op, drop=4 + len(extras), right=False),
        _column("shape", records, lambda r: shape(r.shape), drop=0, right=False),
        _column("SQNR dB" if then is None else "now dB", records, lambda r: grid.decibels(r.sqnr_db)),
    ]
    if then is not None:
        found.append(
            _column("then dB", records, lambda r: grid.decibels(then[r.name].sqnr_db) if r.name in then else "")
        )
    found += [
        _column("rel L2", records, lambda r: grid.error(r.rel_l2), drop=3),
        _column("max abs", records, lambda r: grid.error(r.max_abs), drop=1),
        _column("cosine", records, lambda r: grid.similarity(r.cosine), drop=2),
    ]
    found += [_extra(name, records, _drop(name, 4 + len(extras) - 1 - i)) for i, name in enumerate(extras)]
    found.append(Column("", [verdict(r) for r in records], right=False))
    return [c for c in found if any(cell.plain for cell in c.cells)]


def fitting(found: Sequence[Column], width: int) -> list[Column]:
    """The columns left when those that matter least make way until a row fits.

    No cell is cut, unless the columns that stay still don't fit: then of the longest names the end is shown.
    """
    kept = list(found)
    while _total(kept) > width:
        optional = [c for c in kept if c.drop is not None]
        if not optional:
            return _with_names_cut(kept, _total(kept) - width)
        kept.remove(min(optional, key=lambda c: c.drop or 0))
    return kept


def _total(columns: Sequence[Column]) -> int:
    return sum(c.width for c in columns) + len(_GAP) * (len(columns) - 1)


def _with_names_cut(columns: Sequence[Column], over: int) -> list[Column]:
    """Takes `over` from the columns of names, always from the wider one."""
    widths = {c.label: c.width for c in columns if c.label in _NAMES}
    for _ in range(over):
        widest = max(widths, key=lambda label: widths[label])
        widths[widest] = max(widths[widest] - 1, _LEAST_NAME)
    return [
        replace(c, cells=[_end(cell, widths[c.label]) for cell in c.cells]) if c.label in widths else c for c in columns
    ]


def _end(cell: Text, width: int) -> Text:
    return cell if cell.cell_len <= width else Text(f"…{cell.plain[cell.cell_len - width + 1 :]}")


def lines(shown: Sequence[Column]) -> list[Text]:
    """The table as text: the headings, then a line for each record."""
    heads = [_padded(Text(c.label, "dim"), c) for c in shown]
    rows = [
        [_padded(cell, c) for cell, c in zip(cells, shown, strict=True)]
        for cells in zip(*(c.cells for c in shown), strict=True)
    ]
    found = [Text(_GAP).join(row) for row in [heads, *rows]]
    for line in found:
        line.rstrip()
    return found


def verdict(record: LayerDiff) -> Text:
    """Whether a value passed, in words; empty where nothing is asked of it."""
    if record.one_sided:
        return Text(f"{record.one_sided} NaN/Inf on one side", "red")
    if not record.passed:
        return Text("beyond tolerance", "red")
    return Text("ok" if record.tolerance is not None else "", "green")


def short(value: Any) -> str:
    """Text of any length on one line: hashes as their beginning."""
    text = hashed(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def hashed(value: Any) -> str:
    """Text, and of a hash its beginning; nothing where there is none."""
    text = "" if value is None else str(value)
    return text[:12] if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text


def _column(
    label: str,
    records: Sequence[LayerDiff],
    text: Callable[[LayerDiff], str],
    drop: int | None = None,
    right: bool = True,
) -> Column:
    return Column(label, [Text(text(r)) for r in records], drop, right)


def _drop(name: str, otherwise: int) -> int | None:
    return -1 if name == _FIRST_TO_GO else None if name in _STAY else otherwise


def _extra(name: str, records: Sequence[LayerDiff], drop: int | None) -> Column:
    return _column(
        _EXTRAS.get(name, grid.heading(name)),
        records,
        lambda r: _cell(name, r.extra.get(name)),
        drop,
        right=not any(isinstance(r.extra.get(name), str) for r in records),
    )


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == grid.SHARE and isinstance(value, float | int):
        percent = 100 * value
        return "0" if not percent else "~0" if percent < LEAST_SHARE else f"{percent:.2f}"
    if name.endswith("_db"):
        return grid.decibels(float(value))
    return short(value) if isinstance(value, str) else grid.figure(value)


def _padded(cell: Text, column: Column) -> Text:
    space = " " * (column.width - cell.cell_len)
    return Text.assemble(space, cell) if column.right else Text.assemble(cell, space)
