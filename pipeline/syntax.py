"""One module of the user's project as a syntax tree: what each top-level name is bound to, and what import runs."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

# Names whose use means that what a function reaches can't be read off its text.
DYNAMIC = frozenset({"__import__", "eval", "exec", "globals", "importlib", "import_module", "locals", "vars"})


@dataclass(frozen=True)
class Origin:
    """Where an imported name comes from.

    Attributes:
        module: dotted name of the module.
        attribute: what is taken from it; None when the name is bound to the module itself.
        path: its file in the project; None for an installed module.
        exact: False for `import a.b`, where the name `a` is not the module that is meant.
    """

    module: str
    attribute: str | None
    path: Path | None
    exact: bool = True


@dataclass
class Module:
    """A parsed file of the project.

    Attributes:
        path: the file.
        tree: its syntax tree.
        bindings: statements that bind or change each top-level name.
        imports: where each imported top-level name comes from.
        effects: statements that run on import and bind nothing.
        loads: modules of the project that importing this one imports.
        stars: modules of the project imported with `*`.
    """

    path: Path
    tree: ast.Module
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[Origin]] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)
    loads: list[Path] = field(default_factory=list)
    stars: list[str] = field(default_factory=list)


def parse(path: Path, root: Path) -> Module:
    """Reads one file of the project whose imports are resolved below `root`.

    Raises:
        SyntaxError: the file isn't Python.
    """
    module = Module(path, ast.parse(path.read_bytes(), filename=path.name))
    for statement in module.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            _bind_import(module, statement, root)
        elif _is_main_guard(statement) or _is_docstring(statement):
            continue
        elif names := _bound_names(statement):
            for name in names:
                module.bindings.setdefault(name, []).append(statement)
        else:
            module.effects.append(statement)
    return module


def dump(node: ast.AST) -> str:
    """The tree as text, the same for any layout, comments and docstrings, and on every supported Python."""
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    parts = []
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "kind", "type_comment", "type_ignores") or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
            value = value[1:]
        parts.append(f"{name}={_dump_field(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def loaded_names(node: ast.AST) -> tuple[set[str], set[tuple[str, str]], set[str]]:
    """What a statement refers to: names used bare, (name, attribute) pairs, and string constants."""
    bare: set[str] = set()
    attributes: set[tuple[str, str]] = set()
    strings: set[str] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if isinstance(current, ast.Attribute) and isinstance(current.value, ast.Name):
            attributes.add((current.value.id, current.attr))
            continue
        if isinstance(current, ast.Name):
            bare.add(current.id)
        elif isinstance(current, ast.Constant) and isinstance(current.value, str):
            strings.add(current.value)
        pending += ast.iter_child_nodes(current)
    return bare, attributes, strings


def local_imports(node: ast.AST, root: Path, package: str) -> tuple[dict[str, list[Origin]], bool]:
    """Imports inside a function body or block, and whether one of them is a star import of the project."""
    found: dict[str, list[Origin]] = {}
    star = False
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            for name, origin in _origins(inner, root, package):
                star |= name == "*" and origin.path is not None
                found.setdefault(name, []).append(origin)
    return found, star


def decorators(statement: ast.stmt) -> set[str]:
    """Names that decorate a definition: they run on import, and may register it where its text doesn't show."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    return {n.id for d in statement.decorator_list for n in ast.walk(d) if isinstance(n, ast.Name)}


def registers_subclasses(tree: ast.AST) -> bool:
    """Whether defining a class here may run code of the project: `__init_subclass__` or a metaclass."""
    return any(
        (isinstance(n, ast.FunctionDef) and n.name == "__init_subclass__")
        or (isinstance(n, ast.keyword) and n.arg == "metaclass")
        for n in ast.walk(tree)
    )


def resolve(module: str, root: Path) -> Path | None:
    """The file of a module of the project, None for one that is installed."""
    base = root.joinpath(*module.split(".")) if module else root
    for candidate in (base.with_suffix(".py") if module else base / "__init__.py", base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def package_of(path: Path, root: Path) -> str:
    """The dotted package that relative imports in this file start from."""
    return ".".join(path.relative_to(root).parts[:-1])


def _dump_field(value: object) -> str:
    if isinstance(value, ast.AST):
        return dump(value)
    if isinstance(value, list):
        return "[" + ",".join(_dump_field(v) for v in value) + "]"
    return repr(value)


def _bind_import(module: Module, statement: ast.Import | ast.ImportFrom, root: Path) -> None:
    for name, origin in _origins(statement, root, package_of(module.path, root)):
        if origin.path is not None:
            module.loads.append(origin.path)
        if name != "*":
            module.imports.setdefault(name, []).append(origin)
        elif origin.path is not None:
            module.stars.append(origin.module)


def _origins(statement: ast.Import | ast.ImportFrom, root: Path, package: str) -> list[tuple[str, Origin]]:
    if isinstance(statement, ast.Import):
        # `import a.b` binds `a`; what is reached through it can be any of its parts, so the dotted one is named.
        return [
            (a.asname or a.name.split(".")[0], Origin(a.name, None, resolve(a.name, root))) for a in statement.names
        ]
    base = statement.module or ""
    if statement.level:
        parts = package.split(".") if package else []
        kept = parts[: len(parts) - statement.level + 1]
        base = ".".join([*kept, *([statement.module] if statement.module else [])])
    found = []
    for alias in statement.names:
        submodule = f"{base}.{alias.name}" if base else alias.name
        if (path := resolve(base, root) if base or statement.level else None) and not _has_submodule(path, alias.name):
            origin = Origin(base, alias.name, path)
        elif (inner := resolve(submodule, root)) is not None:
            origin = Origin(submodule, None, inner)
        else:
            origin = Origin(base, alias.name, None)
        found.append((alias.asname or alias.name, origin))
    return found


def _has_submodule(path: Path, name: str) -> bool:
    if path.name != "__init__.py":
        return False
    return (path.parent / f"{name}.py").is_file() or (path.parent / name / "__init__.py").is_file()


def _bound_names(statement: ast.stmt) -> set[str]:
    """Names a top-level statement binds, or whose value it changes (`config["lr"] = 1`, `net.width = 8`)."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    names: set[str] = set()
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what it binds inside is its own
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        pending += ast.iter_child_nodes(node)
    return names


def _is_docstring(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in {
        n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)
    }
