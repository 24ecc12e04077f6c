"""The table of `pipe check`: item, state, what was seen, what to do."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from layerline.pipeline.check import Checked
from layerline.views.grid import count
from layerline.views.screen import Screen, words

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def show(out: Screen, done: Checked) -> None:
    """Prints one line an item, in the order of the stages, and a last line that counts errors and warnings."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("item", ""):
        table.add_column(heading, no_wrap=True)
    for heading in ("seen", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in done.findings:
        place = f"{finding.where}: " if finding.where else ""
        table.add_row(
            words(finding.item),
            words(finding.state, _STYLES[finding.state]),
            words(f"{place}{finding.seen}"),
            words(finding.hint),
        )
    out.print(table)
    states = [finding.state for finding in done.findings]
    counts = [count(states.count(state), state) for state in ("error", "warning") if state in states]
    out.print(Text(", ".join(counts) or "nothing is wrong"), soft_wrap=True)
