"""Ahead-of-time builds with TensorRT-RTX, which need no device: what they give, and what is told when they don't."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from layerline.backends import subprocess_build
from layerline.backends.tensorrt.builder import Built, TensorRT
from layerline.backends.tensorrt.network import compute_precisions
from layerline.backends.tensorrt.profiles import Sizes, resolve
from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from tests.backends import models
from tests.backends.models import BOOL, I64, F, graph, model, node

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed; it has wheels for Linux x86-64 and Windows")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process for each build would triple the time; one test below builds in two."""
    monkeypatch.setattr(subprocess_build, "call", lambda function, *args: function(*args))
    monkeypatch.chdir(tmp_path)


def build(folder: Path, proto: onnx.ModelProto, sizes: tuple[int, int, int] | None = (1, 2, 4), **options) -> Built:
    """Builds with every named dimension running over `sizes`."""
    path = folder / "model.onnx"
    onnx.save(proto, str(path))
    inputs = {
        i.name: tuple(d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim) for i in proto.graph.input
    }
    named = {d: Sizes(*sizes) for shape in inputs.values() for d in shape if isinstance(d, str)} if sizes else {}
    build_options = {k: options.pop(k) for k in ("taps", "modules") if k in options}
    profiles = resolve(inputs, {}, [named]) if named else ()
    return TensorRT("tensorrt-rtx", profiles=profiles, **options).build(path, **build_options)


def test_a_dynamic_model_builds_and_its_layers_are_named(tmp_path) -> None:
    built = build(tmp_path, models.conv())
    assert built.plan and built.version
    assert [(layer.type, layer.node, layer.precision) for layer in built.layers] == [
        ("CONVOLUTION", "conv", "float32"),
        ("ACTIVATION", "relu", "float32"),
    ]
    assert built.layers[1].outputs[0].name == "y" and built.layers[1].outputs[0].shape == (-1, 4, 6, 6)
    assert built.inputs[0].shape == (-1, 3, 8, 8) and built.outputs[0].name == "y"
    assert built.memory["weights_bytes"] > 0


def test_several_profiles_make_one_engine(tmp_path) -> None:
    onnx.save(models.conv(), str(tmp_path / "model.onnx"))
    shapes = {"x": ("batch", 3, 8, 8)}
    sizes = [{"batch": Sizes(1, 1, 4)}, {"batch": Sizes(1, 8, 32)}]
    both, one = (
        TensorRT(profiles=resolve(shapes, {}, wanted)).build(tmp_path / "model.onnx").plan
        for wanted in (sizes, sizes[:1])
    )
    assert len(both) > len(one)


def test_int8_is_seen_where_both_operands_are_dequantised(tmp_path) -> None:
    assert compute_precisions(build(tmp_path, models.quantised()).layers) == {"int8": 2}
    assert compute_precisions(build(tmp_path, models.quantised(weights=False)).layers) == {"float32": 2}
    assert compute_precisions(build(tmp_path, models.half()).layers) == {"float16": 1}


def test_dequantised_weights_alone_are_no_int8(tmp_path) -> None:
    proto = models.quantised()
    for one in proto.graph.node:
        if one.name == "conv":
            one.input[0] = "x"
    built = build(tmp_path, proto)
    assert {layer.node: layer.precision for layer in built.layers if layer.node in ("conv", "fc")} == {
        "conv": "float32",
        "fc": "int8",
    }


@pytest.mark.parametrize("shape", [(1, 8, 16, 64), (2, 3, 4, 8)])
def test_float32_attention_builds(tmp_path, shape) -> None:
    """The builder has no float32 kernel for it and fails unless it may take the operator apart."""
    proto = model(
        [node("Attention", ["q", "k", "v"], ["y"])], [(n, F, shape) for n in "qkv"], [("y", F, None)], opset=23
    )
    assert build(tmp_path, proto).plan


def test_t30_int64_stays_int64_without_an_alarm(tmp_path) -> None:
    far = model(
        [node("Slice", ["x", "start", "end", "axis"], ["y"])],
        [("x", F, [2, 8])],
        [("y", F, None)],
        {"start": [1], "end": [2**63 - 1], "axis": [1]},
    )
    assert not build(tmp_path, far).warnings
    wide = model([node("Add", ["x", "c"], ["y"])], [("x", I64, [2])], [("y", I64, None)], {"c": np.array([2**40])})
    built = build(tmp_path, wide)
    assert {t.dtype for layer in built.layers for t in layer.outputs} == {"int64"} and not built.warnings


