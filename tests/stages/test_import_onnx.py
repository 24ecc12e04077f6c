"""import-onnx: whatever people bring is read, named, raised and proved, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from layerline.backends import light
from layerline.export import probe_files
from layerline.export.signature import Dim, Signature
from layerline.graph.analysis import shape_inference
from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import modules
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.inputs.batches import LABELS
from layerline.stages.import_onnx import ImportOnnx
from tests.stages.foreign import conv, imported, model, project, same

RNG = np.random.default_rng(7)


def _floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("f")


# Opsets and format versions (T12)


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 20, 21])
def test_old_opsets_are_raised_and_newer_ones_stay(opset: int, tmp_path: Path) -> None:
    given = conv(opset)
    report, out = imported(tmp_path, given)
    assert report.passed and report.metrics["opset_before"] == opset and report.metrics["opset"] == max(opset, 20)
    made = onnx_files.load(out / onnx_files.FILE)
    assert made.ir_version == 10
    onnx.checker.check_model(made, full_check=True)
    for n in (1, 2, 5):
        same(given, out, {"x": _floats(n, 3, 8, 8)})
    assert {"c", "r", "p", "f", "y"} <= {r.name for r in report.records}, "the file's own names"


def test_the_opset_may_be_lower_and_an_ancient_one_is_refused(tmp_path: Path) -> None:
    report, _ = imported(tmp_path / "a", conv(), opset=13)
    assert report.metrics["opset"] == 13
    with pytest.raises(StageError, match="opset 10; 11 is the oldest"):
        imported(tmp_path / "b", conv(10))


@pytest.mark.parametrize("version", [3, 4, 8, 13, 99])
def test_any_format_version_becomes_one_that_runtimes_read(version: int, tmp_path: Path) -> None:
    given = conv(17)
    if version == 3:  # then every initializer had to be an input too
        given.graph.input.extend(helper.make_tensor_value_info(t.name, 1, t.dims) for t in given.graph.initializer)
    given.ir_version = version
    report, out = imported(tmp_path, given)
    assert onnx_files.load(out / onnx_files.FILE).ir_version == 10
    assert any(f"ir_version {version} became 10" in n for n in report.notes) == (version > 10)


def test_an_opset_from_the_future_is_told_with_both_numbers(tmp_path: Path) -> None:
    given = conv(17)
    given.opset_import[0].version = 999
    with pytest.raises(StageError, match=rf"opset 999; .*up to {onnx.defs.onnx_opset_version()}"):
        imported(tmp_path, given)


@pytest.mark.parametrize("opset", [999, 2**63 - 1])
def test_an_opset_that_onnx_does_not_know_is_no_goal(opset: int, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=rf"can't be raised to {opset}: .* up to {onnx.defs.onnx_opset_version()}"):
        imported(tmp_path, conv(17), opset=opset)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_means_what_it_meant(axis: int, tmp_path: Path) -> None:
    """Until opset 12 it flattened what follows its axis."""
    given = model(
        f"""<ir_version: 7, opset_import: ["" : 12]>
        g (float[n,4,5] x) => (float[n,4,5] y) {{ s = Softmax <axis = {axis}> (x)
        y = Exp (s) }}"""
    )
    report, out = imported(tmp_path, given)
    assert report.passed
    same(given, out, {"x": _floats(3, 4, 5)})


# Weights (T22, T41)


def test_weights_as_constant_nodes_stay_and_count(tmp_path: Path) -> None:
    given = conv()
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in given.graph.initializer]
    nodes = [*constants, *given.graph.node]
    del given.graph.initializer[:], given.graph.node[:]
    given.graph.node.extend(nodes)
    report, out = imported(tmp_path, given)
    assert report.passed and {t.name for t in onnx_files.tensors(onnx_files.load(out / onnx_files.FILE))} >= {"w", "b"}


@pytest.mark.parametrize("least", [1, light.LEAST], ids=["beside the graph", "inside of it"])
def test_initializers_that_are_inputs_are_no_inputs(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light, "LEAST", least)
    given = conv()
    given.graph.input.extend(helper.make_tensor_value_info(t.name, 1, t.dims) for t in given.graph.initializer)
    report, out = imported(tmp_path, given)
    assert [i.name for i in onnx_files.load(out / onnx_files.FILE).graph.input] == ["x"]
    assert [v.name for v in Signature.load(out).inputs] == ["x"]
    assert any("2 initializers were also inputs" in n for n in report.notes)


@pytest.mark.parametrize("location", ["model.data", "deep/inside/weights.bin"])
def test_external_data_is_found_where_the_file_says(location: str, tmp_path: Path) -> None:
    (tmp_path / location).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(conv(), str(tmp_path / "model.onnx"), save_as_external_data=True, location=location, size_threshold=0)
    with pytest.raises(ConfigError, match="no part of the key") as error:
        imported_in_place(tmp_path)
    assert location in error.value.hint
    report, out = imported_in_place(tmp_path, external=(location,))
    assert report.passed and sorted(p.name for p in out.iterdir()) == [
        "model.onnx", "probes.safetensors", "signature.json"
    ]  # fmt: skip
    assert ImportOnnx(file="model.onnx", external=(location,)).files() == ("model.onnx", location)


def imported_in_place(root: Path, **config: Any) -> Any:
    for folder in ("out", "scratch"):
        if (root / folder).exists():
            (root / folder).rmdir()
    return imported(root, None, **config)


@pytest.mark.parametrize(
    ("location", "said"),
    [("../w.bin", "outside the model's folder"), ("/w.bin", "outside the model's folder"), ("w.bin", "not beside")],
)
def test_external_data_elsewhere_is_refused_with_the_tensors_name(location: str, said: str, tmp_path: Path) -> None:
    given = conv()
    tensor = given.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(StageError, match=said) as error:
        imported(tmp_path, given)
    assert "'w'" in error.value.what


def test_models_past_one_message_are_raised_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "LEAST", 16)
    monkeypatch.setitem(onnx_files.save.__kwdefaults__, "external_over", 16)
    given = model(
        """<ir_version: 7, opset_import: ["" : 12]> g (float[n,64] x) => (float[n,64] y)
        { h = MatMul (x, w)
          y = Softmax (h) }""",
        w=_floats(64, 64),
    )
    report, out = imported(tmp_path, given)
    assert report.passed and (out / "model.onnx.data").stat().st_size >= 64 * 64 * 4
    same(given, out, {"x": _floats(3, 64)})


# Control flow and functions (T10, T20)

SQUEEZE = """
<ir_version: 7, opset_import: ["" : {opset}]>
g (float[2,c,3] x) => (float y)
{{
  s = Shape (x)
  i = Constant <value = int64 {{1}}> ()
  d = Gather (s, i)
  q = Equal (d, i)
  y = If (q) <then_branch = t () => (ty) {{ ty = Squeeze {squeeze} }},
              else_branch = e () => (ey) {{ ey = Identity (x) }}>
}}
"""


@pytest.mark.parametrize(("opset", "squeeze"), [(11, "<axes = [1]> (x)"), (13, "(x, axes)"), (17, "(x, axes)")])
@pytest.mark.parametrize("shaped", [True, False])
def test_a_squeeze_in_a_branch_keeps_its_axes(opset: int, squeeze: str, shaped: bool, tmp_path: Path) -> None:
    axes = {"axes": np.array([1])} if opset > 11 else {}
    given = model(SQUEEZE.format(opset=opset, squeeze=squeeze), **axes)
    kind = given.graph.output[0].type.tensor_type
    kind.ClearField("shape")
    if shaped:
        kind.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in range(3))
    report, out = imported(tmp_path / "found", given)
    assert report.passed
    if shaped:
        onnx.checker.check_model(onnx_files.load(out / onnx_files.FILE), full_check=True)
    else:
        assert any("the rank of output" in n for n in report.notes)
    for channels in (1, 2):
        same(given, out, {"x": _floats(2, channels, 3)})
    _, out = imported(tmp_path / "declared", given, dims={"c": {"min": 1, "max": 2}})
    assert {f["x"].shape[1] for f in probe_files.load(out)} == {1, 2}, "both branches are probed"


def test_a_weight_that_branches_share_stays_one(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 7, opset_import: ["" : 11]>
        g (float[n,4] x, bool c, int64[k] ids) => (float[n,4] y, float[k,4] z)
        {
          y = If (c) <then_branch = t () => (float[n,4] ty) { a = MatMul (x, w)
                                               ty = Add (a, one) },
                      else_branch = e () => (float[n,4] ey) { m = MatMul (x, w)
                                               ey = Mul (m, two) }>
          z = Gather (w, ids)
        }""",
        w=_floats(4, 4), one=np.float32(1), two=np.float32(2),
    )  # fmt: skip
    report, out = imported(tmp_path, given)
    made = onnx_files.load(out / onnx_files.FILE)
    assert report.passed and [t.name for t in onnx_files.tensors(made)].count("w") == 1
    for c in (True, False):
        same(given, out, {"x": _floats(3, 4), "c": np.array(c), "ids": np.array([0, 3, 1])})
    names = [n.name for g in onnx_files.graphs(made) for n in g.node]
    assert len(set(names)) == len(names) and "" not in names
    ids = next(v for v in Signature.load(out).inputs if v.name == "ids")
    assert (ids.low, ids.high) == (0, 3), "rows of the table that they pick from"


