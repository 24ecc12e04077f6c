"""Two ONNX files compared on samples: worked-out distances, inputs that don't fit, files from strangers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from layerline import cli
from layerline.compare.region import reproduce
from layerline.export import probe_files
from layerline.graph.io import onnx_files
from layerline.onnx_import.compare_files import Further, compare_stages, compare_within
from layerline.pipeline.errors import ConfigError, PipeError, StageError
from layerline.pipeline.report import EFFECT, OWN, LayerDiff, Report
from tests.backends import models

ROOM = 1 << 30


def model(path: Path, scale: float = 1.0, *, rows: int | str = "N", **names: Any) -> Path:
    """y = Relu(x * scale) + 1, with x of the shape (rows, 2)."""
    x, relu, dtype = names.get("x", "x"), names.get("op", "Relu"), names.get("dtype", TensorProto.FLOAT)
    nodes = [
        helper.make_node("Mul", [x, "scale"], ["h"]),
        helper.make_node(relu, ["h"], [names.get("inner", "r")]),
        helper.make_node("Add", [names.get("inner", "r"), "one"], ["y"]),
    ]
    array = helper.tensor_dtype_to_np_dtype(dtype)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(x, dtype, [rows, 2])],
        [helper.make_tensor_value_info("y", dtype, [rows, 2])],
        [numpy_helper.from_array(np.array(v, array), n) for n, v in (("scale", [1, scale]), ("one", 1))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def samples(path: Path, **arrays: Any) -> Path:
    np.savez(path, **{name: np.asarray(array, np.float32) for name, array in arrays.items()})
    return path


class Silent:
    def say(self, text: str) -> None: ...


def compared(a: Path, b: Path, data: Path, further: Further | None = None) -> Report:
    return compare_within(a, b, data, ROOM, further or Further(), Silent())


def test_the_distance_is_that_of_the_changed_factor(tmp_path: Path) -> None:
    data = samples(tmp_path / "x.npz", x=[[3, 4]] * 3)
    report = compared(model(tmp_path / "a.onnx"), model(tmp_path / "b.onnx", 0.9), data)
    h, r, y = report.records
    # (3, 4) against (3, 3.6), and behind the sum (4, 5) against (4, 4.6).
    assert [record.name for record in report.records] == ["h", "r", "y"] and report.notes == ()
    assert h.sqnr_db == r.sqnr_db == pytest.approx(10 * math.log10(25 / 0.16), abs=1e-4)
    assert y.sqnr_db == pytest.approx(10 * math.log10(41 / 0.16), abs=1e-4)
    assert h.max_abs == pytest.approx(0.4, rel=1e-5) and h.mean_abs == pytest.approx(0.2, rel=1e-5)
    assert h.extra[OWN] == pytest.approx(h.sqnr_db) and r.extra[OWN] == y.extra[OWN] == math.inf


def test_values_of_other_names_are_left_out_and_counted(tmp_path: Path) -> None:
    data = samples(tmp_path / "x.npz", x=[[3, 4]])
    report = compared(model(tmp_path / "a.onnx"), model(tmp_path / "b.onnx", inner="other"), data)
    assert [record.name for record in report.records] == ["h", "y"]
    assert report.notes[0].startswith("1 of 3 values of the first model are not compared")


def test_what_stands_for_outputs_that_are_counted_is_named(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[n, 2] x) => (float[k] y) {
      h = Mul (x, s) z = NonZero (h) i = Transpose (z) y = GatherND (h, i) }"""
    for name, scale in (("a", 1.0), ("b", 0.9)):
        proto = onnx.parser.parse_model(text)
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(scale), "s"))
        onnx.save(proto, tmp_path / f"{name}.onnx")
    data = samples(tmp_path / "x.npz", x=[[3, 4]])
    report = compared(tmp_path / "a.onnx", tmp_path / "b.onnx", data, Further(effect=True))
    assert "decides the size of y, so they are judged by h" in report.notes[0]
    assert report.records[0].extra[EFFECT] == pytest.approx(20, abs=1e-4)


@pytest.mark.parametrize(("rows_a", "rows_b"), [("N", "M"), (1, "N"), ("N", 1), (3, 3)])
def test_every_sample_counts_once_at_any_fixed_batch(rows_a: int | str, rows_b: int | str, tmp_path: Path) -> None:
    data = samples(tmp_path / "x.npz", x=[[3, 1], [3, 10], [3, 100]])
    report = compared(model(tmp_path / "a.onnx", rows=rows_a), model(tmp_path / "b.onnx", 1.5, rows=rows_b), data)
    assert report.records[0].max_abs == 50.0 and report.records[0].mean_abs == pytest.approx(55.5 / 6)
    assert report.notes == ()


