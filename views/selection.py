"""What `pipe diff` shows of a report and judges: the layers of a module, and limits that a script sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from layerline.pipeline import nearest
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.report import OWN, LayerDiff, Report, Scalar
from layerline.views import formatting

# Of all of them a lower figure is the worse one.
MEASURES = {"sqnr": "sqnr_db", "own": OWN, "weight": "weight_sqnr_db", "cosine": "cosine"}
_JOINED = ", "  # paths of a layer that fuse merged
_LISTED = 5  # layers in an error message


@dataclass(frozen=True)
class Below:
    """A measure of a layer that is below its limit; `seen` is None where the sides differ too much to be measured."""

    layer: str
    value: str
    measure: str
    seen: float | None
    limit: float

    def to_json(self) -> dict[str, Scalar]:
        seen: Scalar = self.seen
        if self.seen is not None and not math.isfinite(self.seen):
            seen = str(self.seen)
        return {"layer": self.layer, "value": self.value, "measure": self.measure, "seen": seen, "limit": self.limit}


def of_module(report: Report, pattern: str) -> Report:
    """The report with only the records of the modules that a pattern matches.

    Args:
        pattern: a module path, which stands for everything below it too, or a glob over module paths (`encoder.*`).
            A value without a module goes by its name.

    Raises:
        ConfigError: it matches nothing; names the nearest module.
    """
    kept = matching(report, pattern)
    if not kept.records:
        hint = nearest.did_you_mean(pattern, {record.where for record in report.records})
        raise ConfigError(
            f"no layer matches {pattern!r}", where="--module", hint=hint or "`pipe diff` without --module lists them"
        )
    return kept


def matching(report: Report, pattern: str) -> Report:
    """As `of_module`, but with no records where nothing matches."""
    return replace(report, records=tuple(record for record in report.records if _matches(record, pattern)))


def _matches(record: LayerDiff, pattern: str) -> bool:
    # A layer that fuse merged has the paths of all modules in it.
    for path in (record.name, *record.module.split(_JOINED)):
        if path == pattern or path.startswith(f"{pattern}.") or fnmatchcase(path, pattern):
            return True
    return False


def read_limits(texts: Sequence[str]) -> dict[str, float]:
    """The limits of `--fail-under MEASURE=VALUE`, by measure.

    Raises:
        ConfigError: another form, a measure that is none or is given twice, or no finite number.
    """
    limits: dict[str, float] = {}
    for text in texts:
        measure, _, number = text.partition("=")
        if measure not in MEASURES:
            hint = nearest.hint(measure, MEASURES)
            raise ConfigError(f"expected MEASURE=VALUE, saw {text!r:.80}", where="--fail-under", hint=hint)
        if measure in limits:
            raise ConfigError(f"{measure} is given twice", where="--fail-under", hint="give one limit for each measure")
        try:
            limits[measure] = float(number)
        except ValueError:
            limits[measure] = math.nan
        if not math.isfinite(limits[measure]):
            raise ConfigError(
                f"expected a number for {measure}, saw {number!r:.80}", where="--fail-under", hint=f"{measure}=20"
            )
    return limits


def below(report: Report, limits: Mapping[str, float]) -> list[Below]:
    """The measures that are below their limits, in the order of the records. NaN is below any limit.

    A value that is not finite on one side only, or has another shape there, is below every limit of `sqnr` and of
    `cosine`. Other values without a measure are not judged.

    Raises:
        ConfigError: no value has the measure.
    """
    for measure in limits:
        if not any(_judged(record, measure) for record in report.records):
            raise ConfigError(
                f"no value of {report.stage} has the measure {measure}, so it can't be judged",
                where="--fail-under",
                hint="--csv shows what was measured",
            )
    failing = []
    for record in report.records:
        for measure, limit in limits.items():
            seen = _measured(record, measure)
            reaches = seen is not None and seen >= limit
            if _judged(record, measure) and not (reaches and not _differs(record, measure)):
                failing.append(Below(record.where, record.name, measure, seen, limit))
    return failing


def _judged(record: LayerDiff, measure: str) -> bool:
    return _measured(record, measure) is not None or _differs(record, measure)


def _differs(record: LayerDiff, measure: str) -> bool:
    """Whether both sides can't be compared; the errors of the layer itself and of its weights are other comparisons."""
    return measure in ("sqnr", "cosine") and (record.one_sided > 0 or "mismatch" in record.extra)


def _measured(record: LayerDiff, measure: str) -> float | None:
    field = MEASURES[measure]
    value = record.extra.get(field, getattr(record, field, None))
    return float(value) if isinstance(value, int | float) else None


def failure(failing: Sequence[Below], stage: str) -> StageError | None:
    """The error that names the layers below their limits; None where there are none."""
    if not failing:
        return None
    texts = []
    for item in failing[:_LISTED]:
        figure = formatting.figure(item.seen)
        if item.seen is None:
            figure = "not measured: shapes differ, or NaN or Inf on one side"
        texts.append(f"{item.layer} ({item.value}): {item.measure} {figure}, limit {item.limit:g}")
    if len(failing) > _LISTED:
        texts.append(f"and {len(failing) - _LISTED} more")
    return StageError("; ".join(texts), where=stage)
