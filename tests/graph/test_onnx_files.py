"""ONNX files in canonical form, read in two parts: the graph, and its weights beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from layerline.backends import light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError
from tests.forms import proto
from tests.graph.fusing import normal, parse

X = "(float[n, 64] x) => (float[n, 8] y)"


def _model(**tensors: Any) -> onnx.ModelProto:
    given = parse(X, "y = MatMul(x, w)", w=normal(64, 8), **tensors)
    given.metadata_props.add(key="why", value="ü")
    given.producer_name = "someone"
    return given


def _bytes(model: onnx.ModelProto) -> dict[str, object]:
    return {t.name: (t.data_type, tuple(t.dims), t.raw_data) for t in proto(model).graph.initializer}


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int8", "bool", "bfloat16", "float8_e4m3fn", "int4"]
)
def test_what_is_read_is_what_is_written(dtype: str, tmp_path: Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    other = normal(300, 9).astype(kind)
    model = _model(small=normal(3), scalar=normal(), empty=normal(0, 4), other=other)
    onnx.save(model, str(tmp_path / "a.onnx"))
    apart = onnx_files.read(tmp_path / "a.onnx")
    assert set(apart.weights) == ({"w"} if dtype == "int4" else {"w", "other"})
    assert proto(apart).SerializeToString() == proto(light.split(model)).SerializeToString()
    assert _bytes(proto(apart)) == _bytes(model)
    onnx_files.save(apart, tmp_path).rename(tmp_path / "b.onnx")
    assert _bytes(onnx_files.load(tmp_path / "b.onnx")) == _bytes(model)
    onnx.checker.check_model(str(tmp_path / "b.onnx"), full_check=True)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    onnx.save(_model(), str(tmp_path / "a.onnx"))
    apart = onnx_files.read(tmp_path / "a.onnx")
    (tmp_path / "a.onnx").write_bytes(b"")
    assert np.array_equal(apart.weights["w"].numpy(), normal(64, 8))


def test_a_graph_in_two_pieces_is_put_together(tmp_path: Path) -> None:
    """A field that is one message may come twice, and means both."""
    first, second = _model(), onnx.ModelProto()
    second.graph.initializer.append(numpy_helper.from_array(normal(40, 40), "late"))
    (tmp_path / "a.onnx").write_bytes(first.SerializeToString() + second.SerializeToString())
    apart = onnx_files.read(tmp_path / "a.onnx")
    assert list(apart.weights) == ["w", "late"] and len(proto(apart.model).graph.node) == 1


@pytest.mark.parametrize("field", ["float_data", "external"])
def test_tensors_that_are_stored_otherwise_stay(field: str, tmp_path: Path) -> None:
    model = _model()
    tensor = model.graph.initializer.add(name="t", data_type=TensorProto.FLOAT, dims=(1000,))
    if field == "float_data":
        tensor.float_data.extend(range(1000))
    else:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="x")
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    apart = onnx_files.read(tmp_path / "a.onnx")
    assert list(apart.weights) == ["w"] and proto(apart.model).graph.initializer[0] == tensor


@pytest.mark.parametrize("keep", [0, 1, 7, 100, 2000])
def test_a_file_that_is_cut_short_is_told(keep: int, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(_model().SerializeToString()[:keep])
    with pytest.raises(StageError, match="not a readable ONNX file") as error:
        onnx_files.parts(tmp_path / "model.onnx")
    assert error.value.where == "model.onnx"


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_whatever_is_in_a_file_it_is_read_or_told(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "model.onnx"
    path.write_bytes(data)
    try:
        apart = onnx_files.parts(path)
    except StageError:
        return
    expected = onnx.ModelProto.FromString(data)
    expected.DiscardUnknownFields()
    assert proto(apart) == expected


def test_weights_beside_a_file_are_read_in_place(tmp_path: Path) -> None:
    model = _model(small=normal(3), four=np.ones(5000).astype(ml_dtypes.int4))
    before = _bytes(model)
    onnx.save(model, str(tmp_path / "given.onnx"), save_as_external_data=True, location="d.bin", size_threshold=0)
    apart = onnx_files.parts(tmp_path / "given.onnx")
    assert list(apart.weights) == ["w"] and {t.name for t in proto(apart.model).graph.initializer} == {"small", "four"}
    assert _bytes(proto(apart)) == _bytes(onnx_files.load(tmp_path / "given.onnx")) == before


def test_large_models_are_saved_in_two_files(tmp_path: Path) -> None:
    model = _model(small=normal(3), v=normal(70, 4))
    onnx_files.save(model, tmp_path, external_over=16)
    assert (tmp_path / "model.onnx.data").stat().st_size == 64 * 8 * 4 + 70 * 4 * 4
    assert (tmp_path / "model.onnx").stat().st_size < 600
    assert _bytes(onnx_files.load(tmp_path / "model.onnx")) == _bytes(model)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))


def test_one_content_has_one_form(tmp_path: Path) -> None:
    """Whoever made it, in whatever order, and in whatever way its numbers are stored."""
    model, other = _model(v=normal(70, 4), small=normal(3)), _model(small=normal(3))
    other.graph.initializer.insert(0, helper.make_tensor("v", TensorProto.FLOAT, (70, 4), normal(70, 4).ravel()))
    forms = []
    for name, item in (("a", model), ("b", other), ("c", light.split(model)), ("d", light.split(other))):
        (tmp_path / name).mkdir()
        forms.append(onnx_files.save(item, tmp_path / name).read_bytes())
    assert len(set(forms)) == 1
    assert onnx_files.save(onnx_files.parts(tmp_path / "a" / onnx_files.FILE), tmp_path).read_bytes() == forms[0]


def _outside(folder: Path, **place: str) -> Path:
    """A model whose weight lies in d.bin, 64 bytes in, said to be at `place`."""
    model = _model()
    data = model.graph.initializer[0].raw_data
    (folder / "d.bin").write_bytes(b"x" * 64 + data + b"more")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "d.bin", "offset": "64", "length": str(len(data))} | place).items():
        if value:
            tensor.external_data.add(key=key, value=value)
    (folder / "given.onnx").write_bytes(model.SerializeToString())
    return folder / "given.onnx"


@pytest.mark.parametrize("place", [{}, {"length": ""}])
def test_a_place_that_is_right(place: dict[str, str], tmp_path: Path) -> None:
    path = _outside(tmp_path, **place)
    assert _bytes(onnx_files.load(path)) == _bytes(_model())


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"offset": "9" * 5000}, "which are no numbers"),
        ({"length": "²"}, "which are no numbers"),
        ({"length": "2044"}, "takes 2048 bytes by its type and shape, and has 2044"),
        ({"length": "4096"}, "takes 2048 bytes by its type and shape, and has 4096"),
        ({"offset": "-4"}, "lies at '-4'"),
        ({"offset": "one"}, "lies at 'one'"),
        ({"length": "x"}, "'x' bytes"),
        ({"location": "other.bin"}, "not beside the model"),
        ({"location": "link.bin"}, "a link out of the model's folder"),
    ],
)
def test_a_place_that_is_none_is_told_with_the_tensor(place: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = _outside(tmp_path / "in", **place)
    (tmp_path / "away.bin").write_bytes(b"x" * 5000)
    (tmp_path / "in" / "link.bin").symlink_to(tmp_path / "away.bin")
    with pytest.raises(StageError, match=said) as error:
        onnx_files.parts(path)
    assert "'w'" in error.value.what and error.value.where == "given.onnx"


@pytest.mark.parametrize(
    ("place", "size"), [({}, 40), ({}, 400), ({"length": "40"}, 48), ({"offset": "16"}, 48), ({}, 0)]
)
def test_a_small_tensor_beside_the_model_has_the_bytes_of_its_sizes(
    place: dict[str, str], size: int, tmp_path: Path
) -> None:
    """It is read at once, unlike a large one."""
    model = _model()
    model.graph.initializer.add(name="t", data_type=TensorProto.FLOAT, dims=(12,), data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "t.bin", **place}.items():
        model.graph.initializer[-1].external_data.add(key=key, value=value)
    (tmp_path / "t.bin").write_bytes(bytes(size))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    stored = size - int(place.get("offset", 0))
    stored = min(stored, int(place.get("length", stored)))
    with pytest.raises(StageError, match=f"'t' stores {stored} bytes, and its type and sizes take 48"):
        onnx_files.parts(tmp_path / "model.onnx")


def test_a_file_that_ends_too_early_or_is_gone_is_told(tmp_path: Path) -> None:
    apart = onnx_files.parts(_outside(tmp_path, offset="100"))
    with pytest.raises(StageError, match="ends within 2048 bytes from byte 100"):
        apart.weights["w"].numpy()
    (tmp_path / "d.bin").unlink()
    with pytest.raises(StageError, match="can't be read"):
        apart.weights["w"].numpy()


def test_what_lies_outside_is_not_what_lies_inside(tmp_path: Path) -> None:
    """A tensor that has both: its place counts, as for every runtime."""
    path = _outside(tmp_path)
    model = onnx.ModelProto.FromString(path.read_bytes())
    model.graph.initializer[0].raw_data = bytes(2048)
    path.write_bytes(model.SerializeToString())
    assert np.array_equal(numpy_helper.to_array(proto(onnx_files.parts(path)).graph.initializer[0]), normal(64, 8))


@pytest.mark.parametrize(("kind", "what"), [(77, "is of element type 77"), (0, "has no element type")])
def test_a_tensor_of_an_unknown_type_is_refused_by_name(kind: int, what: str, tmp_path: Path) -> None:
    model = _model()
    model.graph.initializer.add(name="t", data_type=kind, dims=(1000,), raw_data=bytes(4000))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError, match=f"'t' {what}"):
        onnx_files.parts(tmp_path / "model.onnx")


@pytest.mark.parametrize("size", [3001, 4001, 8000])
def test_bytes_that_do_not_fit_the_sizes_are_refused_by_name(size: int, tmp_path: Path) -> None:
    model = _model()
    model.graph.initializer.add(name="t", data_type=TensorProto.FLOAT, dims=(1000,), raw_data=bytes(size))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError, match=f"'t' stores {size} bytes, and its type and sizes take 4000"):
        onnx_files.parts(tmp_path / "model.onnx")


def test_all_large_tensors_of_a_large_model_go_to_the_second_file(tmp_path: Path) -> None:
    body = "c = Equal (one, one) y = If (c) <then_branch = g () => (float[n, 8] t) { t = MatMul (x, inner) }, "
    model = parse(X, body + "else_branch = h () => (float[n, 8] e) { e = MatMul (x, w) }>", w=normal(64, 8),
                  one=np.array(1), four=np.ones(5000).astype(ml_dtypes.int4))  # fmt: skip
    branch = model.graph.node[1].attribute[0].g
    branch.initializer.append(numpy_helper.from_array(normal(64, 8, seed=2), "inner"))
    onnx_files.save(model, tmp_path, external_over=16)
    assert (tmp_path / "model.onnx").stat().st_size < 1200
    assert (tmp_path / "model.onnx.data").stat().st_size == 2 * 2048 + 2500
    again = onnx_files.load(tmp_path / "model.onnx")
    assert _bytes(again) == _bytes(model)
    inner = next(a for a in proto(again).graph.node[1].attribute if a.g.initializer).g.initializer[0]
    assert np.array_equal(numpy_helper.to_array(inner), normal(64, 8, seed=2))


def test_a_model_without_weights_gets_no_second_file(tmp_path: Path) -> None:
    onnx_files.save(parse("(float[n] x) => (float[n] y)", "y = Relu (x)"), tmp_path, external_over=16)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((-8, -64), "has a size of -64"),
        ((2**40, 2**40), "more than fit into any memory"),
        ((2**62,) * 40, "more than fit into any memory"),
        ((1,) * 100, "has 100 axes; 64 is the most"),
    ],
)
@pytest.mark.parametrize("outside", [False, True])
def test_sizes_that_no_tensor_has_are_refused(dims: tuple[int, ...], said: str, outside: bool, tmp_path: Path) -> None:
    model = onnx.ModelProto.FromString(_outside(tmp_path).read_bytes()) if outside else _model()
    model.graph.initializer[0].dims[:] = dims
    (tmp_path / "given.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError, match=said) as error:
        onnx_files.parts(tmp_path / "given.onnx")
    assert "'w'" in error.value.what and error.value.where == "given.onnx"


@pytest.mark.parametrize("raw", [True, False])
def test_numbers_that_do_not_fill_a_tensor_are_refused(raw: bool, tmp_path: Path) -> None:
    model = _model()
    tensor = model.graph.initializer[0]
    if not raw:
        numbers = numpy_helper.to_array(tensor).ravel()
        tensor.ClearField("raw_data")
        tensor.float_data[:] = numbers
    tensor.dims[0] += 1
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError, match=r"'w' stores .* sizes take"):
        onnx_files.parts(tmp_path / "a.onnx")


def test_a_segment_of_a_tensor_is_refused(tmp_path: Path) -> None:
    model = _model()
    model.graph.initializer[0].segment.begin = 0
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError, match="'w' is a segment of a tensor"):
        onnx_files.read(tmp_path / "a.onnx")


@pytest.mark.parametrize("size", [4, 100_000])
def test_two_stored_tensors_of_one_name_are_refused(size: int, tmp_path: Path) -> None:
    model = _model(second=normal(size))
    model.graph.initializer[1].name = "w"
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageError, match="it stores 2 tensors of the name 'w'"):
        onnx_files.read(tmp_path / "a.onnx")


def test_bytes_without_an_end_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"\xff" * 10_000_000)
    with pytest.raises(StageError, match="not a readable ONNX file"):
        onnx_files.read(tmp_path / "a.onnx")


def _with_constants() -> onnx.ModelProto:
    """Products with weights in Constant nodes: of 2 MB and of 1 kB in the main graph, of 2 kB in both branches."""
    text = "c = Equal (one, one) a = MatMul (x, w) b = MatMul (x, small) ab = Concat <axis = 1> (a, b) y = If (c) "
    text += "<then_branch = g () => (float[n, 8] t) { t = MatMul (ab, v) }, else_branch = h () => (float[n, 8] e) "
    model = parse("(float[n, 64] x) => (float[n, 8] y)", text + "{ e = MatMul (ab, u) }>", one=np.array(1))
    nodes = list(model.graph.node)
    shapes = {"w": (64, 8192), "small": (64, 4)}
    stored = [helper.make_node("Constant", [], [n], value=numpy_helper.from_array(normal(*s), n))
              for n, s in shapes.items()]  # fmt: skip
    for attribute in nodes[-1].attribute:
        name = attribute.g.node[0].input[1]
        inner = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(normal(8196, 8), name))
        attribute.g.node.insert(0, inner)
    del model.graph.node[:]
    model.graph.node.extend([*stored, *nodes])
    return model


def _outputs(path: Path) -> np.ndarray[Any, Any]:
    return OnnxRuntime().open(path).run({"x": normal(2, 64, seed=1)})["y"]


def test_weights_in_constant_nodes_go_to_the_second_file(tmp_path: Path) -> None:
    model = _with_constants()
    for name, over in (("one", 1 << 30), ("two", 16)):
        (tmp_path / name).mkdir()
        onnx_files.save(model, tmp_path / name, external_over=over)
    assert (tmp_path / "two" / "model.onnx").stat().st_size < 3000
    assert (tmp_path / "two" / "model.onnx.data").stat().st_size == 4 * (64 * 8192 + 2 * 8196 * 8)
    onnx.checker.check_model(str(tmp_path / "two" / "model.onnx"), full_check=True)
    assert np.array_equal(_outputs(tmp_path / "one" / "model.onnx"), _outputs(tmp_path / "two" / "model.onnx"))


@pytest.mark.parametrize("over", [16, 1 << 30])
def test_large_constants_are_read_as_weights(over: int, tmp_path: Path) -> None:
    path = onnx_files.save(_with_constants(), tmp_path, external_over=over)
    light = onnx_files.parts(path)
    assert list(light.weights) == ["w"] and light.weights["w"].shape == (64, 8192)
    assert [n.output[0] for n in proto(light.model).graph.node if n.op_type == "Constant"] == ["small"]
    expected = _outputs(path)
    assert np.array_equal(OnnxRuntime().open(light).run({"x": normal(2, 64, seed=1)})["y"], expected)


def test_what_changes_no_number_changes_no_byte(tmp_path: Path) -> None:
    """Names of graphs, an operator set that no node is of, source lines, an import written twice."""
    first, second = _with_constants(), _with_constants()
    second.graph.name = "another"
    second.opset_import.extend([helper.make_opsetid("unused", 7), helper.make_opsetid("", 20)])
    for attribute in second.graph.node[-1].attribute:
        attribute.g.name = "another"
    for model, line in ((first, 12), (second, 13)):
        model.graph.node[2].metadata_props.add(key="layerline.source", value=f"task.py:{line}")
    forms = []
    for name, model in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        forms.append(onnx_files.save(model, tmp_path / name).read_bytes())
    assert forms[0] == forms[1] and b"task.py" not in forms[0]


def test_a_graph_without_a_name_gets_one(tmp_path: Path) -> None:
    model = _model()
    model.graph.name = ""
    onnx.checker.check_model(str(onnx_files.save(model, tmp_path)))


@pytest.mark.parametrize("text", [b"someone", b"MatMul", b"why"])
def test_text_that_is_not_utf8_is_told(text: bytes, tmp_path: Path) -> None:
    raw = _model().SerializeToString()
    assert text in raw
    (tmp_path / "a.onnx").write_bytes(raw.replace(text, b"\x9e" + text[1:]))
    with pytest.raises(StageError, match="not UTF-8"):
        onnx_files.read(tmp_path / "a.onnx")