def test_t39_another_size_or_another_weight_is_another_engine(tmp_path) -> None:
    def add(n: int) -> onnx.ModelProto:
        return model([node("Add", ["x", "y"], ["z"], "add")], [("x", F, [n, n]), ("y", F, [n, n])], [("z", F, [n, n])])

    weights = models.WEIGHT, models.WEIGHT + np.float32(0.5)
    protos = [add(3), add(4), *(models.conv(1, w) for w in weights)]
    assert len({build(tmp_path, p).plan for p in protos}) == 4


def print_digest(folder: str, batch: str) -> None:
    built = build(Path(folder), models.quantised(batch=int(batch) if batch.isdigit() else batch))
    print(hashlib.sha256(built.plan).hexdigest(), built.repeatable)


@pytest.mark.parametrize("batch", [2, "batch"])
def test_the_same_model_gives_the_same_bytes_wherever_it_lies(tmp_path, monkeypatch, batch) -> None:
    """Another process, folder, environment and hash seed. Engines of dynamic models differ without `isolated`."""
    monkeypatch.undo()
    script = "import sys; from tests.backends.test_builder import print_digest; print_digest(*sys.argv[1:])"
    seen = []
    for index, name in enumerate(("a", "b" * 200)):
        folder = tmp_path / name
        folder.mkdir()
        env = {**os.environ, "PYTHONHASHSEED": str(index), "PADDING": "x" * 3000 * index}
        command = [sys.executable, "-c", script, str(folder), str(batch)]
        root = Path(__file__).parents[2]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=root).stdout)
    if "False" in seen[0]:
        pytest.skip("this system does not let a process turn address randomisation off")
    assert seen[0] == seen[1]


