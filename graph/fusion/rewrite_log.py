"""The list of rewrites: what fired, what was undone, what declined and why; as tables and as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerline.graph.fusion.firing import Site
from layerline.graph.fusion.fuse import Rewritten
from layerline.graph.fusion.verify_rewrites import RewriteProof
from layerline.pipeline.report import Row

FILE = "rewrites.json"


def save(folder: Path, fused: Rewritten) -> None:
    """Writes `rewrites.json`: everything that fired, was undone, and declined; the same bytes for the same content."""
    content = {
        "fired": [_entry(p) for p in fused.proofs],
        "undone": [_entry(p) for p in fused.undone],
        "declined": declined(fused.declines),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / FILE).write_text(text + "\n", "utf-8")


def fired(proofs: Iterable[RewriteProof]) -> list[Row]:
    """One row per firing for a report's table."""
    rows: list[Row] = []
    for proof in proofs:
        row = _entry(proof)
        for key in ("inside", "module", "sources"):
            row[key] = ", ".join(row[key])
        rows.append(row)
    return rows


def declined(declines: Mapping[Site, str]) -> list[Row]:
    """One row per rule and reason, with the first value that it is about."""
    rows: dict[tuple[str, str], Row] = {}
    for site, reason in declines.items():
        rows.setdefault((site.rule, reason), {"rule": site.rule, "value": site.value, "reason": reason})
    return list(rows.values())


def undone(proof: RewriteProof) -> str:
    """A sentence for the report's notes."""
    site = proof.firing.site
    reason = proof.why
    if not reason and math.isinf(proof.error):
        reason = "onnxruntime refuses the model with it, or the value gets another shape, or NaN or Inf on one side"
    elif not reason:
        reason = f"it moved the value by {proof.error:.2e}, whose floor allows {proof.tolerance:.2e}"
    return f"undone: rule {site.rule} at {site.value} ({reason})"


def _entry(proof: RewriteProof) -> dict[str, Any]:
    firing = proof.firing
    error: float | str = proof.error
    if not math.isfinite(proof.error):
        error = "inf"  # JSON has no infinity
    return {
        "rule": firing.site.rule,
        "value": firing.site.value,
        "inside": list(firing.site.inside),
        "module": list(firing.modules),
        "sources": list(firing.sources),
        "error": error,
        "tolerance": proof.tolerance,
        "feeds": proof.feeds,
    }