def test_a_loop_with_outer_weights(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 7, opset_import: ["" : 11]>
        g (float[2] x, int64 n) => (float[2] y, float[k,2] s)
        {
          t = Constant <value = bool {1}> ()
          y, s = Loop (n, t, x) <body = b (int64 i, bool ci, float[2] st) => (bool co, float[2] so, float[2] sc)
            { co = Identity (ci)
              so = Add (st, w)
              u = Unsqueeze <axes = [0]> (so)
              sc = Squeeze <axes = [0]> (u) }>
        }""",
        w=np.array([1, 2], "f"),
    )
    report, out = imported(tmp_path, given)
    assert report.passed
    for n in (0, 1, 4):
        same(given, out, {"x": np.zeros(2, "f"), "n": np.array(n)})


@pytest.mark.parametrize("inner", [13, 18])
def test_functions_are_inlined(inner: int, tmp_path: Path) -> None:
    given = model(
        f"""<ir_version: 8, opset_import: ["" : {inner}, "mine" : 1]>
        g (float[n,4] x) => (float[n,4] y) {{ h = mine.twice (x)
          y = mine.twice (h) }}
        <domain: "mine", opset_import: ["" : {inner}]>
        twice (a) => (b) {{ k = Constant <value = float {{2.0}}> ()
          t = Mul (a, k)
          b = Softmax <axis = 1> (t) }}"""
    )
    report, out = imported(tmp_path, given)
    made = onnx_files.load(out / onnx_files.FILE)
    assert report.passed and not made.functions and any("inlined" in n for n in report.notes)
    same(given, out, {"x": _floats(3, 4)})


def test_operators_of_another_domain_stay(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 7, opset_import: ["" : 12, "com.microsoft" : 1]>
        g (float[n,4] x) => (float[n,4] y) { h = com.microsoft.Gelu (x)
          y = Relu (h) }"""
    )
    report, _ = imported(tmp_path, given)
    assert report.passed


