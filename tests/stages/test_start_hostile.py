"""`pipe init` on files of somebody else: no name in them becomes code, a field of pipe.yaml, or a file out of place."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from layerline.pipeline.config import project as projects
from layerline.pipeline.config.bounded_yaml import parse, plain
from layerline.pipeline.errors import ConfigError, StageError
from layerline.pipeline.init import from_files
from layerline.pipeline.init.generated_files import (
    Hooks,
    StageSection,
    check_yaml,
    pipe_yaml,
    python_file,
    yaml_value,
)

CALL = '__import__("os").system("touch PWNED")'
NAMES = [
    f'x"""+str({CALL})+"""',
    f"x'''+str({CALL})+'''",
    f'"; {CALL}; "',
    f"' + {CALL} + '",
    f"{{{CALL}}}",
    "%s{0}{data}",
    "\\N", "\\x", "\\", '\\"', "x\\",
    "x#y", "x: y", "a\ttab", " x ", "-", "?0", "",
    "null", "true", "on", "~", "1", "1e3", "2020-01-01", "<<", "=", "*x", "&x", "!x", "%x", "@x", "`", "[", "{", ",",
    "x" * 5000,
    "größe", "大小", "\U0001f600", "e\u0301",
]  # fmt: skip
CONTROL = ["x\0", "x\r", "x\ny", "x\r\ntask: other.py", "x\x85task: other.py", "x\u2028task: other.py", "x\u2029y",
           "\x1b[2J", "x\u202ey", "x\x7f", "n\nimport-onnx: {tolerance: 1e9}"]  # fmt: skip


def _onnx(path: Path, name: str = "x", dim: str = "n", output: str = "y", graph: str = "g") -> Path:
    """y = x + w, of shape (dim, 4)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    add = helper.make_node("Add", [name, "w"], [output], "add")
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [dim, 4]) for n in (name, output)]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4], np.arange(4, dtype="f"))
    made = helper.make_graph([add], graph, value[:1], value[1:], [weight])
    onnx.save_model(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path),
                    format="protobuf")  # fmt: skip
    return path


def _hooks(folder: Path) -> dict[str, Any]:
    """What task.py defines, run in its folder; fails where running it left the canary."""
    before, names = Path.cwd(), dict[str, Any]()
    os.chdir(folder)
    try:
        exec(compile((folder / "task.py").read_text("utf-8"), "task.py", "exec"), names)
        for hook in ("calib_data", "eval_data"):
            if hook in names:
                names[f"{hook}()"] = names[hook]()
    finally:
        os.chdir(before)
    assert not list(folder.parent.rglob("PWNED"))
    return names


