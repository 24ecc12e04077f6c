"""A wrong field is told in one sentence, also where it takes several forms or has a short one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from layerline.pipeline.config.validation_errors import mistake, unfit_numbers


class Bounds(BaseModel):
    model_config = ConfigDict(extra="forbid")
    low: float
    high: Annotated[float, Field(ge=0)] = 1.0


class Size(BaseModel):
    """A number alone is its size, a list the three."""

    model_config = ConfigDict(extra="forbid")
    size: PositiveInt | None = None
    opt: PositiveInt | tuple[PositiveInt, ...] = 1

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        return {"size": raw} if isinstance(raw, int) else {"opt": raw} if isinstance(raw, list) else raw


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")
    how: Literal["auto"] | Bounds = "auto"
    by_name: dict[str, Literal["auto"] | Bounds] = {}
    wide: list[int | tuple[int, ...]] = []
    sizes: dict[str, Size] = {}
    only: Bounds | None = None
    count: int | None = None
    names: list[str] = []
    flags: dict[str, bool] = {}
    values: dict[str, float] = {}


CASES: dict[str, tuple[dict[Any, Any], str, str]] = {
    "neither form": ({"how": 0.1}, "how", "expected 'auto' or the fields low, high, saw 0.1"),
    "text for a union": ({"how": "loose"}, "how", "expected 'auto' or the fields low, high, saw 'loose'"),
    "nothing for a union": ({"how": None}, "how", "expected 'auto' or the fields low, high, saw None"),
    "inside the nearer form": ({"how": {"low": "x"}}, "how.low", "expected a number, saw 'x'"),
    "a bound inside it": ({"how": {"low": 1, "high": -1}}, "how.high", "expected greater than or equal to 0, saw -1"),
    "an unknown field inside it": ({"how": {"lwo": 1}}, "how.lwo", "unknown field"),
    "a missing field inside it": ({"how": {"high": 1}}, "how.low", "it is required, and missing"),
    "a union by name": ({"by_name": {"int": 3}}, "by_name.int", "expected 'auto' or the fields low, high, saw 3"),
    "a key that is no name, and what it holds": ({"sizes": {1.5: {"x": 1}}}, "sizes", "expected text, saw 1.5"),
    "a union in a list": ({"wide": [1, "x"]}, "wide.1", "expected an integer or a list, saw 'x'"),
    "a list in a union in a list": ({"wide": [1, [2, "x"]]}, "wide.1.1", "expected an integer, saw 'x'"),
    "a short form": ({"sizes": {"b": 0}}, "sizes.b", "expected greater than 0, saw 0"),
    "a short form of a union": ({"sizes": {"b": [1, "x"]}}, "sizes.b", "expected an integer, saw 'x'"),
    "what is no short form": ({"sizes": {"b": 1.5}}, "sizes.b", "expected the fields size, opt, saw 1.5"),
    "a name that is a field elsewhere": ({"sizes": {"size": {"size": "x"}}}, "sizes.size.size", "expected an integer"),
    "one form or none": ({"only": 3}, "only", "expected the fields low, high, saw 3"),
    "unknown before missing": ({"only": {"lwo": 1}}, "only.lwo", "unknown field"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case: str) -> None:
    raw, place, what = CASES[case]
    with pytest.raises(ValidationError) as caught:
        Fields.model_validate(raw)
    found = mistake(Fields, raw, caught.value)
    assert ".".join(map(str, found.place)) == place
    assert found.what.startswith(what)


def test_an_unknown_field_of_a_form_names_the_nearest() -> None:
    raw = {"how": {"lwo": 1}}
    with pytest.raises(ValidationError) as caught:
        Fields.model_validate(raw)
    assert mistake(Fields, raw, caught.value).hint == "did you mean 'low'?"


@pytest.mark.parametrize(
    ("written", "hint"), [("head", "a list of one: [head]"), (3, "a list of one: [3]"), ({"a": 1}, "")]
)
def test_one_item_is_told_how_to_be_a_list(written: Any, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Fields.model_validate({"names": written})
    assert mistake(Fields, {"names": written}, caught.value).hint == hint


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"count": True}, ["count: expected an integer, saw True"]),
        ({"only": {"low": False}}, ["only.low: expected a number, saw False"]),
        ({"wide": [2, True]}, ["wide.1: expected an integer, saw True"]),
        ({"sizes": {"b": True}}, ["sizes.b: expected a table of fields, saw True"]),
        ({"values": {"a": True, "b": 1}}, ["values.a: expected a number, saw True"]),
        ({"count": 1, "flags": {"a": True, "b": 0}, "wide": [1]}, []),
        ({"values": dict.fromkeys("hcbgafde", True)}, [f"values.{k}: expected a number, saw True" for k in "hcbgafde"]),
    ],
)
def test_true_is_no_number_and_is_told_in_the_order_written(raw: dict[str, Any], told: list[str]) -> None:
    taken = Fields.model_validate(raw).model_dump()
    assert [f"{'.'.join(map(str, m.place))}: {m.what}" for m in unfit_numbers(raw, taken)] == told