# Names


def test_names_become_module_paths(tmp_path: Path) -> None:
    given = conv()
    for node, name in zip(given.graph.node, ["/a/a.0/conv/Conv", "/a/a.0/Relu_1", "pool@0", "", "pool@0"], strict=True):
        node.name = name
    report, out = imported(tmp_path, given)
    found = modules(onnx_files.load(out / onnx_files.FILE))
    assert (found["c"], found["r"], found["p"]) == ("a.0.conv", "a.0", "pool@0")
    assert found["f"] == "Flatten_f" and found["y"].startswith("Softmax_"), "no name, and one that is taken"
    assert {r.name: r.module for r in report.records}["c"] == "a.0.conv"
    assert any("2 nodes had no unique name" in n for n in report.notes)


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (imported(tmp_path / name, conv())[1] for name in "ab")
    for name in ("model.onnx", "signature.json", "probes.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


# Sizes

OPEN = """<ir_version: 8, opset_import: ["" : 17]>
g (float{shape} x) => (float[?,?,?,?] y) {{ y = Conv <pads = [1,1,1,1]> (x, w) }}"""


@pytest.mark.parametrize("nameless", ["?", "-1", "0", ""])
def test_sizes_without_a_name_get_one_each(nameless: str, tmp_path: Path) -> None:
    given = model(OPEN.format(shape="[n,3,h,v]"), w=_floats(2, 3, 3, 3))
    for axis in (0, 2, 3):
        dim = given.graph.input[0].type.tensor_type.shape.dim[axis]
        dim.Clear()
        if nameless in ("-1", "0"):
            dim.dim_value = int(nameless)
        elif nameless:
            dim.dim_param = nameless
    report, out = imported(tmp_path, given)
    signature = Signature.load(out)
    assert signature.inputs[0].shape == ("x_dim0", 3, "x_dim2", "x_dim3")
    assert signature.outputs[0].shape == ("x_dim0", 2, "x_dim2", "x_dim3"), "which sizes follow which was seen"
    assert signature.dims["x_dim0"] == Dim(min=1, max=8) and signature.dims["x_dim2"] == Dim(min=32, max=128)
    assert [row["told by"] for row in report.tables["dimensions"]] == ["trial"] * 3
    assert "x_dim0 1 to 8" in str(report.metrics["axes"])


def test_dims_fix_rename_tie_and_bound(tmp_path: Path) -> None:
    given = model(OPEN.format(shape="[n,3,h,v]"), w=_floats(2, 3, 3, 3))
    dims = {"n": {"name": "batch", "max": 5}, "h": 16, "v": {"min": 8, "max": 24, "multiple": 8}}
    _, out = imported(tmp_path, given, dims=dims)
    signature = Signature.load(out)
    assert signature.inputs[0].shape == ("batch", 3, 16, "v")
    assert signature.dims == {"batch": Dim(min=1, max=5), "v": Dim(min=8, max=24, multiple=8)}
    shapes = {f["x"].shape for f in probe_files.load(out)}
    assert (
        {s[0] for s in shapes} >= {1, 2, 5} and {s[3] for s in shapes} == {8, 16, 24} and {s[2] for s in shapes} == {16}
    )
    onnx.checker.check_model(onnx_files.load(out / onnx_files.FILE), full_check=True)


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ({"height": 4}, "there is no dimension 'height'"),
        ({"n": {"min": 4, "max": 2}}, "max 2 is below min 4"),
        ({"n": {"name": "s", "max": 4}, "h": {"name": "s", "max": 8}}, "other bounds"),
    ],
)
def test_wrong_dims_are_told(dims: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        imported(tmp_path, model(OPEN.format(shape="[n,3,h,v]"), w=_floats(2, 3, 3, 3)), dims=dims)


ADD = """<ir_version: 8, opset_import: ["" : 17]>
g (float[a,2] x, float[2,b] z) => (float[a,2] y) { t = Transpose (z)
  y = Add (x, t) }"""


def test_sizes_that_move_together_are_found_out(tmp_path: Path) -> None:
    given = model(ADD.replace("Add", "Sub"))
    given.graph.node[1].op_type = "Concat"
    given.graph.node[1].attribute.append(helper.make_attribute("axis", 1))
    report, out = imported(tmp_path, given)
    signature = Signature.load(out)
    assert [v.shape for v in signature.inputs] == [("a", 2), (2, "a")] and list(signature.dims) == ["a"]
    assert any("b is always the size of a" in n for n in report.notes)


@pytest.mark.parametrize("inputs", [2, 3])
def test_batches_that_meet_in_a_sum_are_one_though_one_sample_would_broadcast(inputs: int, tmp_path: Path) -> None:
    takes = ", ".join(f"float[n{i},4] x{i}" for i in range(inputs))
    total = "".join(f"s{i} = Add ({'x0' if i == 1 else f's{i - 1}'}, x{i}) " for i in range(1, inputs))
    given = model(f"""<ir_version: 8, opset_import: ["" : 17]> g ({takes}) => (float[n0,4] y) {{
      {total} y = Relu (s{inputs - 1}) }}""")
    report, out = imported(tmp_path, given)
    signature = Signature.load(out)
    assert [v.shape for v in signature.inputs] == [("n0", 4)] * inputs
    assert signature.dims["n0"].max == 8 and signature.dims["n0"].min == 1
    assert sum("is always the size of n0" in n for n in report.notes) == inputs - 1


def test_a_size_that_two_axes_share_is_varied_once(tmp_path: Path) -> None:
    given = model("""<ir_version: 8, opset_import: ["" : 17]> g (float[n,n] x) => (float[n,n] y) { y = Relu (x) }""")
    _, out = imported(tmp_path, given)
    first, *others = [feed["x"].shape for feed in probe_files.load(out)]
    assert list(Signature.load(out).dims) == ["n"]
    varied = [shape for shape in others if shape != first]
    assert varied and len(set(varied)) == len(varied)


def test_a_declared_size_that_the_model_refuses_is_an_error(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,h] x) => (float[n,2,k] y) { y = Reshape (x, s) }""",
        s=np.array([0, 2, -1]),
    )
    _, out = imported(tmp_path / "found", given)
    assert Signature.load(out).dims["h"].multiple == 2, "the step was found out"
    with pytest.raises(ConfigError, match="h is declared to take 7, the model takes multiples of 2"):
        imported(tmp_path / "odd", given, dims={"h": {"min": 7, "max": 9}})
    one = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,h] x) => (float[n,4] y) { y = MatMul (x, w) }""",
        w=_floats(48, 4),
    )
    with pytest.raises(ConfigError, match="h is declared to take 49, but the model"):
        imported(tmp_path / "one", one, dims={"h": {"min": 48, "max": 64}})


