"""Formats other than int8 in the quantize stage."""

from layerline.graph.io import onnx_files
from layerline.stages.quantize import Quantize
from tests.stages.test_quantize import CALIB, LABELLED, work  # noqa: F401 - a fixture
from tests.stages.test_quantize_search import formats, searched  # noqa: F401 - a fixture


def test_fp8_and_int8_layers_are_counted_and_the_artifact_is_what_was_measured(work):  # noqa: F811
    task = work(CALIB + LABELLED)
    report = Quantize(mode="fp8", layers={"y": "int8"}).run(task)
    assert report.passed, report.gates
    assert (report.metrics["fp8_products"], report.metrics["int8_products"]) == ("2 of 3", "1 of 3")
    assert report.metrics["output_sqnr_db"] > 20
    types = {row["value"]: row["type"] for row in report.tables["quantized"]}
    assert types == {
        "x": "float8e4m3fn", "w1": "float8e4m3fn", "r": "float8e4m3fn", "w2": "float8e4m3fn", "f": "int8", "wf": "int8",
    }  # fmt: skip
    assert onnx_files.load(task.out / onnx_files.FILE).opset_import[0].version >= 19


def test_fp8_with_the_rest_in_half_precision(work):  # noqa: F811
    report = Quantize(mode="fp8", rest="fp16").run(work(CALIB + LABELLED))
    assert report.passed, report.gates
    assert report.metrics["fp8_products"] == "3 of 3" and report.metrics["fp16_nodes"] > 0


def test_a_search_in_fp8_names_its_format(searched):  # noqa: F811
    report, _ = searched(mode="fp8")
    assert report.passed, report.gates
    assert set(formats(report).values()) == {"fp8"}
    assert report.tables["search"][0]["why"] == "the budget holds with it in fp8"
