"""Made-up runs for the tests of the HTML page."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from layerline.pipeline.records.ledger import Record, Run
from layerline.pipeline.report import Gate, LayerDiff, Report

LAYERS = [
    ("conv2d", "stem.conv", "Conv"),
    ("relu", "stem.act", "Relu"),
    ("conv2d_1", "layer1.0.conv1", "Conv"),
    ("add", "layer1.0", "Add"),
    ("relu_1", "layer1.0.relu", "Relu"),
    ("mean", "", "ReduceMean"),
    ("logits", "head.fc", "Gemm"),
]


def diff(name: str, module: str = "", op: str = "Conv", db: float | None = None, **fields: Any) -> LayerDiff:
    """A record whose relative error goes with its SQNR."""
    relative = None if db is None else (0.0 if db == math.inf else 10 ** (-db / 20))
    return LayerDiff(**{"name": name, "module": module, "op": op, "sqnr_db": db, "rel_l2": relative, **fields})


def values(db: float, **fields: Any) -> tuple[LayerDiff, ...]:
    """A record for each of LAYERS, each a decibel below the one before."""
    return tuple(diff(*layer, db - i, **fields) for i, layer in enumerate(LAYERS))


def weights(db: float) -> tuple[LayerDiff, ...]:
    """A record for each parameter of LAYERS."""
    return tuple(diff(f"{m}.weight", m, "parameter", db) for _, m, op in LAYERS if op in ("Conv", "Gemm"))


def sample_reports() -> dict[str, Report]:
    """Six stages: trained, exported in equal, one layer lost in quantisation, an engine that could not run."""
    broken = {2: diff(*LAYERS[2], 9.3, tolerance=0.2), 5: diff(*LAYERS[5], math.nan, tolerance=0.2, one_sided=3)}
    quantised = tuple(broken.get(i, r) for i, r in enumerate(values(40, tolerance=0.2)))
    reports = [
        Report(stage="train", records=weights(0.5), metrics={"loss": 0.0613, "steps": 1500}),
        Report(stage="ema", records=(*weights(30), diff("stem.conv", "stem.conv", "Conv2d", 25.0))),
        Report(stage="export", reference="torch", candidate="onnx", records=values(132, tolerance=1e-5)),
        Report(stage="fuse", records=tuple(diff(*layer, math.inf) for layer in LAYERS)),
        Report(
            stage="quantize",
            records=quantised,
            metrics={"accuracy": 0.971},
            gates=(Gate("budget", False, "1.2 points", "≤ 0.5 points", "skip layer1.0.conv1"),),
            notes=("`mean` fell back to min/max",),
            tables={"Left in float": [{"value": "logits", "reason": "graph output"}]},
        ),
        Report(stage="engine", notes=("built, but no device could run it",)),
    ]
    return {r.stage: r for r in reports}


def run_of(reports: Mapping[str, Report], **fields: Any) -> Run:
    """The run that left these reports."""
    records = tuple(record(report, **fields) for report in reports.values())
    return Run("20250301-100011-3fa9", all(r.passed for r in records), records, tuple(r.stage for r in records))


def record(report: Report, **fields: Any) -> Record:
    """What the ledger says about one report."""
    known: dict[str, Any] = {
        "stage": report.stage,
        "key": _digest(f"key {report.stage}"),
        "digest": _digest(report.stage),
        "kind": "onnx",
        "report": _digest(report.to_json()),
        "passed": report.passed,
        "seconds": 12.5,
        "created": "2025-03-01T10:00:12Z",
        "worst": next((r.summary() for r in report.sorted(report.order)), None),
        "metrics": report.plain_metrics(),
    }
    return Record(**{**known, **fields})


def many(stage: str, count: int, db: float) -> Report:
    """A report the size of a large transformer's."""
    names: Iterable[tuple[str, str]] = (
        (f"model_layers_{i // 40}_linear_{i}", f"model.layers.{i // 40}.self_attn.proj_{i % 40}") for i in range(count)
    )
    records = tuple(
        diff(name, module, "MatMul", db + i % 7, shape=("batch", "sequence", 4096), dtype="float32", cosine=0.9993)
        for i, (name, module) in enumerate(names)
    )
    return Report(stage=stage, records=records)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