def _fields(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = plain(parse((folder / "pipe.yaml").read_text("utf-8"), "pipe.yaml"))
    assert raw.keys() == {"name", "task", "import-onnx", "quantize"} and raw["task"] == "task.py"
    assert raw["import-onnx"].keys() <= {"file", "external", "data"}
    return raw


@pytest.mark.parametrize("name", [n for n in NAMES if n])
def test_names_of_inputs_are_text(name: str, tmp_path: Path) -> None:
    model, samples = _onnx(tmp_path / "m.onnx", name), tmp_path / "s.npz"
    if "/" not in name and name.isprintable() and len(name) < 1000:
        np.savez(samples, **{name: np.ones((20, 4), "f"), "label": np.zeros(20, "i8")})
        from_files.from_onnx(tmp_path / "p", model, samples)
        hooks = _hooks(tmp_path / "p")
        assert [b[name].shape for b in hooks["calib_data()"]] == [(16, 4), (4, 4)]
        assert hooks["eval_data()"][0].keys() == {name, "label"}
    from_files.from_onnx(tmp_path / "q", model)
    _hooks(tmp_path / "q")
    for folder in (tmp_path / "p", tmp_path / "q"):
        if folder.exists():
            _fields(folder)


@pytest.mark.parametrize("name", CONTROL)
def test_control_characters_in_names_are_escaped(name: str, tmp_path: Path) -> None:
    from_files.from_onnx(
        tmp_path / "p", _onnx(tmp_path / "m.onnx", name, dim=f"{name}!", output=f"{name}?", graph=name)
    )
    assert _fields(tmp_path / "p")["import-onnx"] == {"file": "m.onnx"}
    _hooks(tmp_path / "p")
    written = (tmp_path / "p" / "pipe.yaml").read_text("utf-8") + (tmp_path / "p" / "task.py").read_text("utf-8")
    assert written.replace("\n", "").isprintable()


@pytest.mark.parametrize("dim", [n for n in [*NAMES, *CONTROL] if n])
def test_names_in_comments_stay_comments(dim: str) -> None:
    section = StageSection({"file": "m.onnx"}, comments=[f"{dim} axis 0"])
    name = dim.replace("\0", "")  # no YAML text holds it, nor does the name of a folder
    text = pipe_yaml(name, dim, {"import-onnx": section, "quantize": StageSection({"mode": "int8"})})
    assert plain(parse(text, "p")) == {
        "name": name, "task": "task.py", "import-onnx": {"file": "m.onnx"}, "quantize": {"mode": "int8"},
    }  # fmt: skip
    assert text.replace("\n", "").isprintable() and len(text) < 20_000


@pytest.mark.parametrize("name", [n for n in NAMES if 0 < len(n) < 250 and n.isprintable() and not set(n) & set("\\/")])
def test_names_of_files_are_text(name: str, tmp_path: Path) -> None:
    model, samples = _onnx(tmp_path / name), tmp_path / f"{name}.npz"
    np.savez(tmp_path / "s.npz", x=np.ones((20, 4), "f"))
    (tmp_path / "s.npz").rename(samples)
    from_files.from_onnx(tmp_path / "p", model, samples)
    raw = _fields(tmp_path / "p")["import-onnx"]
    assert (raw["file"], raw["data"]) == (name, f"{name}.npz")
    assert projects.load(tmp_path / "p").stage("import-onnx").files() == (name, f"{name}.npz")
    assert _hooks(tmp_path / "p")["calib_data()"][0]["x"].shape == (16, 4)


REFUSED = ["x\ny", "x\x85y", "x\u2028y", "x\u202ey", "\x1b[31m", "a\\b", os.fsdecode(b"\xff.onnx"), "queue.py",
           "json.PYC", "torch.so", "x.pth", ".layerline", ".hidden"]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_names_of_files_that_are_more_are_refused(name: str, tmp_path: Path) -> None:
    model, samples, bad = _onnx(tmp_path / "m.onnx"), tmp_path / "s.npz", tmp_path / "bad" / name
    np.savez(samples, x=np.ones((20, 4), "f"))
    bad.parent.mkdir()
    for source, arguments in ((model, (bad,)), (samples, (model, bad))):
        bad.write_bytes(source.read_bytes())
        with pytest.raises(ConfigError) as caught:
            from_files.from_onnx(tmp_path / "p", *arguments)
        assert str(caught.value).replace("\n", "").isprintable() and not (tmp_path / "p").exists()


def test_files_of_one_name_are_refused(tmp_path: Path) -> None:
    model = _onnx(tmp_path / "a" / "same")
    np.savez(tmp_path / "s.npz", x=np.ones((20, 4), "f"))
    (tmp_path / "s.npz").rename(tmp_path / "same")
    with pytest.raises(ConfigError, match="two files of the project"):
        from_files.from_onnx(tmp_path / "p", model, tmp_path / "same")
    for name in ("pipe.yaml", "task.py"):
        with pytest.raises(ConfigError):
            from_files.from_onnx(tmp_path / "p", model.replace(tmp_path / "a" / name))
        (tmp_path / "a" / name).rename(model)
    assert not (tmp_path / "p").exists()


def _external(path: Path, *locations: str) -> Path:
    """A model with one weight in each of these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    last, nodes, weights = "x", [], []
    for i, location in enumerate(locations):
        weight = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[400])
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / location).write_bytes(np.full(400, i, "f").tobytes())
        nodes.append(helper.make_node("Add", [last, weight.name], [f"v{i}"], f"add{i}"))
        weights.append(weight)
        last = f"v{i}"
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 400]) for n in ("x", last)]
    made = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


STRANGE = ["queue.py", "json.PYC", "a/numpy.so", "task.py", ".layerline/x", "__init__.py", "__pycache__/x.bin",
           "a/.git/x", "x\ny", "sub/conftest.py"]  # fmt: skip


def test_weights_never_lie_where_python_looks_for_code(tmp_path: Path) -> None:
    for i, name in enumerate(STRANGE):
        model = _external(tmp_path / f"m{i}" / "m.onnx", "honest.data", name)
        with pytest.raises(ConfigError, match="it stores weights in") as caught:
            from_files.from_onnx(tmp_path / "p", model)
        assert str(caught.value).replace("\n", "").isprintable() and not (tmp_path / "p").exists()
    model = _external(tmp_path / "m" / "m.onnx", "honest.data", "deep/er.bin", "_encoder.weight")
    written = from_files.from_onnx(tmp_path / "p", model)
    assert {p.relative_to(tmp_path / "p").as_posix() for p in written} == {
        "pipe.yaml", "task.py", "model/m.onnx", "model/honest.data", "model/deep/er.bin", "model/_encoder.weight",
    }  # fmt: skip
    assert {p for p in (tmp_path / "p").rglob("*") if p.is_file()} == set(written)
    found = onnx.load(str(tmp_path / "p" / "model" / "m.onnx"))
    sums = [float(onnx.numpy_helper.to_array(w).sum()) for w in found.graph.initializer]
    assert sums == [400.0 * i for i in range(3)]
    stage = projects.load(tmp_path / "p").stage("import-onnx")
    assert set(stage.files()) == {p.relative_to(tmp_path / "p").as_posix() for p in written[2:]}


def test_weights_in_the_project_itself_are_refused_where_they_would_be_code(tmp_path: Path) -> None:
    model = _external(tmp_path / "p" / "m.onnx", "queue.py")
    with pytest.raises(ConfigError, match=r"'queue\.py': Python would take a file"):
        from_files.from_onnx(tmp_path / "p", model)
    assert not (tmp_path / "p" / "pipe.yaml").exists()
    _external(tmp_path / "q" / "m.onnx", "w.bin")
    assert [p.name for p in from_files.from_onnx(tmp_path / "q", tmp_path / "q" / "m.onnx")] == ["pipe.yaml", "task.py"]


# Links, and what is left behind


@pytest.mark.parametrize("name", ["task.py", "pipe.yaml", "m.onnx"])
@pytest.mark.parametrize("leads", ["nowhere", "to a file"])
def test_init_writes_through_no_link(name: str, leads: str, tmp_path: Path) -> None:
    victim, folder, model = tmp_path / "victim", tmp_path / "p", _onnx(tmp_path / "m.onnx")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    if leads == "to a file":
        victim.write_text("mine")
    with pytest.raises(ConfigError, match="it is there already"):
        from_files.from_onnx(folder, model)
    if name != "m.onnx":
        with pytest.raises(ConfigError, match="it is there already"):
            from_files.from_template(folder, "blank")
    assert [p.name for p in folder.iterdir()] == [name]
    assert victim.read_text() == "mine" if leads == "to a file" else not victim.exists()


def test_init_writes_into_no_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    for link, leads in (("to", "victim"), ("dangling", "none"), ("loop", "loop")):
        (tmp_path / link).symlink_to(tmp_path / leads)
        with pytest.raises(ConfigError, match="it is a link to"):
            from_files.from_template(tmp_path / link, "blank")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="it is a link to"):
        from_files.from_onnx(tmp_path / "p", _external(tmp_path / "a" / "m.onnx", "w.bin"))
    assert not list((tmp_path / "victim").iterdir())
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_behind(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("shutil.copyfileobj", fails)
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/deep"):
        with pytest.raises(type(error)):
            from_files.from_onnx(tmp_path / folder, _onnx(tmp_path / "m.onnx"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["m.onnx", "there"]


def test_a_file_that_comes_to_lie_there_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the link came to lie there after the look.
    monkeypatch.setattr("os.path.lexists", lambda _: False)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "task.py").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="it is there already"):
        from_files.from_template(tmp_path / "p", "blank")
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["task.py"] and not (tmp_path / "victim").exists()


@pytest.mark.parametrize("name", ["x\ntask: other.py", "x\x85y", "a'\"b", "{x}", "on", " x"])
def test_a_project_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    from_files.from_template(tmp_path / name, "blank")
    project = projects.load(tmp_path / name)
    assert project.name.isprintable() and project.task == "task.py"
    assert project.name == name or not name.isprintable()


def test_a_project_in_a_folder_whose_path_is_no_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff") / "p"
    for act in (lambda: from_files.from_template(folder, "blank"), lambda: projects.load(folder)):
        with pytest.raises(ConfigError, match="the path of this folder is no UTF-8") as caught:
            act()
        assert caught.value.where.endswith("/\\udcff/p") and not folder.parent.exists()


# Checkpoints


@pytest.mark.parametrize("name", [*(n for n in NAMES if n and n.isprintable() and "/" not in n), "x/y"])
def test_names_of_a_checkpoint_s_inputs_are_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("def build(): ...\n")
    weights = tmp_path / f"{name.replace('/', '')[:50]}.pt"
    if "\\" in name:
        weights = tmp_path / "w.pt"
    weights.write_bytes(b"\x80\x02")
    np.savez(tmp_path / "s.npz", **{name: np.ones((20, 4), "f"), "label": np.zeros(20, "i8")})
    from_files.from_checkpoint(tmp_path / "p", weights, "nets:build", tmp_path / "s.npz")
    raw = plain(parse((tmp_path / "p" / "pipe.yaml").read_text("utf-8"), "pipe.yaml"))
    assert raw == {
        "name": "p", "task": "task.py", "import-weights": {"file": weights.name},
        "export": {"dynamic": {name: {0: "batch"}}}, "quantize": {"mode": "int8"},
    }  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert _hooks(tmp_path / "p")["calib_data()"][1][name].shape == (4, 4)
    finally:
        sys.modules.pop("nets", None)  # other tests have modules of this name


NO_INDEX = ["[" * 100_000, "9" * 5000, "{}", "null", '{"weight_map": {}}', '{"weight_map": [1]}',
            '{"weight_map": {"a": [1]}}', '{"weight_map": {"a": ' + "9" * 5000 + "}}"]  # fmt: skip


@pytest.mark.parametrize("text", NO_INDEX)
def test_text_that_is_no_index_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text(text)
    with pytest.raises(StageError, match=r"w\.pt: it is text, expected a checkpoint; it begins"):
        from_files.from_checkpoint(tmp_path / "p", tmp_path / "w.pt", "nets:build")


@pytest.mark.parametrize("spec", ["a:class", "class:x", "a.import:x", "nets:build;x", "nets:\u2028x", "", ":", "..:x"])
def test_a_factory_is_a_name(spec: str, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"\x80\x02")
    with pytest.raises(ConfigError, match=r"expected package\.module:factory"):
        from_files.from_checkpoint(tmp_path / "p", tmp_path / "w.pt", spec)


# The checks themselves


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(), max_size=30))
def test_any_text_survives_as_a_literal(text: str) -> None:
    written = python_file("About.", "", {"NAME": text, "NAMES": [text]}, "f(NAME)\n")
    assert [ast.literal_eval(s.value) for s in ast.parse(written).body if isinstance(s, ast.Assign)] == [text, [text]]
    if "\0" not in text and not any("\ud800" <= c <= "\udfff" or c in "\ufffe\uffff" for c in text):
        check_yaml(f"a: {yaml_value(text)}\nb: {yaml_value([{text: text}])}\n", {"a": text, "b": [{text: text}]}, "p")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=20), min_size=3, max_size=3, unique=True))
def test_hooks_of_any_names_are_the_same_code(names: list[str]) -> None:
    x, h, rate = names
    arrays = {x: np.zeros((1, 1)), h: np.zeros((1, 1, 1)), rate: np.zeros(1, int), "label": np.zeros(1, int)}
    text = Hooks(source=x, data=h, arrays=arrays, inputs=[x, h, rate], whole=[h], numbers=[rate]).text()
    constants = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)}
    assert {h, rate} <= constants
    calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
    assert calls == {"np.load", "dict", "len", "max", "range", "rows", "batches", "samples", "samples().items",
                     "arrays.items", "arrays.values", "float", "isinstance", "outputs.argmax",
                     "(outputs.argmax(axis=1) == labels).mean"}  # fmt: skip


def test_the_checks_see_what_differs() -> None:
    assert python_file("About.", "import a\n", {"A": "x"}, "f(A)\n") == '"""About."""\n\nimport a\n\nA = \'x\'\nf(A)\n'
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ('About."""\nf()\n"""', {}, ""),
        ("About.", {"A = f(), B": "x"}, ""),
        ("About.", {"A": 1, "A ": 2}, ""),
        ("About.", {"A": Path("x")}, ""),
        ("About.", {}, "B = 2\n"),
        ("About.", {}, "f(\n"),
    ]
    for about, constants, code in wrong:
        with pytest.raises(ConfigError, match="can't be written into this file"):
            python_file(about, "", constants, code)
    check_yaml("a: 1\n", {"a": 1}, "p")
    for text in ("a: 1\nb: 2\n", "a: '1'\n", "{}"):
        with pytest.raises(ConfigError, match="can't be written into this file"):
            check_yaml(text, {"a": 1}, "p")