def test_whole_inputs_and_a_batch_that_is_filled_up(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a.onnx", rows=2), model(tmp_path / "b.onnx", 2.0, rows=2)
    whole = compared(a, b, samples(tmp_path / "x.npz", x=[[[0, 1], [0, 2]], [[0, 3], [0, 4]]]))
    assert whole.records[0].mean_abs == 10 / 8 and whole.notes == ()
    filled = compared(a, b, samples(tmp_path / "x.npz", x=[[0, 1], [0, 2], [0, 3]]))
    assert filled.records[0].mean_abs == (1 + 2 + 3 + 1) / 8
    assert filled.notes == ("the models take 2 samples at once: the last 1 are filled up with the first ones",)


def test_the_integers_of_quantised_values_have_no_rows(tmp_path: Path) -> None:
    data = tmp_path / "x.npz"
    np.savez(data, x=np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32))
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, scale in zip(files, (0.1, 0.2), strict=True):
        quantised = models.quantised(scale=scale)
        onnx.save(quantised, path)
    report = compared(*files, data)
    assert [record.name for record in report.records] == ["x_dq", "c", "r", "p", "y"] and not report.notes


def test_inputs_that_differ_are_named(tmp_path: Path) -> None:
    a, data = model(tmp_path / "a.onnx", rows=1), samples(tmp_path / "x.npz", x=[[3, 4]])
    others = {
        "no such input": model(tmp_path / "b.onnx", x="z"),
        "it is float64, and float32": model(tmp_path / "c.onnx", dtype=TensorProto.DOUBLE),
        r"its shape is \(4, 2\), and \(1, 2\)": model(tmp_path / "d.onnx", rows=4),
    }
    for text, other in others.items():
        with pytest.raises(ConfigError, match=text) as caught:
            compared(a, other, data)
        assert caught.value.where.startswith(f"{other.name}: input ")
    with pytest.raises(ConfigError, match="there is no input 'q'"):
        compared(a, a, samples(tmp_path / "q.npz", q=[[3, 4]]))
    with pytest.raises(ConfigError, match=r"shape \(1, 3\), the model takes \(1, 2\)"):
        compared(a, a, samples(tmp_path / "q.npz", x=[[3, 4, 5]]))


def test_the_file_at_fault_is_named(tmp_path: Path) -> None:
    a, data = model(tmp_path / "a.onnx"), samples(tmp_path / "x.npz", x=[[3, 4]])
    with pytest.raises(StageError, match="Nope") as caught:
        compared(a, model(tmp_path / "b.onnx", op="Nope"), data)
    assert caught.value.where == "b.onnx"
    (tmp_path / "junk.onnx").write_bytes(b"\x00junk")
    with pytest.raises(PipeError, match="not a readable ONNX file") as unread:
        compared(a, tmp_path / "junk.onnx", data)
    assert unread.value.where == "junk.onnx"
    with pytest.raises(StageError, match="GB"):
        compare_within(model(tmp_path / "c.onnx", rows=1 << 20), a, data, 1 << 20, Further(), Silent())


