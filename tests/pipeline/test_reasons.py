"""Why a stage would run again, in the words of pipe.yaml."""

from __future__ import annotations

import pytest

from layerline.pipeline.reasons import awaited, changes, describe

OLD = {"config.lr": "0.1", "env.torch": "2.0", "hook.loss": "a", "input.model": "d1", "file.x": "e", "version": "1"}
AXES = {"config.dims": "{}", "config.opset": "20"}


def axis(size: str, name: str = "None", at: str = "x") -> dict[str, str]:
    """What `dims: {x: 48}` or `dims: {x: h}` is kept as."""
    return {f"config.dims.{at}.{field}": "None" for field in ("min", "max")} | {
        f"config.dims.{at}.size": size,
        f"config.dims.{at}.name": name,
    }


def test_parts_in_words() -> None:
    assert changes(OLD, OLD) == {} and describe(OLD, OLD) == ""
    assert describe(OLD, OLD | {"config.lr": "0.2"}) == "lr 0.1 -> 0.2"
    assert describe(OLD, OLD | {"config.recipe.clip.value": "1"}) == "clip.value unset -> 1", "as pipe.yaml has it"
    assert describe(OLD, OLD | {"config.new": "1"}) == "new unset -> 1"
    assert describe(OLD, OLD | {"config.new": "None"}) == "new added"
    assert describe(OLD | {"config.key": ""}, OLD | {"config.key": "ema"}) == "key unset -> ema"
    assert describe(OLD, {n: v for n, v in OLD.items() if n != "config.lr"}) == "lr 0.1 -> unset"
    assert describe(OLD, OLD | {"hook.loss": "b", "input.model": "d2"}) == "loss() changed, input model changed"
    assert describe(OLD, dict.fromkeys(OLD, "new")) == "lr 0.1 -> new, torch 2.0 -> new and 4 more"
    assert describe(OLD, OLD | {"file.x": "f", "version": "2"}) == "file x changed, version 1 -> 2"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (AXES, {"config.opset": "20"} | axis("48"), "dims.x.size unset -> 48"),
        ({"config.opset": "20"} | axis("48"), AXES, "dims.x.size 48 -> unset"),
        (axis("48"), axis("64"), "dims.x.size 48 -> 64"),
        (axis("48"), axis("None", "h"), "dims.x.size 48 -> unset, dims.x.name unset -> h"),
        (axis("48"), axis("48") | axis("9", at="y") | axis("None", "n", at="z"),
         "dims.y.size unset -> 9, dims.z.name unset -> n"),
        (axis("48"), axis("48") | axis("9", "n", at="y"), "dims.y.size unset -> 9, dims.y.name unset -> n"),
        (axis("48") | axis("9", "n", at="y.2"), axis("48"), "dims.y.2.size 9 -> unset, dims.y.2.name n -> unset"),
        ({"config.values": "{}"}, {"config.values.sr": "16000.0"}, "values.sr unset -> 16000"),
        ({"config.profiles": "[]"}, {"config.profiles": "[{'batch': {'min': 1}}]"}, "profiles changed"),
        ({"config.skip": "[]"}, {"config.skip": repr(["a.long.module.path"] * 3)}, "skip changed"),
        ({"config.per_channel": "True", "config.x": "1.0"}, {"config.per_channel": "False", "config.x": "1.5"},
         "per_channel true -> false, x 1 -> 1.5"),
        ({"config.ema.decay": "0.9"}, {"config.ema.decay": "0.99"}, "ema.decay 0.9 -> 0.99"),
    ],
)  # fmt: skip
def test_fields_as_they_are_written_once_each(old: dict[str, str], new: dict[str, str], told: str) -> None:
    assert describe(old, new) == told


def test_only_an_input_that_is_not_known_yet_is_awaited() -> None:
    waiting = {n: v for n, v in OLD.items() if n not in ("input.model", "file.x")}
    assert awaited(OLD, waiting, None) == {"input.model"}
    assert awaited(OLD, waiting, "key") == awaited(OLD, OLD, None) == set(), "gone, or known"
