"""The tree of a plan, and the difference of two."""

from pathlib import Path

import pytest
from rich.console import Console

from layerline.calib.plan import Kept, QuantPlan, QuantValue
from layerline.pipeline.errors import PipeError
from layerline.views import plan_tree

VALUE = QuantValue(
    name="x", role="activation", module="net.conv", readers=(("c", 0),), why="input of Conv",
    scales=(0.5,), amax=63.5, seen=(-1.0, 63.5), calibrator="mse",
)  # fmt: skip
WEIGHT = QuantValue(
    name="w", role="weight", module="net.conv", axis=0, readers=(("c", 1),), why="weight of Conv",
    scales=(0.25, 0.5), amax=63.5, seen=(-1.0, 63.5), calibrator="minmax",
)  # fmt: skip
KEPT = Kept(name="x", op="Softmax", module="net", reason="there is no int8 rule for Softmax")


def written(folder: Path, *values: QuantValue, kept: tuple[Kept, ...] = ()) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_text(QuantPlan(values=values, kept=kept).to_json())
    return folder


def shown(entries, differing=None, width=200) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        plan_tree.show(console, entries, differing)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_values_stand_under_their_modules(tmp_path):
    entries = plan_tree.read(written(tmp_path / "a", VALUE, WEIGHT, kept=(KEPT,)))
    assert shown(entries) == [
        "net",
        "├── conv",
        "│   ├── x  int8, step 0.5, range by mse: input of Conv",
        "│   └── w  int8, 2 steps of 0.25 to 0.5 along axis 0, range by minmax: weight of Conv",
        "└── x (Softmax)  float: there is no int8 rule for Softmax",
    ]


def test_a_float_type_has_a_scale_and_no_step():
    entry = {"dtype": "float8e4m3fn", "scales": [0.5], "axis": None, "calibrator": "minmax", "why": "input of Conv"}
    assert plan_tree.text(entry) == "float8e4m3fn, scale 0.5, range by minmax: input of Conv"


def test_a_narrow_terminal_wraps_an_entry(tmp_path):
    entries = plan_tree.read(written(tmp_path / "a", VALUE, WEIGHT))
    assert shown(entries, width=50)[-2:] == [
        "    └── w  int8, 2 steps of 0.25 to 0.5 along axis",
        "        0, range by minmax: weight of Conv",
    ]


def test_an_entry_of_a_deep_module_has_room(tmp_path):
    deep = ".".join(f"m{i}" for i in range(3000))
    lines = shown({"x": {"module": deep, "reason": "there is no rule"}, "y": {"module": "m0.m1", "reason": "skip"}})
    assert lines[0].endswith("m0") and "x  float: there is no rule" in lines[-2] and "m2999" in "".join(lines)
    assert lines[-1] == "    └── y  float: skip"


def test_what_differs_between_two_plans(tmp_path):
    entries = plan_tree.read(written(tmp_path / "a", VALUE, WEIGHT))
    kept = Kept(name="c", op="Conv", module="net.conv", reason="skip")
    others = plan_tree.read(written(tmp_path / "b", WEIGHT, kept=(kept,)) / "plan.json")
    now = "int8, step 0.5, range by mse: input of Conv"
    assert plan_tree.changes(entries, others) == [
        {"name": "x", "module": "net.conv", "now": now, "then": "no entry"},
        {"name": "c (Conv)", "module": "net.conv", "now": "no entry", "then": "float: skip"},
    ]
    assert shown(entries, plan_tree.changes(entries, others))[-1] == "    └── c (Conv)  float: skip  ->  no entry"
    assert plan_tree.changes(entries, entries) == [] and shown(entries, []) == ["the two plans are the same"]


@pytest.mark.parametrize("content", ["", "[]", '{"values": [{"name": "x"}], "kept": []}', '{"values": [], "kept": 1}'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PipeError, match="no quantisation plan") as caught:
        plan_tree.read(tmp_path)
    assert caught.value.where.endswith("plan.json")
