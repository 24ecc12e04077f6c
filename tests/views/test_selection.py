"""`pipe diff --module`, `--fail-under` and `--csv`: which layers are shown and judged, and what a script reads."""

from __future__ import annotations

import csv
import io
import json
import math
import sys

import pytest

from layerline import cli
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.report import OWN, LayerDiff, Report
from layerline.views import selection, tables
from tests.pipeline.conftest import fake_stages, folder
from tests.pipeline.fakes import Folder
from tests.views.samples import LAYERS, diff, values

__all__ = ["fake_stages", "folder"]
REPORT = Report(stage="quantize", records=values(30))


def names(report: Report) -> list[str]:
    return [record.name for record in report.records]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("layer1.0", ["conv2d_1", "add", "relu_1"]),
        ("layer1", ["conv2d_1", "add", "relu_1"]),
        ("layer1.*", ["conv2d_1", "add", "relu_1"]),
        ("*.conv*", ["conv2d", "conv2d_1"]),
        ("stem.act", ["relu"]),
        ("mean", ["mean"]),
        ("*", [name for name, _, _ in LAYERS]),
    ],
)
def test_a_pattern_is_a_path_with_everything_below_it_or_a_glob(pattern: str, kept: list[str]) -> None:
    assert names(selection.of_module(REPORT, pattern)) == kept


def test_a_merged_layer_is_found_by_each_of_its_paths() -> None:
    merged = Report(stage="fuse", records=(diff("y", "stem.conv, stem.act", "FusedConv", 40.0), diff("z", "head")))
    assert names(selection.of_module(merged, "stem.act")) == ["y"]


@pytest.mark.parametrize("pattern", ["layer", "layer1.0.conv", "Stem", "layer1.[a-"])
def test_a_pattern_without_a_match_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="no layer matches") as caught:
        selection.of_module(REPORT, pattern)
    assert caught.value.hint


def test_limits_are_read() -> None:
    assert selection.read_limits(["sqnr=20", "own=-1.5"]) == {"sqnr": 20.0, "own": -1.5}