def test_a_size_that_nothing_else_fits_is_fixed(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,h] x) => (float[n,4] y) { y = MatMul (x, w) }""",
        w=_floats(48, 4),
    )
    report, out = imported(tmp_path, given)
    assert Signature.load(out).inputs[0].shape == ("n", 48)
    assert any("h is fixed at 48" in n for n in report.notes)


def test_sizes_at_which_something_runs_empty_are_no_sizes(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,1,h] x) => (float[1,1,k] y) { y = MaxPool <kernel_shape = [9]> (x) }"""
    )
    _, out = imported(tmp_path, given, {"x": _floats(4, 1, 12)})
    assert all(f["x"].shape[2] >= 9 for f in probe_files.load(out)) and Signature.load(out).dims["h"].min >= 9


def test_a_model_that_runs_on_nothing_tried_says_what_to_give(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,h] x) => (float[n,4] y) { y = MatMul (x, w) }""",
        w=_floats(977, 4),
    )
    with pytest.raises(StageError, match="no inputs were found that the model runs on") as error:
        imported(tmp_path / "a", given)
    assert "dims" in error.value.hint and "samples" in error.value.hint
    _, out = imported(tmp_path / "b", given, dims={"h": 977})
    assert Signature.load(out).inputs[0].shape == ("n", 977)


# What inputs hold


def test_integers_of_which_nothing_is_known_go_below_zero(tmp_path: Path) -> None:
    given = model("""<ir_version: 8, opset_import: ["" : 17]> g (int64[n] x) => (int64[n] y) { y = Abs (x) }""")
    report, out = imported(tmp_path, given)
    fed = np.concatenate([f["x"] for f in probe_files.load(out)])
    assert fed.min() == -8 and fed.max() == 8 and Signature.load(out).inputs[0].low is None
    assert "nothing tells their range" in str(report.tables["inputs"][0]["fed with"])


def test_samples_without_negatives_do_not_hide_a_division_that_truncates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerline.onnx_import import normalize_import

    text = """<ir_version: 8, opset_import: ["" : 17]> g (int64[n] x) => (int64[n] y) { y = Mod <fmod = 0> (x, k) }"""
    given, real = model(text, k=np.array(3)), normalize_import.raise_opset

    def truncating(model: light.Model, to: int) -> light.Light:
        out = real(model, to)
        if isinstance(out, ir.Model):
            out.graph[0].attributes["fmod"] = ir.AttrInt64("fmod", 1)
        else:
            out.model.graph.node[0].attribute[0].i = 1
        return out

    samples = {"x": np.arange(9)}
    report, _ = imported(tmp_path / "right", given, samples)
    assert report.passed
    monkeypatch.setattr(normalize_import, "raise_opset", truncating)
    report, out = imported(tmp_path / "wrong", given, samples)
    assert not report.passed and all(f["x"].min() >= 0 for f in probe_files.load(out))


def test_integers_that_must_not_be_negative_are_not(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (int64[1] n) => (float[k] y) { y = ConstantOfShape (n) }"""
    )
    _, out = imported(tmp_path, given)
    assert all(f["n"].min() >= 0 for f in probe_files.load(out))


