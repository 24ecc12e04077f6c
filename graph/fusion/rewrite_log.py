"""The list of rewrites: what fired, what was undone, what declined and why; as tables and as a file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from layerline.graph.fusion.firing import Decline
from layerline.graph.fusion.fuse import Fused
from layerline.graph.fusion.verify_rewrites import Proof
from layerline.pipeline.report import Scalar

FILE = "rewrites.json"
# A rule that declines at every layer of a deep network says so this often, then how often more.
PER_RULE = 20

Row = dict[str, Scalar]


def save(folder: Path, fused: Fused) -> None:
    """Writes `rewrites.json`: everything that fired, was undone, and declined; the same bytes for the same content."""
    content = {
        "fired": [_entry(p) for p in fused.proofs],
        "undone": [_entry(p) for p in fused.undone],
        "declined": declined(fused.declines),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / FILE).write_text(text + "\n", "utf-8")


def fired(proofs: Iterable[Proof]) -> list[Row]:
    """One row per firing for a report's table."""
    return [{k: ", ".join(v) if isinstance(v, list) else v for k, v in _entry(p).items()} for p in proofs]


def declined(declines: Sequence[Decline]) -> list[Row]:
    """One row per rule and reason, at most `PER_RULE` a rule."""
    reasons = {(d.site.rule, d.reason): d.site.value for d in reversed(declines)}
    total = Counter(rule for rule, _ in reasons)
    shown: Counter[str] = Counter()
    rows: list[Row] = []
    for rule, reason in reversed(reasons):
        shown[rule] += 1
        if shown[rule] <= PER_RULE:
            rows.append({"rule": rule, "value": reasons[rule, reason], "reason": reason})
        elif shown[rule] == total[rule]:
            rows.append({"rule": rule, "value": "", "reason": f"and {total[rule] - PER_RULE} more"})
    return rows


def undone(proof: Proof) -> str:
    """A sentence for the report's notes."""
    site = proof.firing.site
    moved = f"it moved the value by {proof.error:.2e}, whose floor allows {proof.tolerance:.2e}"
    if math.isinf(proof.error):
        moved = "onnxruntime refuses the model with it, or the value gets another shape, or NaN or Inf on one side"
    return f"undone: rule {site.rule} at {site.value} ({proof.why or moved})"


def _entry(proof: Proof) -> dict[str, Any]:
    firing = proof.firing
    return {
        "rule": firing.site.rule,
        "value": firing.site.value,
        "inside": list(firing.site.inside),
        "module": list(firing.modules),
        "sources": list(firing.sources),
        "error": proof.error if math.isfinite(proof.error) else "inf",
        "tolerance": proof.tolerance,
        "feeds": proof.feeds,
    }