@pytest.mark.parametrize("text", ["sqnr", "sqnr=", "sqnr=x", "sqnr=nan", "sqnr=inf", "sqmr=20", "=20", "sqnr>20"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        selection.read_limits([text])
    assert caught.value.where == "--fail-under" and caught.value.hint
    with pytest.raises(ConfigError, match="twice"):
        selection.read_limits(["own=1", "own=2"])


def test_what_is_below_a_limit() -> None:
    records = (
        diff("at", "a", db=20.0),
        diff("below", "b", db=19.9),
        diff("equal", "c", db=math.inf),
        diff("undefined", "d", db=math.nan),
        diff("one_sided", "e", db=50.0, one_sided=3),
        diff("shapes", "f", extra={"mismatch": "shape (3, 1) against (3, 3)"}),
        LayerDiff(name="random", op="Dropout", extra={"nondeterministic": "Dropout"}),
    )
    failing = selection.below(Report(stage="fuse", records=records), {"sqnr": 20.0})
    assert [item["value"] for item in failing] == ["below", "undefined", "one_sided", "shapes"]
    assert failing[0] == {"layer": "b", "value": "below", "measure": "sqnr", "seen": 19.9, "limit": 20.0}
    assert [item["seen"] for item in failing[1:]] == ["nan", "-inf", "-inf"]
    error = selection.failure(failing, "fuse")
    assert error is not None and error.exit_code == 1
    assert error.what.startswith("b (below): sqnr 19.9, limit 20; d (undefined): sqnr nan, limit 20")
    assert selection.failure([], "fuse") is None


def test_a_name_with_a_line_break_stays_on_the_line_of_its_error() -> None:
    records = (diff("x\nerror: all is lost", "a\u2028b", db=1.0),)
    error = selection.failure(selection.below(Report(stage="fuse", records=records), {"sqnr": 20.0}), "fuse")
    assert error is not None and error.what == r"a\u2028b (x\x0aerror: all is lost): sqnr 1, limit 20"


def test_several_limits_are_judged_on_their_own() -> None:
    low = diff("x", "a", db=40.0, extra={OWN: 14.0, "weight_sqnr_db": 30.0})
    report = Report(stage="quantize", records=(low, diff("y", "b", db=10.0)))
    limits = {"sqnr": 20.0, "own": 15.0, "weight": 30.0}
    assert [(i["value"], i["measure"]) for i in selection.below(report, limits)] == [("y", "sqnr"), ("x", "own")]


def test_a_measure_that_nothing_has_is_no_pass() -> None:
    with pytest.raises(ConfigError, match="no value of quantize has the measure own"):
        selection.below(REPORT, {"own": 15.0})
    with pytest.raises(ConfigError, match="no value of train has the measure sqnr"):
        selection.below(Report(stage="train"), {"sqnr": 15.0})


def test_the_csv_holds_unrounded_figures() -> None:
    first = diff("a,b", 'the "stem"', db=1 / 3, shape=("batch", 4), dtype="float32", extra={OWN: 2 / 3, "clipped": 0.1})
    second = diff("y", "head", db=math.inf)
    report = Report(stage="quantize", records=(second, first))
    then = Report(stage="quantize", records=(diff("a,b", db=2.5),))
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(report, "error", then))))
    assert [row["name"] for row in rows] == ["a,b", "y"]
    assert rows[0]["layer"] == 'the "stem"' and rows[0]["shape"] == "batchx4" and rows[0]["dtype"] == "float32"
    assert (float(rows[0]["sqnr_db"]), float(rows[0][OWN]), rows[0]["clipped"]) == (1 / 3, 2 / 3, "0.1")
    assert (rows[1]["sqnr_db"], rows[1][OWN], rows[1]["max_abs"]) == ("inf", "", "")
    assert [row["then_sqnr_db"] for row in rows] == ["2.5", ""]
    assert len(list(csv.reader(io.StringIO(tables.csv_text(report, top=1))))) == 2
    assert tables.csv_text(Report(stage="train")) == "layer,name\n"


def test_the_options_of_the_command(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def pipe(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipe", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    monkeypatch.chdir(folder.root)
    pipe("run", "double")
    # The stage has layers.0, layers.1 and layers.2 of 60, 59 and 58 dB.
    code, out, err = pipe("diff", "double", "--csv", "--fail-under", "sqnr=58.5")
    assert [row["sqnr_db"] for row in csv.DictReader(io.StringIO(out))] == ["60.0", "59.0", "58.0"]
    assert code == 1 and "double: layers.2 (mul_2): sqnr 58, limit 58.5" in err
    code, out, err = pipe("diff", "double", "--fail-under", "sqnr=58.5", "--module", "layers.[01]")
    assert (code, err) == (0, "") and "mul_1" in out and "mul_2" not in out
    code, out, _ = pipe("diff", "double", "--json", "--fail-under", "sqnr=59.5", "--top", "1")
    document = json.loads(out)
    assert code == document["exit_code"] == 1 and [item["value"] for item in document["below"]] == ["mul_1", "mul_2"]
    assert [record["name"] for record in document["report"]["records"]] == ["mul_2"]
    code, out, _ = pipe("diff", "double", "--json")
    assert code == 0 and json.loads(out)["below"] == [] and "error" not in json.loads(out)
    pipe("run", "double", "--set", "double.tolerance=0.15")
    code, out, err = pipe("diff", "double", "--against", "previous", "--module", "*.1", "--csv")
    assert (code, err) == (0, "") and [row["then_sqnr_db"] for row in csv.DictReader(io.StringIO(out))] == ["59.0"]
    for wrong in (["--csv", "--json"], ["--fail-under", "own=3"], ["--fail-under", "x"], ["--module", "nothing"]):
        code, out, err = pipe("diff", "double", *wrong)
        assert code == 2 and "internal error" not in err and err.startswith("error")