@pytest.mark.parametrize(
    "key", ["layerline.source", "layerline.traced", "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"]
)
def test_a_file_that_says_it_was_traced_here_is_not_believed(key: str, tmp_path: Path) -> None:
    """It declares h as (7,), and the size of h is what the output holds: it must stay the size that comes in."""
    given = model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[n] x) => (int64[1] y) <float[7] h> { h = Relu (x)  y = Shape (h) }""")
    value = {"pkg.torch.onnx.name_scopes": "['', 'a', 'relu']", "pkg.torch.onnx.stack_trace": 'File "task.py", line 3'}
    for node in given.graph.node:
        node.metadata_props.add(key=key, value=value.get(key, "task.py:3"))
    _, out = imported(tmp_path / "a", given)
    light = onnx_files.parts(out / "model.onnx")
    kept = {entry.key for node in light.model.graph.node for entry in node.metadata_props}
    assert kept <= {"layerline.module"}
    assert shape_inference.declared(ir.from_proto(light.whole())) == {}


@pytest.mark.parametrize("place", ["initializer", "constant", "inner value"])
def test_an_element_type_that_onnx_has_not_is_named(place: str, tmp_path: Path) -> None:
    given = model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] h> {
            c = Constant <value = float[2] {1, 2}> ()  h = Add (x, w)  y = Add (h, c) }""")
    if place == "initializer":
        given.graph.initializer[0].data_type = 99
    elif place == "constant":
        given.graph.node[0].attribute[0].t.data_type = 99
    else:
        (value,) = (value for value in given.graph.value_info if value.name == "h")
        value.type.tensor_type.elem_type = 99
    with pytest.raises(StageError, match="99"):
        imported(tmp_path, given)


def test_no_input_is_drawn_larger_than_the_bound(tmp_path: Path) -> None:
    names = ", ".join(f"d{i}" for i in range(40))
    given = model(f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[{names}] x) => (float[{names}] y) {{ y = Relu (x) }}""")
    with pytest.raises(StageError, match=r"no inputs were found .* x has .*e\+\d\d elements"):
        imported(tmp_path, given)


def test_a_declared_range_is_kept_to(tmp_path: Path) -> None:
    given = model("""<ir_version: 8, opset_import: ["" : 17]> g (int32[n] x) => (int32[n] y) { y = Neg (x) }""")
    _, out = imported(tmp_path / "a", given, ranges={"x": {"low": 3, "high": 5}})
    fed = np.concatenate([f["x"] for f in probe_files.load(out)])
    assert set(fed.tolist()) == {3, 4, 5}
    assert (Signature.load(out).inputs[0].low, Signature.load(out).inputs[0].high) == (3, 5)
    with pytest.raises(ConfigError, match="no integer input 'z'"):
        imported(tmp_path / "b", given, ranges={"z": {"low": 0, "high": 1}})


@pytest.mark.parametrize("number", [16000, 3, -2])
def test_numbers_that_lead_into_another_branch_are_fed(number: int, tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, int64 rate) => (float[n,4] y)
        { q = Equal (rate, k)
          y = If (q) <then_branch = t () => (ty) { ty = Exp (x) }, else_branch = e () => (ey) { ey = Neg (x) }> }""",
        k=np.array(number),
    )
    _, out = imported(tmp_path, given)
    fed = [int(f["rate"]) for f in probe_files.load(out)]
    assert number in fed and any(f != number for f in fed)


RATE = """<ir_version: 8, opset_import: ["" : 12]> g (float[n,4] x, int64 rate) => (float[n,4] y)
{ q = Equal (rate, k)
  y = If (q) <then_branch = t () => (ty) { ty = Exp (x) }, else_branch = e () => (ey) { ey = Neg (x) }> }"""


@pytest.mark.parametrize(("rate", "branch"), [(16000, np.exp), (8000, np.negative)])
def test_an_input_may_become_a_constant(rate: int, branch: Any, tmp_path: Path) -> None:
    import onnxruntime as ort

    samples = {"x": _floats(8, 4), "rate": np.arange(8)}
    report, out = imported(tmp_path, model(RATE, k=np.array(16000)), samples, values={"rate": rate})
    assert report.passed and [v.name for v in Signature.load(out).inputs] == ["x"]
    assert all(set(f) == {"x"} for f in probe_files.load(out))
    [y] = ort.InferenceSession(str(out / onnx_files.FILE)).run(None, {"x": samples["x"]})
    np.testing.assert_allclose(y, branch(samples["x"]), rtol=1e-5)


def test_an_input_that_holds_a_shape_becomes_a_constant(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n,6] x, int64[k] to) => (float[n,2,3] y) { y = Reshape (x, to) }"""
    )
    report, out = imported(tmp_path, given, values={"to": [-1, 2, 3]})
    assert report.passed and [v.name for v in Signature.load(out).inputs] == ["x"]
    given.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 3
    with pytest.raises(ConfigError, match=r"2 numbers for an input of shape \(3\)"):
        imported(tmp_path / "two", given, values={"to": [-1, 2]})


@pytest.mark.parametrize(
    ("values", "said"), [({"z": 1}, "no input 'z'"), ({"x": 1}, "its shape varies"), ({"rate": 0.5}, "can't hold 0.5")]
)
def test_wrong_constants_are_told(values: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        imported(tmp_path, model(RATE, k=np.array(16000)), values=values)


@pytest.mark.parametrize("dtype", ["float", "float16", "double", "bool", "uint8", "int32"])
def test_every_type_is_fed(dtype: str, tmp_path: Path) -> None:
    given = model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g ({dtype}[n,3] x) => ({dtype}[n,3] y) {{ y = Identity (x) }}"""
    )
    report, out = imported(tmp_path, given)
    assert report.passed and len(probe_files.load(out)) >= 3


def test_text_and_unknown_ranks_are_refused_by_name(tmp_path: Path) -> None:
    text = model("""<ir_version: 8, opset_import: ["" : 17]> g (string[n] x) => (string[n] y) { y = Identity (x) }""")
    with pytest.raises(StageError, match="the input is text") as error:
        imported(tmp_path / "a", text)
    assert error.value.where == "x"
    unknown = conv(17)
    unknown.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(StageError, match="how many axes"):
        imported(tmp_path / "b", unknown)
    _, out = imported(tmp_path / "c", unknown, {"x": _floats(6, 3, 8, 8)})
    assert Signature.load(out).inputs[0].shape == ("x_dim0", 3, "x_dim2", "x_dim3")


