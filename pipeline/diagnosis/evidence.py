"""What the rules behind `pipe why` look at, and what they give: evidence in, causes out."""

from __future__ import annotations

import functools
import glob
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from layerline.pipeline.config.quantize_fields import HALF_TYPES
from layerline.pipeline.report import LayerDiff, Report, Scalar


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One possible reason.

    Attributes:
        name: in a few words ("clipped range").
        stage: where the accuracy was lost; rules of one stage leave it to `of_lost`.
        layer: the module, or the value where it belongs to none; empty where the whole stage is meant.
        value: name of the tensor.
        evidence: the figures that speak for it.
        advice: what to change.
        setting: the change as `key.path=value` of pipe.yaml; empty where it is another kind of change.
        confidence: from 0 to 1. It ranks the causes and is no probability; benchmarks/faults.py measures how often
            the planted cause comes first.
    """

    name: str
    stage: str = ""
    layer: str = ""
    value: str = ""
    evidence: str
    advice: str
    setting: str = ""
    confidence: float

    @property
    def place(self) -> str:
        """The layer, and the value where that has another name."""
        return f"{self.layer} ({self.value})" if self.value not in ("", self.layer) else self.layer

    @classmethod
    def at(cls, record: LayerDiff, **fields: Any) -> Cause:
        """A cause in a layer of a report."""
        return cls(layer=record.where, value=record.name, **fields)

    @classmethod
    def of_row(cls, row: Mapping[str, Scalar], **fields: Any) -> Cause:
        """A cause in a value of the table "quantized"."""
        return cls(layer=str(row.get("module") or row["value"]), value=str(row["value"]), **fields)

    def row(self) -> dict[str, Scalar]:
        fields = asdict(self)
        return {"cause": fields.pop("name"), **fields, "confidence": round(self.confidence, 2)}


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Samples whose outputs a stage made NaN or Inf.

    Attributes:
        count: how many, of `samples`.
        value: the first value in the graph's order that is NaN or Inf; empty where it can't be told.
        module: module path of the node that computes it.
    """

    count: int
    samples: int
    value: str = ""
    module: str = ""

    @property
    def text(self) -> str:
        return f"the outputs of {self.count} of {self.samples} samples have NaN or Inf"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the rules may look at.

    Attributes:
        reports: by stage, in the order in which they ran.
        settings: the fields of each stage's configuration.
        losses: by stage that lost something: what, in words.
        logs: the rows of metrics.csv by training stage.
        nonfinite: by stage, the samples of eval_data() whose outputs it made NaN or Inf.
    """

    reports: Mapping[str, Report]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)
    logs: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    nonfinite: Mapping[str, NonFinite] = field(default_factory=dict)

    def setting(self, stage: str, name: str) -> Any:
        return self.settings.get(stage, {}).get(name)


Rule = Callable[[Evidence], Iterable[Cause]]


def of_lost(stage: str) -> Callable[[Callable[[Evidence, Report], Iterator[Cause]]], Rule]:
    """A decorator for rules about one stage.

    The function gets the evidence and the report of that stage, and is called only if the stage lost something. Its
    causes get the name of the stage.
    """

    def as_rule(look: Callable[[Evidence, Report], Iterator[Cause]]) -> Rule:
        @functools.wraps(look)
        def rule(evidence: Evidence) -> Iterator[Cause]:
            if stage in evidence.losses and stage in evidence.reports:
                for cause in look(evidence, evidence.reports[stage]):
                    yield replace(cause, stage=stage)

        return rule

    return as_rule


def format_setting(evidence: Evidence, name: str, chosen: str = "") -> str:
    """The setting that gives one more layer a format of its own: the half type in use, if none is named."""
    layers = dict(evidence.setting("quantize", "layers") or {})
    in_use = [wanted for wanted in (*layers.values(), evidence.setting("quantize", "rest")) if wanted in HALF_TYPES]
    # Keys are patterns: a bracket in a name stands for itself.
    layers[glob.escape(name)] = chosen or (in_use[0] if in_use else "fp16")
    return f"quantize.layers={json.dumps(layers, ensure_ascii=False)}"


def finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
