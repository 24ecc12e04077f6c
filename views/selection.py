"""What `pipe diff` shows of a report and judges: the layers of a module, and limits that a script sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from layerline.pipeline import nearest
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.report import EFFECT, OWN, WEIGHT, LayerDiff, Report, Row, Scalar
from layerline.pipeline.untrusted import printable
from layerline.views import formatting

# Of all of them a lower figure is the worse one.
MEASURES = {"sqnr": "sqnr_db", "own": OWN, "effect": EFFECT, "weight": WEIGHT, "cosine": "cosine"}
_JOINED = ", "  # paths of a layer that fuse merged
# A measure of a layer that is below its limit: `layer`, `value`, `measure`, `seen` and `limit`.
_LISTED = 5  # layers in an error message


def of_module(report: Report, pattern: str) -> Report:
    """The report with only the records of the modules that a pattern matches; ConfigError where there are none.

    A module path stands for everything below it; a glob is over module paths, or names of values without a module.
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
    kept = []
    for record in report.records:
        # A layer that fuse merged has the paths of all modules in it.
        for path in (record.name, *record.module.split(_JOINED)):
            if path == pattern or path.startswith(f"{pattern}.") or fnmatchcase(path, pattern):
                kept.append(record)
                break
    return replace(report, records=tuple(kept))


def read_limits(texts: Sequence[str]) -> dict[str, float]:
    """The limits of `--fail-under MEASURE=VALUE`, by measure: finite numbers, one for each."""
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
                f"expected a number for {measure}, saw {number!r:.80}",
                where="--fail-under",
                hint="sqnr=20, or cosine=0.99",
            )
    return limits


def below(report: Report, limits: Mapping[str, float]) -> list[Row]:
    """The measures that are below their limits, NaN included; figures that are not finite are strings."""
    failing: list[Row] = []
    for measure, limit in limits.items():
        is_measured = False
        for record in report.records:
            measured = _measured(record, measure)
            if measured is None:
                continue
            is_measured = True
            if not measured >= limit:  # NaN too
                shown: Scalar = measured
                if not math.isfinite(measured):
                    shown = str(measured)
                row: Row = {"layer": record.where, "value": record.name, "measure": measure}
                failing.append({**row, "seen": shown, "limit": limit})
        if not is_measured:
            what = f"no value of {report.stage} has the measure {measure}, so it can't be judged"
            raise ConfigError(what, where="--fail-under", hint="--csv shows what was measured")
    return failing


def _measured(record: LayerDiff, measure: str) -> float | None:
    # No finite figure describes a value that is finite on one side only, or has another shape there.
    if measure in ("sqnr", "cosine") and (record.one_sided or "mismatch" in record.extra):
        return -math.inf
    field = MEASURES[measure]
    return formatting.number(record.extra.get(field, getattr(record, field, None)))


def failure(failing: Sequence[Row], stage: str) -> StageError | None:
    """The error that names the layers below their limits; None where there are none."""
    if not failing:
        return None
    texts = []
    for row in failing[:_LISTED]:
        figures = f"{formatting.figure(row['seen'])}, limit {formatting.figure(row['limit'])}"
        # Names come from the model, and may hold line breaks.
        layer = printable(f"{row['layer']} ({row['value']})")
        texts.append(f"{layer}: {row['measure']} {figures}")
    if len(failing) > _LISTED:
        texts.append(f"and {len(failing) - _LISTED} more")
    return StageError("; ".join(texts), where=stage)
