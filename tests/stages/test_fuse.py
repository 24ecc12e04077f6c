"""The fuse stage as the pipeline runs it: folders in, folders and a report out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from layerline.compare import noise_floor
from layerline.export import probe_files
from layerline.export.signature import Signature, Value
from layerline.graph.fusion.firing import Firing, Site
from layerline.graph.fusion.verify_rewrites import RewriteProof
from layerline.graph.io import onnx_files
from layerline.pipeline.config.project import load
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.report import LayerDiff, Report
from layerline.pipeline.stage import Work
from layerline.stages import fuse
from layerline.stages.fuse import Fuse, _cut
from tests.graph.fusing import normal, parse, statistics

BODY = """c = Conv(x, w) n = BatchNormalization(c, gamma, beta, mean, var) d = Dropout(n) r = Relu(d)
          p = GlobalAveragePool(r) f = Flatten(p) m = MatMul(f, v) y = Add(m, b)"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = {"w": normal(4, 3, 3, 3), "v": normal(4, 2, seed=4), "b": normal(2, seed=5)} | statistics(4)
    model = parse("(float[batch, 3, H, W] x) => (float[batch, 2] y)", BODY, **tensors)
    for node in model.graph.node:
        node.metadata_props.add(key="layerline.module", value=f"net.{node.op_type.lower()}")
    onnx_files.save(model, folder)
    probe_files.save(folder, [{"x": normal(2, 3, 8, 8)}, {"x": normal(1, 3, 5, 9)}, {"x": normal(3, 3, 8, 8)}])
    values = (
        Value(name="x", dtype="float32", shape=("batch", 3, "H", "W")),
        Value(name="y", dtype="float32", shape=("batch", 2)),
    )
    Signature(inputs=values[:1], outputs=values[1:]).save(folder)
    return folder


def run(source: Path, out: Path, **fields: Any) -> Report:
    out.mkdir()
    scratch = out.parent / f"{out.name}.scratch"
    scratch.mkdir()
    said: list[str] = []
    log = SimpleNamespace(say=said.append, progress=lambda *a, **k: None)
    task: Any = None
    return Fuse(**fields).run(Work(inputs={"model": source}, task=task, out=out, scratch=scratch, log=log))  # type: ignore[arg-type]


def test_leaves_the_model_the_record_and_what_travels_along(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"model.onnx", "signature.json", "probes.safetensors", "rewrites.json"}
    model = onnx.load(str(tmp_path / "out" / "model.onnx"))
    assert [n.op_type for n in model.graph.node] == ["Conv", "Relu", "GlobalAveragePool", "Flatten", "Gemm"]
    record = json.loads((tmp_path / "out" / "rewrites.json").read_text())
    [row] = [r for r in record["fired"] if r["rule"] == "batchnorm"]
    assert row["value"] == "n"
    assert row["module"] == ["net.conv", "net.batchnormalization"]
    assert row["sources"] == ["c", "n"]
    assert 0 < row["error"] <= row["tolerance"]
    assert row["feeds"] == 2
    assert report.passed
    assert report.metrics["nodes_before"] == 8
    assert report.metrics["nodes_after"] == 5
    assert Report.from_json(report.to_json()) == report