def test_external_data_is_found_beside_the_model(tmp_path) -> None:
    inline = build(tmp_path, models.conv(1)).plan
    onnx.save(models.conv(1), str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.data", size_threshold=0)
    assert TensorRT().build(tmp_path / "e.onnx").plan == inline


def test_taps_become_outputs(tmp_path) -> None:
    built = build(tmp_path, models.conv(), taps=["c", "y", "no_such_value"])
    assert [t.name for t in built.outputs] == ["y", "c"]


def test_compute_capabilities_can_be_chosen(tmp_path) -> None:
    chosen, default = build(tmp_path, models.conv(1), targets=("8.0", "12.0")), build(tmp_path, models.conv(1))
    assert chosen.targets == ("8.0", "12.0") and chosen.plan != default.plan
    with pytest.raises(ConfigError, match=r"targets: .*'4\.2'\n.*8\.9"):
        build(tmp_path, models.conv(1), targets=("4.2",))


def test_the_workspace_can_be_limited(tmp_path) -> None:
    assert not build(tmp_path, models.conv(1), workspace_mb=64).warnings


def failure(folder: Path, proto: onnx.ModelProto, sizes=(1, 2, 4)) -> StageError:
    modules = {n.name: f"net.{n.name}" for n in proto.graph.node}
    with pytest.raises(StageError) as caught:
        build(folder, proto, sizes, modules=modules)
    return caught.value


def test_an_operator_without_importer_names_node_and_module(tmp_path) -> None:
    told = failure(tmp_path, model([node("Det", ["x"], ["y"], "det")], [("x", F, [2, 2])], [("y", F, None)]))
    assert told.where == "Det det, module net.det" and "no importer for this operator" in told.what


def test_a_node_without_a_name_is_told_by_its_number(tmp_path) -> None:
    bare = onnx.helper.make_node("Det", ["x"], ["y"])
    told = failure(tmp_path, model([bare], [("x", F, [2, 2])], [("y", F, None)]))
    assert told.where in ("Det node_of_y", "Det node without a name, number 0")


def test_axes_that_folding_would_fix_say_so(tmp_path) -> None:
    nodes = [node("Neg", ["a"], ["axes"]), node("ReduceMean", ["x", "axes"], ["y"], "mean")]
    told = failure(tmp_path, model(nodes, [("x", F, [2, 3])], [("y", F, None)], {"a": [1]}))
    assert "mean" in told.where and "run fuse" in told.hint


def test_a_file_that_is_no_onnx(tmp_path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a protobuf")
    with pytest.raises(StageError, match="TensorRT's parser"):
        TensorRT().build(tmp_path / "model.onnx")


def test_branches_of_different_rank_name_the_if(tmp_path) -> None:
    then = graph([node("ReduceSum", ["x", "axes"], ["t"], keepdims=0)], ["t"])
    other = graph([node("Relu", ["x"], ["e"])], ["e"])
    choice = node("If", ["c"], ["y"], "choose", then_branch=then, else_branch=other)
    told = failure(tmp_path, model([choice], [("x", F, [2, 4]), ("c", BOOL, [])], [("y", F, None)], {"axes": [0]}))
    assert "equal ranks" in told.what and "choose" in told.where
    assert "_src" not in str(told) and "cudaError" not in str(told)


def test_a_profile_whose_sizes_do_not_fit_together_is_refused(tmp_path) -> None:
    """The builder warns, builds, and leaves an engine that no input of that size runs on."""
    halves = model(
        [node("Reshape", ["x", "shape"], ["y"], "halve")], [("x", F, ["n", 3])], [("y", F, None)], {"shape": [-1, 2, 3]}
    )
    assert build(tmp_path, halves, (2, 4, 8)).plan
    told = failure(tmp_path, halves, (1, 2, 4))
    assert "can't run at the min shapes of a profile" in told.what and "halve" in told.where
    assert "can't run at the max shapes" in failure(tmp_path, halves, (2, 4, 5)).what


@pytest.mark.parametrize(
    ("op", "inputs", "stored"),
    [
        ("TopK", ["x", "k"], {}),
        ("Tile", ["x", "k"], {}),
        ("Slice", ["x", "zero", "k", "zero"], {"zero": [0]}),
    ],
)
def test_an_input_that_decides_sizes_is_refused_by_name(tmp_path, op, inputs, stored) -> None:
    shape = [1] if op != "Tile" else [2]
    outputs = ["y", "i"] if op == "TopK" else ["y"]
    proto = model([node(op, inputs, outputs)], [("x", F, [4, 8]), ("k", I64, shape)], [("y", F, None)], stored)
    assert failure(tmp_path, proto).where == "input k"


def test_a_missing_profile_never_leaves_a_plan(tmp_path) -> None:
    told = failure(tmp_path, models.conv(), None)
    assert "no optimization profile has been defined" in told.what


def test_nothing_is_printed(tmp_path, capfd) -> None:
    build(tmp_path, models.conv())
    failure(tmp_path, models.conv(), None)
    failure(tmp_path, model([node("Det", ["x"], ["y"])], [("x", F, [2, 2])], [("y", F, None)]))
    assert capfd.readouterr() == ("", "")


def test_one_failure_is_not_told_in_the_next(tmp_path) -> None:
    failure(tmp_path, models.conv(), None)
    assert not build(tmp_path, models.conv()).warnings
    assert (
        "profile"
        not in failure(tmp_path, model([node("Det", ["x"], ["y"])], [("x", F, [2, 2])], [("y", F, None)])).what
    )


def test_what_is_missing_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr("layerline.backends.tensorrt.cuda.unavailable_reason", lambda: "there is no NVIDIA driver")
    assert TensorRT("tensorrt-rtx").build_reason() is None
    assert TensorRT("tensorrt-rtx").unavailable_reason() == "there is no NVIDIA driver"
    monkeypatch.setattr("layerline.backends.tensorrt.builder.find_spec", lambda name: None)
    assert TensorRT("tensorrt").build_reason() == "tensorrt is not installed (pip install tensorrt)"
    with pytest.raises(Unavailable, match="not installed"):
        TensorRT("tensorrt-rtx").build(Path("model.onnx"))
    monkeypatch.setattr("layerline.backends.tensorrt.builder.find_spec", lambda name: object())
    assert TensorRT("tensorrt").build_reason() == "tensorrt needs a device to build, and there is no NVIDIA driver"
    with pytest.raises(Unavailable, match="backend tensorrt-rtx: there is no NVIDIA driver"):
        TensorRT("tensorrt-rtx").open(b"plan")


def test_a_broken_installation_is_unavailable(monkeypatch) -> None:
    monkeypatch.setattr("layerline.backends.tensorrt.builder.MODULES", {"tensorrt-rtx": "layerline_no_such_module"})
    monkeypatch.setattr(TensorRT, "build_reason", lambda self: None)
    with pytest.raises(Unavailable, match="tensorrt-rtx is installed but does not import: No module named"):
        TensorRT("tensorrt-rtx").build(Path("model.onnx"))


def test_an_engine_gives_no_inner_values(monkeypatch) -> None:
    monkeypatch.setattr("layerline.backends.tensorrt.cuda.unavailable_reason", lambda: None)
    with pytest.raises(StageError, match=r"can't give inner values \(c, …\)"):
        TensorRT().open(b"plan", taps=["c"])
