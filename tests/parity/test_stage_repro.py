"""The smallest model of what a stage did, on artifacts that differ in one weight."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

from layerline.parity import stage_repro
from layerline.pipeline.errors import StageError
from tests.backends import models

FEED = {"x": np.ones((1, 3, 8, 8), np.float32)}


def artifacts(tmp_path, **factors):
    """Stages that leave the same convolution, its weights times a factor; None for a stage that leaves torch."""
    folders = {}
    for stage, factor in factors.items():
        folders[stage] = tmp_path / stage
        if factor is not None:
            models.artifact(tmp_path / stage, models.conv(weight=models.WEIGHT * np.float32(factor)))
    return folders


def ran(folder):
    done = subprocess.run([sys.executable, str(folder / "repro.py")], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_layer_that_a_stage_changed_is_cut_out(tmp_path) -> None:
    folders = artifacts(tmp_path, ema=None, export=1.0, fuse=1.0, quantize=0.5)
    assert stage_repro.write("quantize", "", folders, [FEED], tmp_path / "worst").name == "c"
    stage_repro.write("quantize", "c", folders, [FEED], tmp_path / "conv")
    assert [node.op_type for node in onnx.load(tmp_path / "conv" / "model.onnx").graph.node] == ["Conv"]
    assert "relative L2 error: 0.5" in ran(tmp_path / "conv")
    with pytest.raises(StageError, match="computes every value as export does"):
        stage_repro.write("fuse", "c", folders, [FEED], tmp_path / "none")


def test_a_clipped_value_is_shown_by_the_layer_that_reads_it(tmp_path) -> None:
    folders = artifacts(tmp_path, fuse=1.0, quantize=1.0)
    graph = onnx.load(folders["quantize"] / "model.onnx")
    stored = {"s": np.float32(0.01), "z": np.int8(0)}
    graph.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items())
    q, dq = (
        models.node(op, [name, "s", "z"], [f"{name}/q"])
        for op, name in (("QuantizeLinear", "c"), ("DequantizeLinear", "c/q"))
    )
    graph.graph.node[1].input[0] = "c/q/q"
    nodes = [graph.graph.node[0], q, dq, graph.graph.node[1]]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    onnx.save(graph, folders["quantize"] / "model.onnx")
    assert stage_repro.write("quantize", "c", folders, [FEED], tmp_path / "bug").name == "y"
    ops = [node.op_type for node in onnx.load(tmp_path / "bug" / "model.onnx").graph.node]
    assert ops == ["QuantizeLinear", "DequantizeLinear", "Relu"]


def test_nan_of_a_torch_stage_is_shown_in_the_first_onnx_model(tmp_path) -> None:
    folders = artifacts(tmp_path, ema=None, export=np.nan)
    row = stage_repro.write("ema", "c", folders, [FEED], tmp_path / "bug")
    assert row.name == "c" and "144 of 144 elements are NaN or Inf" in ran(tmp_path / "bug")
    with pytest.raises(StageError, match="the loss shows only in torch"):
        stage_repro.write("ema", "", artifacts(tmp_path / "sound", ema=None, export=1.0), [FEED], tmp_path / "none")
    with pytest.raises(StageError, match="left no ONNX model"):
        stage_repro.write("ema", "", artifacts(tmp_path / "torch", ema=None), [FEED], tmp_path / "none")
