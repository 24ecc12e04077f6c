"""The settings and versions that a stage ran with, as the page shows them."""

from __future__ import annotations

from layerline.pipeline.config.settings import UNSET, settings, versions
from layerline.pipeline.records.ledger import Record
from layerline.views.grid import Column, View


def made_with(record: Record) -> dict[str, str]:
    """The settings that differ from their defaults, and the versions, each as one line."""
    lines = {}
    fields = settings(record)
    if fields:
        differing = ", ".join(f"{field.name}: {field.value}" for field in fields if field.differs)
        lines["settings"] = differing or "the defaults"
    computed_by = ", ".join(f"{name} {version}" for name, version in versions(record).items())
    if computed_by:
        lines["versions"] = computed_by
    return lines


def settings_view(record: Record) -> View:
    """Every field of the stage, those that differ from their defaults first."""
    columns = (Column("field"), Column("value"), Column("default"))
    rows = []
    for field in settings(record):
        default = _written(field.default) if field.differs else ""
        rows.append([field.name, _written(field.value), default])
    return View("Settings", columns, rows)


def _written(value: str | None) -> str:
    if value is None or value in UNSET:
        return "not set"
    return value