def test_what_two_stages_left_is_compared_on_the_probes_of_the_first(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, factor in zip(folders, (1.0, 0.9), strict=True):
        folder.mkdir()
        model(folder / "model.onnx", factor)
    newer = onnx.load(folders[1] / "model.onnx")
    newer.opset_import[0].version = 19
    onnx.save(newer, folders[1] / "model.onnx")
    probe_files.save(folders[0], [{"x": np.float32([[3, 4]])}])
    report = compare_stages(*folders, Silent(), Further(effect=True))
    h, r, y = report.records
    assert report.notes == (), "opset 17 is raised to 19, so that both are one graph"
    assert h.sqnr_db == pytest.approx(10 * math.log10(25 / 0.16), abs=1e-4) and y.extra[OWN] == math.inf
    assert h.extra[EFFECT] == pytest.approx(10 * math.log10(41 / 0.16), abs=1e-4) and EFFECT not in r.extra


def test_values_of_an_emulation_are_not_compared(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, factor in zip(folders, (1.0, 0.5), strict=True):
        folder.mkdir()
        half = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[n, 2] x) => (float[n, 2] y) {'
            f" a = Cast <to = 16> (x) w = Constant <value = float {{{factor}}}> () v = Cast <to = 16> (w)"
            " h = Mul (a, v) y = Cast <to = 1> (h) }"
        )
        onnx.save(half, folder / "model.onnx")
    probe_files.save(folders[0], [{"x": np.float32([[3, 4]])}])
    by_name = {record.name: record for record in compare_stages(*folders, Silent(), Further()).records}
    assert by_name.keys() <= {"a", "v", "h", "y"}
    assert by_name["h"].rel_l2 == pytest.approx(0.5) and by_name["h"].op == "Mul" and by_name["a"].max_abs == 0


@pytest.mark.parametrize("order", ["own", "network"])
def test_the_smallest_model_that_shows_a_difference_and_the_script(order: str, tmp_path: Path) -> None:
    data = samples(tmp_path / "x.npz", x=[[3, 1], [3, 10]])
    files = model(tmp_path / "a.onnx", rows=1), model(tmp_path / "b.onnx", 0.9, rows=1)
    compared(*files, data, Further(repro=tmp_path / "bug", order=order))
    cut = onnx.load(tmp_path / "bug" / "model.onnx")
    assert [node.op_type for node in cut.graph.node] == ["Mul"] and [o.name for o in cut.graph.output] == ["h"]
    script = [sys.executable, str(tmp_path / "bug" / "repro.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "worst element: [0, 1] of [1, 2]\nseen 9, expected 10\n1 of 2 elements differ" in done.stdout


def test_an_error_from_further_back_is_shown_from_where_both_are_equal(tmp_path: Path) -> None:
    a, b = (onnx_files.read_model(model(tmp_path / f"{n}.onnx", n)) for n in (1.0, 0.9))
    feeds = [{"x": np.float32([[3, 4]])}]
    bad = LayerDiff(name="y", op="Add")
    reproduce(a, b, feeds, bad, [], tmp_path / "bug")
    assert [node.op_type for node in onnx.load(tmp_path / "bug" / "model.onnx").graph.node] == ["Mul", "Relu", "Add"]
    np.testing.assert_array_equal(np.load(tmp_path / "bug" / "expected.npy"), [[4, 5]])


def test_the_command_needs_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def pipe(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipe", "diff", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    monkeypatch.chdir(tmp_path)
    model(tmp_path / "a.onnx")
    model(tmp_path / "b.onnx", 0.9)
    samples(tmp_path / "x.npz", x=[[3, 4]])
    files = ("a.onnx", "b.onnx", "--data", "x.npz")
    code, out, err = pipe(*files, "--json", "--fail-under", "own=22")
    document = json.loads(out)
    assert code == document["exit_code"] == 1 and "files: h (h): own 21.94, limit 22" in err
    assert document["report"]["reference"] == "a.onnx on onnxruntime"
    assert [item["value"] for item in document["below"]] == ["h"]
    code, out, err = pipe(*files, "--repro", "bug", "--sort", "effect")
    assert "wrote bug: " in out
    assert code == 0 and "outputs dB" in out and (tmp_path / "bug" / "repro.py").is_file()
    code, out, err = pipe(*files, "--by-channel", "h", "--json")
    rows = json.loads(out)["report"]["tables"]["channels"]
    assert code == 0 and [row["channel"] for row in rows] == [1, 0] and rows[1]["own_sqnr_db"] == "inf"
    code, out, err = pipe(*files, "--by-channel", "h")
    assert code == 0 and "channels\nvalue " in out and "own dB" in out
    code, _, err = pipe(*files, "--by-channel", "hh")
    assert code == 2 and "no layer is called 'hh'" in err and "did you mean 'h'" in err
    wrong = (
        [*files, "--repro", "bug"],
        ["a.onnx", "--repro", "no"],
        ["a.onnx"],
        ["a.onnx", "b.onnx"],
        ["a.onnx", "no.onnx", *files[2:]],
        [*files, "--on", "openvino"],
        [*files, "--by-channel", "h", "--csv"],
        ["a.onnx", "--by-channel", "h"],
    )
    for arguments in wrong:
        code, out, err = pipe(*arguments)
        assert (code, out) == (2, "") and err.startswith("error ") and "internal error" not in err


def test_the_effect_of_a_layer_between_two_quantised_models_counts_its_weights(tmp_path: Path) -> None:
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, scale in zip(files, (1.0, 1.1), strict=True):
        nodes = [
            helper.make_node("DequantizeLinear", ["w", "scale"], ["w/dequantized"]),
            helper.make_node("MatMul", ["x", "w/dequantized"], ["y"]),
        ]
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("x", "y"))
        stored = [
            numpy_helper.from_array(np.int8([[1, 0], [0, 2]]), "w"),
            numpy_helper.from_array(np.float32(scale), "scale"),
        ]
        graph = helper.make_graph(nodes, "g", [x], [y], stored)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    (row,) = compared(*files, samples(tmp_path / "x.npz", x=[[3, 4]]), Further(effect=True)).records
    # Every element of y is 1.1 times as large: an error of 20 dB, which is the layer's own and that of the output.
    assert row.name == "y" and row.extra[OWN] == pytest.approx(20, abs=1e-3)
    assert row.extra[EFFECT] == pytest.approx(20, abs=1e-3)
