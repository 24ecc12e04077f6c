"""TensorRT's messages, as they come, made into sentences."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, helper

from layerline.backends.tensorrt.trt_errors import parse_failed, plain

USAGE = "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error "
DRIVER = (
    "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at /_src/common/x.cpp:250 "
    "(cudaError 35: CUDA driver version is insufficient for CUDA runtime version))"
)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            USAGE + "(Dynamic input tensor b is missing dimensions in profile 0. In validate at /_src/n.cpp:4046)",
            "Dynamic input tensor b is missing dimensions in profile 0",
        ),
        (
            "Assertion failed: resolvedWeights(axesWeights): Axis input must resolve to a build-time constant!",
            "Axis input must resolve to a build-time constant!",
        ),
        (
            'convertDtype(onnxType, &newType) && "Unsupported data type for the Cast operator!"',
            "Unsupported data type for the Cast operator!",
        ),
        (
            f"Invalid Node - B\n{USAGE}(B: input has type Int32. In f at /_src/n.cpp:4)\n{DRIVER}",
            "B: input has type Int32",
        ),
        (
            "onnxOpImporters.cpp:1980: TensorRT supports UINT8 zero_point only on DLA.",
            "TensorRT supports UINT8 zero_point only on DLA.",
        ),
        (
            "[graphScope.cpp::analyze::463] Error Code 2: Internal Error (Assertion x failed.  In f at /_src/g.cpp:4)",
            "Assertion x failed",
        ),
        ("Unused Input: e", "Unused Input: e"),
    ],
)
def test_what_is_left_is_the_sentence(said, told) -> None:
    assert plain(said) == told


def test_the_drivers_complaint_is_kept_when_it_is_all_there_is() -> None:
    assert "cudaError 35" in plain(DRIVER)


def _scatters(tmp_path: Path, *reductions: str) -> Path:
    """A chain of ScatterElements; `none` is what TensorRT has."""
    nodes = [
        helper.make_node("ScatterElements", [f"v{i}", "at", "x"], [f"v{i + 1}"], name=f"/pool/{i}", reduction=kind)
        if kind else helper.make_node("ScatterElements", [f"v{i}", "at", "x"], [f"v{i + 1}"], name=f"/pool/{i}")
        for i, kind in enumerate(reductions)
    ]  # fmt: skip
    takes = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("v0", "x")]
    takes.append(helper.make_tensor_value_info("at", TensorProto.INT64, [4]))
    gives = [helper.make_tensor_value_info(f"v{len(nodes)}", TensorProto.FLOAT, [4])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", takes, gives)), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    ("reductions", "where", "told"),
    [(("", "add"), "ScatterElements /pool/1, module enc.pool", "ScatterElements: Unsupported reduction type"),
     (("add", "mul"), "ScatterElements /pool/0", "one of 2 ScatterElements nodes: /pool/0, /pool/1"),
     ((), "model.onnx", "the graph: Unsupported reduction type")],
)  # fmt: skip
def test_a_node_that_the_parser_does_not_name_is_found(tmp_path, reductions, where, told) -> None:
    """TensorRT's checks of attributes know the importer and not the node."""
    error = SimpleNamespace(
        node_name=str,
        node_operator=str,
        node=lambda: -1,
        desc=lambda: "Unsupported reduction type",
        func=lambda: "importScatterElements",
    )
    raised = parse_failed([error], {"/pool/1": "enc.pool"}, _scatters(tmp_path, *reductions))
    assert raised.where == where and told in raised.what