# Samples


def test_samples_are_the_probes(tmp_path: Path) -> None:
    x = _floats(20, 3, 8, 8)
    report, out = imported(tmp_path, conv(), {"x": x, "label": np.arange(20)})
    feeds = probe_files.load(out)
    np.testing.assert_array_equal(feeds[0]["x"], x[:2])
    np.testing.assert_array_equal(feeds[1]["x"], x[2:6])
    assert {len(f["x"]) for f in feeds} == {1, 2, 3, 4, 8} and report.tables["inputs"][0]["fed with"] == "20 samples"


@pytest.mark.parametrize("name", LABELS)
def test_an_input_that_is_called_as_answers_are_is_fed(name: str, tmp_path: Path) -> None:
    two = model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, float[n,4] {name}) => (float[n,4] y)
        {{ y = Add (x, {name}) }}"""
    )
    x, given = _floats(6, 4), _floats(6, 4) + 9
    _, out = imported(tmp_path / "alone", two, {"x": x, name: given})
    np.testing.assert_array_equal(probe_files.load(out)[0][name], given[:2])
    free = next(n for n in LABELS if n != name)
    _, out = imported(tmp_path / "with answers", two, {"x": x, name: given, free: np.arange(6)})
    assert set(probe_files.load(out)[0]) == {"x", name}
    with pytest.raises(ConfigError, match=f"there is no array '{name}'"):
        imported(tmp_path / "without", two, {"x": x, free: np.arange(6)})


def test_samples_of_a_fixed_batch_and_whole_inputs(tmp_path: Path) -> None:
    fixed = conv()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    _, out = imported(tmp_path / "fixed", fixed, {"x": _floats(10, 3, 8, 8)})
    assert {f["x"].shape for f in probe_files.load(out)} == {(3, 3, 8, 8)}
    state = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, float[2,n,4] h, int64 r) => (float[2,n,4] y)
        { c = Cast <to = 1> (r)
          m = Mul (h, c)
          y = Add (x, m) }"""
    )
    h = _floats(5, 2, 1, 4)
    _, out = imported(tmp_path / "whole", state, {"x": _floats(5, 4), "h": h, "r": np.full(5, 16)})
    feeds = probe_files.load(out)
    np.testing.assert_array_equal(feeds[0]["h"], h[0])
    assert feeds[0]["x"].shape == (1, 4) and feeds[0]["r"].shape == ()


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({"y": np.zeros((4, 3, 8, 8), "f")}, "there is no input 'y'"),
        ({"label": np.zeros(4)}, "there is no array 'x'"),
        ({"x": np.zeros((4, 3, 8, 9), "f")}, r"the shape \(4, 3, 8, 9\), the model takes \(n, 3, 8, 8\)"),
        ({"x": np.zeros((4, 8), "f")}, "the model takes"),
        ({"x": np.zeros((4, 3, 8, 8), "c8")}, "holds complex64, the model takes float32"),
        ({"x": np.zeros((0, 3, 8, 8), "f")}, "equally many samples"),
        ({"x": np.zeros((6, 3, 8, 8), "f"), "label": np.zeros(5)}, "saw x 6, label 5"),
        ({"x": np.zeros((6, 3, 8, 8), "f"), "label": np.array(5)}, "one answer for each sample"),
        ({"x": np.zeros((6, 3, 8, 8), "f"), "targets": np.zeros(5)}, "saw x 6, targets 5"),
        ({"x": np.zeros((6, 3, 8, 8), "f"), "labels": np.array(5)}, "labels is a single number"),
        ({"x": np.zeros((6, 3, 8, 8), "f"), "label": np.zeros(6), "target": np.zeros(6)}, "no input 'target'"),
        ({"x": np.zeros((2, 3, 8, 8), "f"), "label": np.array(["a", "b"])}, "holds <U1, expected numbers"),
        ({"x": np.zeros((2, 3, 8, 8), "f"), "label": np.array([1, np.nan])}, r"label\[1\] is nan"),
        ({"x": np.full((4, 3, 8, 8), np.nan, "f")}, r"x\[0, 0, 0, 0\] is nan.*768 of 768"),
        ({"x": np.where(np.arange(384).reshape(2, 3, 8, 8) == 200, np.inf, 1)}, r"x\[1, 0, 1, 0\] is inf.*1 of 384"),
        ({"x": np.full((4, 3, 8, 8), 1e39)}, r"x\[0, 0, 0, 0\] is 1e\+39, expected float32"),
    ],
)
def test_samples_that_do_not_fit_are_told(samples: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        imported(tmp_path, conv(), samples)


@pytest.mark.parametrize(("dtype", "number"), [("int32", 2**40), ("int8", -129), ("float16", 1e5), ("uint8", 256)])
def test_numbers_beyond_the_models_type_are_told(dtype: str, number: float, tmp_path: Path) -> None:
    given = model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g ({dtype}[n,3] x) => ({dtype}[n,3] y) {{ y = Identity (x) }}"""
    )
    kind = {"u": "u8", "i": "i8", "f": "f4"}[dtype[0]]
    x = np.zeros((4, 3), kind)
    x[2, 1] = number
    with pytest.raises(ConfigError, match=rf"x\[2, 1\] is .*expected {dtype}"):
        imported(tmp_path, given, {"x": x})


def test_a_mask_of_zeros_and_minus_infinity_is_no_fault(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x, float[n,3] m) => (float[n,3] y)
        { a = Add (x, m)
          y = Softmax (a) }"""
    )
    mask = np.zeros((4, 3), "f")
    mask[:, 1] = -np.inf
    report, _ = imported(tmp_path, given, {"x": _floats(4, 3), "m": mask})
    assert report.passed and any("values hold NaN or Inf in the file as given, first a" in n for n in report.notes)


