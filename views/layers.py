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
# An engine's layer usually has the name of its node, so it is dropped first. Its type and precision always stay.
_FIRST_TO_GO, _STAY = "network_layer", ("type", "precision")
_NAMES = ("layer", "value")
_LEAST_NAME = 12
_GAP = "  "
_LONGEST = 60
LEAST_SHARE = 0.01  # per cent; a smaller share that is not zero is shown as `~0`


@dataclass(frozen=True)
class DiffColumn:
    """A heading and its cells.

    Attributes:
        drop: a narrow terminal drops the column with the smallest number first; None always stays.
        right: whether cells are aligned to the right.
    """

    label: str
    cells: Sequence[Text]
    drop: int | None = None
    right: bool = True

    @property
    def has_entry(self) -> bool:
        return any(cell.plain for cell in self.cells)

    @property
    def width(self) -> int:
        return max([cell_len(self.label), *(cell.cell_len for cell in self.cells)])


def columns(records: Sequence[LayerDiff], then: Mapping[str, LayerDiff] | None) -> list[DiffColumn]:
    """Every column that has an entry, in the order shown.

    Args:
        records: the rows.
        then: the other run's records by value name, or None where there is no other run.
    """
    extras = grid.all_keys([r.extra for r in records])
    table = [
        _column("layer", records, lambda r: r.module, right=False),
        _column("value", records, lambda r: r.name, right=False),
        _column("op", records, lambda r: r.op, drop=4 + len(extras), right=False),
        _column("shape", records, lambda r: shape(r.shape), drop=0, right=False),
        _column("SQNR dB" if then is None else "now dB", records, lambda r: grid.decibels(r.sqnr_db)),
    ]
    if then is not None:
        cells = []
        for record in records:
            earlier = then.get(record.name)
            cells.append(Text(grid.decibels(earlier.sqnr_db)) if earlier else Text())
        table.append(DiffColumn("then dB", cells))
    table += [
        _column("rel L2", records, lambda r: grid.error(r.rel_l2), drop=3),
        _column("max abs", records, lambda r: grid.error(r.max_abs), drop=1),
        _column("cosine", records, lambda r: grid.similarity(r.cosine), drop=2),
    ]
    # Of the extra columns the last one goes first; the first four places belong to the columns above.
    for i, name in enumerate(extras):
        table.append(_extra_column(name, records, drop=4 + len(extras) - 1 - i))
    table.append(DiffColumn("", [verdict(r) for r in records], right=False))
    return [column for column in table if column.has_entry]


def fitting(candidates: Sequence[DiffColumn], width: int) -> list[DiffColumn]:
    """Drops the least important columns until a row fits.

    No cell is cut, unless the columns that always stay are too wide. Then the longest names lose their beginnings.
    """
    shown = list(candidates)
    while _total(shown) > width:
        optional = [column for column in shown if column.drop is not None]
        if not optional:
            return _with_names_cut(shown, _total(shown) - width)
        shown.remove(min(optional, key=lambda column: column.drop or 0))
    return shown


def _total(shown: Sequence[DiffColumn]) -> int:
    return sum(column.width for column in shown) + len(_GAP) * (len(shown) - 1)


def _with_names_cut(shown: Sequence[DiffColumn], excess: int) -> list[DiffColumn]:
    """Takes `excess` characters from the columns of names, always from the wider one."""
    widths = {column.label: column.width for column in shown if column.label in _NAMES}
    for _ in range(excess):
        widest = max(widths, key=lambda label: widths[label])
        widths[widest] = max(widths[widest] - 1, _LEAST_NAME)
    cut = []
    for column in shown:
        if column.label in widths:
            width = widths[column.label]
            column = replace(column, cells=[_end(cell, width) for cell in column.cells])
        cut.append(column)
    return cut


def _end(cell: Text, width: int) -> Text:
    if cell.cell_len <= width:
        return cell
    return Text(f"…{cell.plain[cell.cell_len - width + 1 :]}")


def lines(shown: Sequence[DiffColumn]) -> list[Text]:
    """The table as text: the headings, then a line for each record."""
    rows = [[Text(column.label, "dim") for column in shown]]
    all_cells = [column.cells for column in shown]
    rows += map(list, zip(*all_cells, strict=True))
    texts = []
    for row in rows:
        line = Text(_GAP).join(map(_padded, row, shown))
        line.rstrip()
        texts.append(line)
    return texts


def verdict(record: LayerDiff) -> Text:
    """Whether a value passed, in words; empty where it has no tolerance."""
    if record.one_sided:
        return Text(f"{record.one_sided} NaN/Inf on one side", "red")
    if not record.passed:
        return Text("beyond tolerance", "red")
    return Text("ok" if record.tolerance is not None else "", "green")


def short(value: Any) -> str:
    """Text of any length on one line: hashes as their beginning."""
    text = hashed(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 1]}…"


def hashed(value: Any) -> str:
    """The value as text, shortened to 12 characters where it is a SHA-256; empty for None."""
    if value is None:
        return ""
    text = str(value)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:12]
    return text


def _column(
    label: str,
    records: Sequence[LayerDiff],
    text: Callable[[LayerDiff], str],
    drop: int | None = None,
    right: bool = True,
) -> DiffColumn:
    return DiffColumn(label, [Text(text(r)) for r in records], drop, right)


def _extra_column(name: str, records: Sequence[LayerDiff], drop: int | None) -> DiffColumn:
    values = [record.extra.get(name) for record in records]
    if name == _FIRST_TO_GO:
        drop = -1
    elif name in _STAY:
        drop = None
    label = _EXTRAS.get(name, grid.heading(name))
    has_text = any(isinstance(value, str) for value in values)
    return DiffColumn(label, [Text(_extra_text(name, value)) for value in values], drop, right=not has_text)


def _extra_text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == grid.SHARE and isinstance(value, float | int):
        return _percent(100 * value)
    if name.endswith("_db"):
        return grid.decibels(float(value))
    if isinstance(value, str):
        return short(value)
    return grid.figure(value)


def _percent(percent: float) -> str:
    if not percent:
        return "0"
    if percent < LEAST_SHARE:
        return "~0"
    return f"{percent:.2f}"


def _padded(cell: Text, column: DiffColumn) -> Text:
    space = " " * (column.width - cell.cell_len)
    if column.right:
        return Text.assemble(space, cell)
    return Text.assemble(cell, space)