def test_report_has_a_row_for_every_value_that_survives_or_was_merged(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out")
    rows = {r.name: r for r in report.records}
    assert list(rows) == ["n", "d", "r", "p", "f", "y"]
    assert all(r.tolerance is not None and r.passed for r in rows.values())
    assert rows["n"].module == "net.batchnormalization"
    assert "noise floors measured" in report.notes[0]


def test_every_value_that_is_gone_names_the_one_it_was_merged_into(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "TABLE_ROWS", 1)  # what the table leaves out is named all the same
    report = run(source, tmp_path / "out")
    assert report.merged == {"c": "n", "m": "y"}
    assert any("the first 1 of" in title for title in report.tables)


def test_what_was_merged_over_several_rewrites_names_the_last() -> None:
    def merged(*rewrites: tuple[str, str], rows: str) -> dict[str, str]:
        firings = [Firing(Site("r", v), v, tuple(sources), (), {}) for v, sources in rewrites]
        done: Any = SimpleNamespace(proofs=[RewriteProof(f, 0.0, 0.0, 0) for f in firings])
        return fuse._merged(done, [LayerDiff(name=n, op="Conv") for n in rows])

    assert merged(("b", "ab"), ("d", "bcd"), rows="d") == {"a": "d", "b": "d", "c": "d"}
    assert merged(("b", "ab"), ("d", "bcd"), rows="bd") == {"a": "b", "c": "d"}
    assert merged(("c", "ab"), rows="ac") == {"b": "c"}, "what still has a row was not merged"
    assert merged(("c", "ab"), rows="") == {}, "a constant has no row"
    assert merged(("b", "a"), ("a", "b"), rows="") == {}


def test_floors_from_torch_are_used_where_there_are_any(source: Path, tmp_path: Path) -> None:
    noise_floor.save(source, {"n": 1e-3, "y": 1e-3})
    report = run(source, tmp_path / "out")
    assert {r.name: r.tolerance for r in report.records}["n"] == pytest.approx(8e-3)
    assert (tmp_path / "out" / "floor.json").is_file()
    assert [n for n in report.notes if not n.startswith("a default onnxruntime session gives the same")] == []


def test_the_same_bytes_again(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(source, tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_rules_are_switched_by_name(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", rules={"batchnorm": False})
    model = onnx.load(str(tmp_path / "out" / "model.onnx"))
    assert "BatchNormalization" in [n.op_type for n in model.graph.node]


def test_unknown_rule_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    """RecordedError before any stage starts, at its line."""
    (tmp_path / "pipe.yaml").write_text("name: p\nfuse:\n  rules:\n    fold: true\n    batch_norm: false\n")
    with pytest.raises(ConfigError, match="did you mean 'batchnorm'") as error:
        load(tmp_path)
    assert error.value.where == "pipe.yaml:5:5" and error.value.what.startswith("fuse.rules.batch_norm: ")
    with pytest.raises(ConfigError, match="did you mean 'fold'"):
        load(tmp_path, ["fuse.rules={foldd: false}"])


def test_a_model_without_probes_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "probes.safetensors").unlink()
    with pytest.raises(StageError, match="probe"):
        run(source, tmp_path / "out")


def test_declined_rewrites_are_listed_with_their_reason(source: Path, tmp_path: Path) -> None:
    model = onnx_files.load(source / "model.onnx")
    model.graph.output.append(onnx.helper.make_tensor_value_info("c", 1, ["batch", 4, None, None]))
    onnx_files.save(model, source)
    report = run(source, tmp_path / "out")
    assert {"rule": "batchnorm", "value": "n", "reason": "Conv output c is a graph output"} in report.tables["declined"]


def test_random_values_are_shown_and_not_judged(source: Path, tmp_path: Path) -> None:
    """T11: a random operator is called that, and no mismatch."""
    model = parse(
        "(float[batch, 4] x) => (float[batch, 4] y)",
        "n = RandomNormalLike(x) a = Add(x, n) b = Identity(a) y = Relu(b)",
    )
    onnx_files.save(model, source)
    probe_files.save(source, [{"x": normal(2, 4)}])
    report = run(source, tmp_path / "out")
    assert report.passed
    assert all(r.tolerance is None for r in report.records)
    assert any("drawn at random (RandomNormalLike)" in n for n in report.notes)


def test_weights_outside_of_the_file_come_along(source: Path, tmp_path: Path) -> None:
    model = onnx_files.load(source / "model.onnx")
    onnx_files.save(model, source, external_over=16)
    assert (source / "model.onnx.data").is_file() or all(len(t.raw_data) < 1024 for t in model.graph.initializer)
    assert run(source, tmp_path / "out").passed


def test_a_rewrite_that_spoils_the_whole_graph_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each firing passes its own proof (the floors allow it), the graph as a whole doesn't."""
    from layerline.graph.fusion import fuse
    from layerline.graph.fusion.rule import on
    from layerline.graph.fusion.rules import RULES

    leaky = on("leaky", "Relu")(lambda node, tape, work: tape.op("LeakyRelu", [node.inputs[0]], {"alpha": 0.1}))
    monkeypatch.setattr(fuse, "RULES", (*RULES, leaky))
    noise_floor.save(source, {"r": 1.0, "y": 1e-6})
    report = run(source, tmp_path / "out")
    assert not report.passed
    assert report.first_failing() is not None
    assert "rule leaky at r takes the graph beyond its floor" in report.notes[-1]


def test_size_of_what_folding_adds_is_reported(source: Path, tmp_path: Path) -> None:
    """T37: the head reads the embedding transposed; folding doubles it."""
    body = "e = Gather(w, i) t = Transpose <perm = [1, 0]>(w) y = MatMul(e, t)"
    model = parse("(int64[batch] i) => (float[batch, 50] y)", body, w=normal(50, 8))
    onnx_files.save(model, source)
    probe_files.save(source, [{"i": np.array([1, 3])}])
    report = run(source, tmp_path / "out")
    assert report.metrics["initializer_bytes_before"] == 1600
    assert report.metrics["initializer_bytes_after"] == 3200


def test_debugging_writes_the_model_before_and_after_the_guilty_rewrite(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerline.graph.fusion import fuse
    from layerline.graph.fusion.rule import on
    from layerline.graph.fusion.rules import RULES

    leaky = on("leaky", "Relu")(lambda node, tape, work: tape.op("LeakyRelu", [node.inputs[0]], {"alpha": 0.1}))
    monkeypatch.setattr(fuse, "RULES", (*RULES, leaky))
    noise_floor.save(source, {"r": 1.0, "y": 1e-6})
    log = SimpleNamespace(say=lambda text: None, progress=lambda *a, **k: None)
    task: Any = None
    work = Work(inputs={"model": source}, task=task, out=tmp_path, scratch=tmp_path, log=log)  # type: ignore[arg-type]
    row = Fuse().debug(work, tmp_path / "why")
    assert row is not None
    assert (row.name, row.extra["rule"], row.extra["place"]) == ("y", "leaky", "r")
    before, after = (onnx_files.load(tmp_path / "why" / side / "model.onnx") for side in ("before", "after"))
    assert "LeakyRelu" not in [n.op_type for n in before.graph.node]
    assert "LeakyRelu" in [n.op_type for n in after.graph.node]
    monkeypatch.undo()
    assert Fuse().debug(work, tmp_path / "why") is None


def test_a_table_that_is_cut_says_so() -> None:
    rows: list[dict[str, Any]] = [{"rule": f"r{i}"} for i in range(480)]
    assert _cut("rewrites", rows[:200]) == {"rewrites": rows[:200]}
    assert _cut("rewrites", rows) == {"rewrites, the first 200 of 480 (all: rewrites.json)": rows[:200]}