@pytest.mark.parametrize("kind", ["bfloat16", "float8e4m3fn", "float8e5m2", "int4", "uint4", "string"])
def test_inner_types_that_onnxruntime_computes_nothing_on(kind: str, tmp_path: Path) -> None:
    code = getattr(onnx.TensorProto, kind.upper())
    given = model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[n,3] x) => (float[n,3] y)
        {{ b = Cast <to = {code}> (x)
           c = Cast <to = 1> (b)
           y = Relu (c) }}"""
    )
    x = np.arange(12, dtype="f").reshape(4, 3) % 7
    report, out = imported(tmp_path, given, {"x": x}, opset=21)
    assert report.passed
    same(given, out, {"x": x})


def test_inner_sequences(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (float[n,3] y)
        { s = SplitToSequence <axis = 1> (x, k)
          y = ConcatFromSequence <axis = 1> (s) }""",
        k=np.array(1),
    )
    report, out = imported(tmp_path, given, {"x": _floats(4, 3)})
    assert report.passed
    same(given, out, {"x": _floats(4, 3)})


@pytest.mark.parametrize(("side", "kind"), [("x", "bfloat16"), ("x", "float8e4m3fn"), ("y", "bfloat16"), ("y", "int4")])
def test_types_that_nobody_can_feed_or_read_are_named(side: str, kind: str, tmp_path: Path) -> None:
    kinds = {"x": "float", "y": "float", side: "float"}
    given = model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g ({kinds["x"]}[n,3] x) => ({kinds["y"]}[n,3] y)
        {{ y = Cast <to = 1> (x) }}"""
    )
    value = given.graph.input[0] if side == "x" else given.graph.output[0]
    value.type.tensor_type.elem_type = code = getattr(onnx.TensorProto, kind.upper())
    given.graph.node[0].attribute[0].i = code if side == "y" else 1
    with pytest.raises(StageError, match=f"is {kind}") as error:
        imported(tmp_path, given, {"x": _floats(4, 3)}, opset=21)
    assert error.value.where == side


def test_samples_may_hold_no_objects(tmp_path: Path) -> None:
    project(tmp_path, conv())
    np.savez(tmp_path / "samples.npz", x=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match="holds Python objects"):
        imported(tmp_path, None, data="samples.npz")
    np.save((tmp_path / "samples.npz").open("wb"), np.zeros(3))
    with pytest.raises(ConfigError, match="a single array"):
        imported_in_place(tmp_path, data="samples.npz")


# The comparison


def test_a_wrong_conversion_fails_and_names_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerline.onnx_import import normalize_import

    real = normalize_import.raise_opset

    def wrong(given: light.Model, to: int) -> light.Light:
        out = real(given, to)
        if isinstance(out, ir.Model):
            out.graph[1].op_type = "Sigmoid"
        else:
            out.model.graph.node[1].op_type = "Sigmoid"
        return out

    monkeypatch.setattr(normalize_import, "raise_opset", wrong)
    report, _ = imported(tmp_path, conv())
    first = report.first_failing()
    assert not report.passed and first is not None and first.name == "r"


def test_random_operators_are_named_and_not_judged(tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y)
        { r = RandomNormalLike (x)
          y = Add (x, r) }"""
    )
    report, _ = imported(tmp_path, given)
    assert report.passed and any("drawn at random (RandomNormalLike)" in n for n in report.notes)
    assert all(r.tolerance is None for r in report.records)


def test_no_inputs_and_no_onnx_are_refused(tmp_path: Path) -> None:
    constant = model(
        """<ir_version: 8, opset_import: ["" : 17]> g () => (float y) { y = Identity (k) }""", k=np.float32(1)
    )
    with pytest.raises(StageError, match="takes no inputs"):
        imported(tmp_path / "a", constant)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.onnx").write_bytes(b"\x08\xff garbage")
    with pytest.raises(StageError, match=r"not (a readable|valid) ONNX|ONNX"):
        imported(tmp_path / "b", None)


def test_what_is_not_valid_is_refused(tmp_path: Path) -> None:
    broken = conv(20)
    broken.graph.node[1].input[0] = "nowhere"
    with pytest.raises(StageError, match="nowhere"):
        imported(tmp_path, broken)


def test_the_report_and_signature_are_plain(tmp_path: Path) -> None:
    report, out = imported(tmp_path, conv())
    text = (out / "signature.json").read_text() + json.dumps(report.to_json())
    assert str(tmp_path) not in text


def test_numbers_survive_any_layout_of_the_weights(tmp_path: Path) -> None:
    """float_data and raw_data are the same tensor."""
    given = conv()
    for tensor in given.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, 1, array.shape, array.reshape(-1).tolist()))
    _, out = imported(tmp_path / "a", given)
    _, other = imported(tmp_path / "b", conv())
    assert (out / onnx_files.FILE).read_bytes() == (other / onnx_files.FILE).read_bytes()


