"""docs/config.md says what the stages take, field by field; LAYERLINE_WRITE_DOCS=1 writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from layerline.pipeline import stage_table

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = PAGE.read_text("utf-8").split("<!-- fields -->")[0] if PAGE.exists() else ""


def fields_of(name: str) -> str:
    cls = stage_table.stage_class(name)
    parts = [f"## {name}\n\n{_one_line((cls.__doc__ or '').split(chr(10) * 2)[0])}\n", _table(cls)]
    for field, info in cls.model_fields.items():
        parts += [
            f"An entry of `{field}`: {_one_line(inner.__doc__ or '')}\n\n{_table(inner)}"
            for inner in _inner(info.annotation)
        ]
    return "\n".join(parts)


def _table(cls: type[BaseModel]) -> str:
    rows = [
        f"| `{field}` | {_type(info)} | {_default(info)} | {_meaning(info)} |"
        for field, info in cls.model_fields.items()
    ]
    return "\n".join(["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _inner(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field is made of, where their own fields say something."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation] if all(info.description for info in annotation.model_fields.values()) else []
    return [cls for part in get_args(annotation) for cls in _inner(part)]


def _type(info: FieldInfo) -> str:
    if "_checked_amount" in str(info.annotation):
        return "number or percentage, or a table" if "dict" in str(info.annotation) else "number or percentage"
    text = re.sub(r"Annotated\[(\w+), [^\[\]]*(?:\[[^\]]*\])?[^\[\]]*\]", r"\1", str(info.annotation))
    text = re.sub(r"typing\.|layerline\.stages\.\w+\.|<class '|'>|NoneType", "", text)
    text = text.replace("Optional[", "").replace(" | None", "") if "None" in text or "Optional" in text else text
    if "Literal[" in text:
        choices = re.findall(r"'([^']+)'|\b(\d+)\b", text)
        return ", ".join(f"`{name or number}`" for name, number in choices) + (" or a table" if "Union" in text else "")
    kinds = {"int": "integer", "float": "number", "str": "text", "bool": "true, false"}
    bare = text.strip("[]")
    if bare.startswith("layerline."):
        return "table"
    return kinds.get(bare, "list" if bare.startswith("tuple") else "table" if bare.startswith("dict") else f"`{bare}`")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value: Any = info.get_default(call_default_factory=True)
    return "" if value in (None, (), {}, "") else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(info: FieldInfo) -> str:
    return _one_line(info.description or "").replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def page() -> str:
    return HEAD + "<!-- fields -->\n\n" + "\n".join(fields_of(n) for n in [*stage_table.BUILT_IN])


def test_the_page_is_what_the_stages_take() -> None:
    if os.environ.get("LAYERLINE_WRITE_DOCS"):
        PAGE.write_text(page(), "utf-8")
    assert PAGE.read_text("utf-8") == page(), "write it anew: LAYERLINE_WRITE_DOCS=1 pytest tests/test_config_page.py"


@pytest.mark.parametrize("name", [*stage_table.BUILT_IN])
def test_every_field_says_what_it_means(name: str) -> None:
    assert not [f for f, info in stage_table.stage_class(name).model_fields.items() if not info.description]
