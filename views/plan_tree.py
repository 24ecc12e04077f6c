"""A quantisation plan as a tree by module: how each value is quantised, or why a layer stays float; and what differs.

Values stand under the module of the layer that reads them. Operators that only move numbers, and those that compute as
part of a quantised layer, have no entry in a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from layerline.pipeline.errors import PipeError
from layerline.pipeline.untrusted import read_json
from layerline.views.screen import words

FILE = "plan.json"
# Levels of the tree, each four columns wide. What is below them has no room: the rest of its path is one line.
DEEPEST = 10
PlanEntry = Mapping[str, Any]


def read(path: Path) -> dict[str, PlanEntry]:
    """The entries of a plan: quantised values by name, and layers that stay float by name and operator.

    Args:
        path: a plan.json, or the folder that holds one.

    Raises:
        PipeError: it is no plan.
    """
    file = path
    if path.is_dir():
        file = path / FILE
    try:
        document = read_json(file)
        entries: dict[str, PlanEntry] = {}
        for entry in document["values"]:
            name = str(entry["name"])
            if name in entries:  # layers of two formats read it
                name += f" ({entry['dtype']})"
            entries[name] = entry
        entries.update({f"{entry['name']} ({entry['op']})": entry for entry in document["kept"]})
        for entry in entries.values():
            # Written once here, so that a damaged entry is refused with the file and not while it is drawn.
            text(entry)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PipeError(
            f"it holds no quantisation plan ({type(error).__name__}: {error})",
            where=str(file),
            hint="give a plan.json, or the folder of an artifact of quantize",
        ) from None
    return entries


def text(entry: PlanEntry | None) -> str:
    """How a value is quantised, or why a layer stays float, in words."""
    if entry is None:
        return "no entry"
    if "reason" in entry:
        return f"float: {entry['reason']}"
    scales = [float(scale) for scale in entry["scales"]]
    # The numbers of a float type are not evenly spaced, so its scale is no step.
    unit = "step"
    if str(entry["dtype"]).startswith("float"):
        unit = "scale"
    # One scale for each block of weights: their range says nothing.
    if entry.get("block"):
        steps = f"blocks of {entry['block']} along axis {entry['axis']}"
    elif entry["axis"] is None:
        steps = f"{unit} {scales[0]:.3g}"
    else:
        steps = f"{len(scales)} {unit}s of {min(scales):.3g} to {max(scales):.3g} along axis {entry['axis']}"
    return f"{entry['dtype']}, {steps}, range by {entry['calibrator']}: {entry['why']}"


def changes(entries: Mapping[str, PlanEntry], others: Mapping[str, PlanEntry]) -> list[dict[str, str]]:
    """Values and layers whose entry differs between two plans, in the order of the first: module, and both texts."""
    rows: list[dict[str, str]] = []
    # In the order of the first plan; what only the second has comes last.
    for name in {**entries, **others}:
        entry, other = entries.get(name), others.get(name)
        now, then = text(entry), text(other)
        if now != then:
            module = (entry or other or {}).get("module", "")
            rows.append({"name": name, "module": str(module), "now": now, "then": then})
    return rows


def show(out: Console, entries: Mapping[str, PlanEntry], differing: list[dict[str, str]] | None) -> None:
    """Prints the tree: of all entries, or of the differing ones with both texts."""
    lines: list[tuple[str, Text]] = []
    if differing is None:
        for name, entry in entries.items():
            style = "green"
            if "reason" in entry:
                style = "yellow"
            lines.append((str(entry.get("module", "")), _line(name, text(entry), style)))
    else:
        for row in differing:
            line = _line(row["name"], row["then"], "dim")
            line.append_text(Text("  ->  "))
            line.append_text(words(row["now"]))
            lines.append((row["module"], line))
    root = Tree("", hide_root=True)
    branches: dict[tuple[str, ...], Tree] = {(): root}
    for module, line in lines:
        _branch(branches, module).add(line)
    if lines:
        out.print(root)
    else:
        out.print("the two plans are the same")


def _line(name: str, description: str, style: str) -> Text:
    return Text.assemble(words(name, "bold"), "  ", words(description, style))


def _branch(branches: dict[tuple[str, ...], Tree], module: str) -> Tree:
    """The branch of a module path, below those of the modules around it."""
    path: tuple[str, ...] = ()
    if not module:
        return branches[path]
    # What is deeper stays one name with dots.
    for name in module.split(".", DEEPEST):
        around = branches[path]
        path = (*path, name)
        if path not in branches:
            branches[path] = around.add(words(name, "cyan"))
    return branches[path]