DROPOUT = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x{0}) => (float[n,4] y)
  { h = Relu (x)
    y = Dropout (h, r, t) }"""


def test_a_dropout_in_training_mode_is_refused_and_may_be_switched_off(tmp_path: Path) -> None:
    rate = {"r": np.float32(0.5)}
    with pytest.raises(StageError, match="Dropout is in training mode") as error:
        imported(tmp_path / "stored", model(DROPOUT.replace("{0}", ""), **rate, t=np.array(True)))
    assert "store false in t" in error.value.hint
    given = model(DROPOUT.replace("{0}", ", bool t"), **rate)
    with pytest.raises(StageError, match="Dropout is in training mode") as error:
        imported(tmp_path / "open", given)
    assert "values: {t: 0}" in error.value.hint
    report, _ = imported(tmp_path / "off", given, values={"t": 0})
    assert report.passed and "not_judged" not in report.metrics


@pytest.mark.parametrize(
    ("ending", "told", "compared"),
    [("y = Add (x, r)", "output y: random (RandomNormalLike)", 0), ("z = Relu (r) y = Abs (x)", "2 inner values", 1)],
)
def test_what_nobody_could_compare_is_a_figure_of_the_report(
    ending: str, told: str, compared: int, tmp_path: Path
) -> None:
    head = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y)'
    text = f"{head} {{ r = RandomNormalLike (x) {ending} }}"
    report, _ = imported(tmp_path, model(text))
    assert str(report.metrics["not_judged"]).startswith(told) and report.metrics["values_compared"] == compared
    assert next(iter(report.metrics)) == "not_judged", "a line shows the first few figures"


@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_that_is_written_into_a_node_is_told_with_its_size(count: int, tmp_path: Path) -> None:
    given = model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,8] x) => (float[N,4] y)
        { h = MatMul (x, w)
          y = Reshape (h, s) }""",
        w=np.ones((8, 4), "f"),
        s=np.array([count, 4]),
    )
    samples = {"x": np.ones((12, 8), "f")}
    with pytest.raises(StageError, match=f"runs only at N={count}, not at N=2") as error:
        imported(tmp_path / "a", given, samples)
    assert f"dims: {{N: {count}}}" in error.value.hint
    assert "Reshape node Reshape_y" in error.value.what and "onnxruntime_src" not in error.value.what
    report, _ = imported(tmp_path / "b", given, samples, dims={"N": count})
    assert report.passed


def test_a_least_size_without_a_greatest_is_told(tmp_path: Path) -> None:
    report, out = imported(tmp_path, conv(), dims={"n": {"min": 20}})
    most = Signature.load(out).dims["n"].max
    assert any(f"n is declared without max, and goes to {most}" in n for n in report.notes)


SQUEEZED = """<ir_version: 10, opset_import: ["" : 20]> g (float[n, k, 3] x) => (float[] y) {
  s = Shape <start = 1, end = 2> (x)
  q = Squeeze (s)
  c = Equal (q, one)
  y = If (c) <
    then_branch = t () => (float[] a) { a = Squeeze (x, ax) },
    else_branch = f () => (float[] b) { b = Identity (x) }
  >
}"""


@pytest.mark.parametrize(("size", "op"), [(4, "Identity"), (1, "Squeeze")])
def test_a_branch_that_a_fixed_size_decides_is_taken_before_anything_runs(tmp_path: Path, size: int, op: str) -> None:
    """At size 4 onnxruntime refuses the model for the Squeeze of the branch that is never taken."""
    given = model(SQUEEZED, one=np.array(1, np.int64), ax=np.array([1], np.int64))
    for value in (given.graph.output[0], *(a.g.output[0] for a in given.graph.node[-1].attribute)):
        value.type.tensor_type.ClearField("shape")
    report, out = imported(tmp_path, given, dims={"k": size})
    assert report.passed and any("If y has a constant condition" in note for note in report.notes)
    assert [n.op_type for n in onnx_files.load(out / onnx_files.FILE).graph.node] == [op]
    same(given, out, {"x": _floats(2, size, 3)})


OWN_NAMES = """<ir_version: 10, opset_import: ["" : 20]> g (float[n,4] x) => (float[n,4] y) {{
  h = MatMul (x, w)
  {top} = Abs (h)
  c = Equal (one, one)
  z = If (c) <
    then_branch = t () => (float[n,4] a) {{ {inner} = Neg ({top}) a = Abs ({inner}) }},
    else_branch = f () => (float[n,4] b) {{ b = Abs (h) }}
  >
  y = Relu (z)
}}"""


@pytest.mark.parametrize("name", ["b//h", "b//z", "i//h", "0/sums", "1/peak", "elements of h", "cast//h"])
def test_names_that_the_comparison_gives_out_may_be_the_models_own(tmp_path: Path, name: str) -> None:
    for place in ("top", "inner"):
        names = {"top": "top", "inner": "inner", place: f'"{name}"'}
        given = model(OWN_NAMES.format(**names), w=np.eye(4, dtype="f"), one=np.array(1))
        report, out = imported(tmp_path / place, given)
        assert report.passed and ({r.name for r in report.records} >= {"h", "z", "y"})
        assert (name in {r.name for r in report.records}) is (place == "top")
        same(given, out, {"x": _floats(2, 4)})


@pytest.mark.parametrize("side", ["input", "output"])
def test_element_types_that_onnx_has_not_are_named(tmp_path: Path, side: str) -> None:
    given = conv(20)
    value = given.graph.input[0] if side == "input" else given.graph.output[0]
    value.type.tensor_type.elem_type = 116
    with pytest.raises(StageError, match=f"the {side} is of element type 116") as error:
        imported(tmp_path, given)
    assert error.value.where == value.name
