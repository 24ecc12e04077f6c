"""The import rules: which package may know which, and what no cached run may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "pycuda",
    "tensorrt",
    "tensorrt_rtx",
    "torchao",
}
LEAVES = {"backends", "calib", "graph", "compare", "export", "parity", "onnx_import", "training", "qat"}
# One way, and so without cycles: a package knows what stands before it.
KNOWS = {
    "pipeline": set[str](),
    "views": {"pipeline"},
    "calib": {"pipeline"},
    "backends": {"pipeline"},
    "graph": {"pipeline", "calib", "backends"},
    "compare": {"pipeline", "backends", "graph"},
    "export": {"pipeline", "backends", "graph", "compare"},
    "parity": {"pipeline", "calib", "backends", "graph", "compare", "export"},
    "onnx_import": {"pipeline", "backends", "graph", "compare", "export"},
    "training": {"pipeline"},
    "qat": {"pipeline", "calib", "backends", "graph", "compare", "export", "parity", "training"},
    "stages": {"pipeline", *LEAVES},
    "cli": {"pipeline", "views"},
}
# The rooms of a package, from the lowest one: each imports only what stands before it. Files beside the rooms come
# first, so that they import no room.
ROOMS = {
    "pipeline": ("errors", "nearest", "reasons", "untrusted", "wording", "outline", "folders", "files", "hashing",
                 "process_env",
                 "report", "task", "inspection", "stage", "stage_table",
                 "inputs", "keys", "config", "init", "records", "run", "commands", "diagnosis"),
    "training": ("randomness", "config", "model", "optimizers", "data", "loop", "diagnostics", "distributed", "state",
                 "setup", "run"),
}  # fmt: skip
FILES = [ROOT / "cli.py", *(f for name in KNOWS for f in sorted((ROOT / name).rglob("*.py")))]


def imports(tree: ast.AST, *, at_import: bool = False) -> Iterator[str]:
    """Every imported module; `at_import` leaves out functions and what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "layerline")
        elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (name for other in node.orelse for name in imports(other, at_import=True))
        else:
            yield from imports(node, at_import=at_import)


def package(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_the_rules(file: Path) -> None:
    tree, own = ast.parse(file.read_text("utf-8")), package(file)
    ours = {name.split(".")[1] for name in imports(tree) if name.startswith("layerline.")} & KNOWS.keys()
    # What only TensorRT needs reads graphs as well; graphs know backends, but not this one.
    more = {"graph"} if file.is_relative_to(ROOT / "backends" / "tensorrt") else set[str]()
    assert ours <= {own} | KNOWS[own] | more
    at_once = {name.split(".")[0] for name in imports(tree, at_import=True)}
    if own in ("pipeline", "views", "calib", "stages", "cli"):
        assert not at_once & HEAVY
    assert not at_once & {"openvino", "pycuda", "tensorrt", "tensorrt_rtx", "torchao"}
    if own == "stages":
        named = {name.split(".")[1] for name in imports(tree, at_import=True) if name.startswith("layerline.")}
        assert named <= {"pipeline"}, "a cached run imports every stage's file"


def test_stages_do_not_know_each_other() -> None:
    for file in (ROOT / "stages").glob("*.py"):
        others = [name for name in imports(ast.parse(file.read_text("utf-8"))) if name.startswith("layerline.stages")]
        assert not others, file.name


def _modules() -> dict[str, Path]:
    names = {}
    for file in FILES:
        parts = ["layerline", *file.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        names[".".join(parts)] = file
    return names


def _imported_modules(file: Path, modules: Mapping[str, Path]) -> set[str]:
    """Our modules that a file imports anywhere: at the top, in functions, and for type checkers alone."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                imported.add(submodule if submodule in modules else node.module)
    return imported & modules.keys()


def first_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A path of imports that leads back to its beginning; empty where there is none."""
    finished: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in finished:
            for imported in sorted(graph[name]):
                circle = search(imported, [*path, name])
                if circle:
                    return circle
            finished.add(name)
        return []

    for name in graph:
        circle = search(name, [])
        if circle:
            return circle
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = _modules()
    graph = {name: _imported_modules(file, modules) for name, file in modules.items()}
    assert len(graph) > 200
    assert first_circle(graph) == []


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_of_a_package_import_downwards(name: str) -> None:
    modules, order = _modules(), ROOMS[name]
    for file in sorted((ROOT / name).rglob("*.py")):
        room = file.relative_to(ROOT / name).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in order, f"{file}: name its room in ROOMS"
        for module in _imported_modules(file, modules):
            parts = module.split(".")
            if parts[1] == name and module != f"layerline.{name}":
                assert order.index(parts[2]) <= order.index(room), f"{room} imports {module}"


@pytest.mark.parametrize("name", ROOMS)
def test_files_beside_the_rooms_stand_below_them(name: str) -> None:
    is_room = [(ROOT / name / room).is_dir() for room in ROOMS[name]]
    assert is_room == sorted(is_room)


def test_a_circle_of_imports_is_noticed() -> None:
    assert first_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert first_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_public_class_name_has_one_meaning() -> None:
    classes: dict[str, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    for file in FILES:
        place = str(file.relative_to(ROOT))
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(place)
            # The options of the command line have the names that users know.
            elif isinstance(node, ast.Assign) and place != "views/options.py":
                for target in node.targets:
                    aliases.setdefault(ast.unparse(target), []).append(place)
    shared = {name: places for name, places in classes.items() if len(places) > 1}
    shared |= {name: classes[name] + aliases[name] for name in classes.keys() & aliases.keys()}
    assert shared == {}
