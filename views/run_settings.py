"""What a stage was made with, as the page shows it: settings beside their defaults, and the versions that ran it."""

from __future__ import annotations

from layerline.pipeline.config.settings import UNSET, settings, versions
from layerline.pipeline.records.ledger import Record
from layerline.views.grid import Column, View


def made_with(record: Record) -> dict[str, str]:
    """The settings that differ from their defaults and the versions, each as one line."""
    differing = ", ".join(f"{s.name}: {s.value}" for s in settings(record) if s.differs)
    told = {"settings": differing or "the defaults"} if settings(record) else {}
    computed = ", ".join(f"{name} {version}" for name, version in versions(record).items())
    return told | ({"versions": computed} if computed else {})


def settings_view(record: Record) -> View:
    """Every field of the stage, those that differ from their defaults first."""
    columns = (Column("field"), Column("value"), Column("default"))
    rows = [[s.name, _written(s.value), "" if not s.differs else _written(s.default)] for s in settings(record)]
    return View("Settings", columns, rows)


def _written(value: str | None) -> str:
    return "not set" if value is None or value in UNSET else value
