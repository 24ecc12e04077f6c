"""One module of the user's project as a syntax tree: what each top-level name is bound to, and what import runs."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from layerline.pipeline.keys import syntax_queries
from layerline.pipeline.keys.imports import Finder, Origin

# Decorators of the standard library, of torch and of dataclass libraries that register nothing; a name stands for all
# below it. Any other installed decorator may, so that what it decorates counts for every hook.
_HARMLESS = frozenset(
    {
        *("abc", "attr", "attrs", "contextlib", "dataclasses", "enum", "pydantic", "typing", "typing_extensions"),
        *("functools.cache", "functools.cached_property", "functools.lru_cache", "functools.partialmethod"),
        *("functools.singledispatch", "functools.singledispatchmethod", "functools.total_ordering", "functools.wraps"),
        *("torch.compile", "torch.enable_grad", "torch.inference_mode", "torch.jit", "torch.no_grad"),
    }
)
_HARMLESS_BUILT_INS = frozenset({"classmethod", "property", "staticmethod"})
# Methods that change the object they belong to, whether they are called here or handed to another function.
_CHANGES = syntax_queries.MUTATORS | {
    *("__delitem__", "__setitem__", "appendleft", "popitem", "popleft", "putenv", "setdefault"),
}
_APPLIES = frozenset({"filter", "map", "reduce"})
_DISPLAYS = (
    ast.Constant,
    ast.Dict,
    ast.List,
    ast.Set,
    ast.Tuple,
    ast.JoinedStr,
    ast.Lambda,
    *syntax_queries.COMPREHENSIONS,
)


@dataclass
class Module:
    """A parsed file of the project.

    Attributes:
        path: the file.
        package: dotted package that its relative imports start from.
        tree: its syntax tree.
        digest: SHA-256 of its bytes, in hex.
        bindings: statements that bind or change each top-level name.
        imports: where each imported top-level name comes from.
        imported_by: the statements that import it.
        effects: statements whose run on import can change more than the names they bind.
        loads: import statements that run on import, with the module of the project that each imports.
        stars: what is imported with `*`.
        registers: whether classes may be found here by other means than their names.
    """

    path: Path
    package: str
    tree: ast.Module
    digest: str
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[Origin]] = field(default_factory=dict)
    imported_by: dict[str, list[ast.stmt]] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)
    loads: list[tuple[ast.stmt, Path]] = field(default_factory=list)
    stars: list[Origin] = field(default_factory=list)
    registers: bool = False

    _dumps: dict[int, str] = field(default_factory=dict)
    _uses: dict[int, syntax_queries.Uses] = field(default_factory=dict)

    def dump(self, node: ast.AST) -> str:
        """A node of this module's tree as text; made once for all hooks."""
        if id(node) not in self._dumps:
            self._dumps[id(node)] = syntax_queries.dump(node)
        return self._dumps[id(node)]

    def uses(self, node: ast.AST) -> syntax_queries.Uses:
        """What a node of this module's tree refers to; looked up once for all hooks."""
        if id(node) not in self._uses:
            self._uses[id(node)] = syntax_queries.uses(node)
        return self._uses[id(node)]

    def is_rebound(self, name: str) -> bool:
        """Whether more than one statement binds or changes a name, so that their order matters."""
        return len(self.bindings.get(name, ())) + len(self.imported_by.get(name, ())) > 1

    def is_ours(self, name: str) -> bool:
        """Whether a name is the project's: defined here or in a module of the project that this one imports."""
        return name in self.bindings or any(o.path for o in self.imports.get(name, ()))


def parse(path: Path, finder: Finder) -> Module:
    """Reads one file of the project.

    Raises:
        SyntaxError: the file isn't Python.
    """
    source = path.read_bytes()
    tree = ast.parse(source, filename=path.name)
    digest = hashlib.sha256(source).hexdigest()
    module = Module(path, finder.package(path), tree, digest)
    body = [s for s in module.tree.body if not (syntax_queries.is_docstring(s) or syntax_queries.is_never_run(s))]
    for statement in body:
        _bind_imports(module, statement, finder)
        for name in syntax_queries.bound_names(statement):
            module.bindings.setdefault(name, []).append(statement)
    module_names = module.bindings.keys() | module.imports.keys()
    for statement in body:
        for name in syntax_queries.changed_by_functions(statement, module_names):
            if statement not in module.bindings.setdefault(name, []):
                module.bindings[name].append(statement)
    module.registers = syntax_queries.registers_subclasses(module.tree)
    module.effects = [s for s in body if _has_effect(module, s)]
    return module


def imports(node: ast.AST, module: Module, finder: Finder) -> dict[str, list[Origin]]:
    """Where the names come from that import statements anywhere in a tree bind."""
    origins: dict[str, list[Origin]] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            for name, origin in finder.origins(inner, module.package):
                origins.setdefault(name, []).append(origin)
    return origins


def _bind_imports(module: Module, statement: ast.stmt, finder: Finder) -> None:
    for node in syntax_queries.executed(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, origin in finder.origins(node, module.package):
                if origin.path is not None:
                    module.loads.append((node, origin.path))
                if name == "*":
                    module.stars.append(origin)
                elif node is statement:
                    module.imports.setdefault(name, []).append(origin)
                    if statement not in module.imported_by.setdefault(name, []):
                        module.imported_by[name].append(statement)


def _has_effect(module: Module, statement: ast.stmt) -> bool:
    """Whether running the statement can change more than the names it is filed under."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
        return False
    if not syntax_queries.bound_names(statement):
        return True
    return any(_node_has_effect(module, node) for node in syntax_queries.executed(statement))


def _node_has_effect(module: Module, node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call):
        return module.is_ours(syntax_queries.root(node.func)) or _works_by_effect(node.func) or _hands_on(module, node)
    if isinstance(node, syntax_queries.DEFINITIONS):
        return any(not _is_harmless(module, d) for d in node.decorator_list)
    if isinstance(node, ast.Attribute) and node.attr in _CHANGES and isinstance(node.ctx, ast.Load):
        return True
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return not _holds_own_value(module, node.target.id)
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return not (isinstance(node.value, ast.Name) and _holds_own_value(module, node.value.id))
    # `_ = f()`: the result isn't wanted, so the call is made for its effect.
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_" for t in node.targets)


def _hands_on(module: Module, call: ast.Call) -> bool:
    """Whether an installed function gets a function of the project as an argument: it may call or keep it."""
    if _is_harmless(module, call):
        return False
    applies = ast.unparse(call.func).rpartition(".")[2] in _APPLIES
    for argument in [*call.args, *call.keywords]:
        value = argument.value if isinstance(argument, ast.keyword | ast.Starred) else argument
        if isinstance(value, ast.Lambda) and any(_node_has_effect(module, n) for n in ast.walk(value.body)):
            return True
        if isinstance(value, ast.Name):
            definitions = module.bindings.get(value.id, ())
            if any(isinstance(s, syntax_queries.FUNCTIONS) for s in definitions):
                return True
        if applies and isinstance(value, ast.Name | ast.Attribute) and module.is_ours(syntax_queries.root(value)):
            return True
    return False


def _is_harmless(module: Module, decorator: ast.expr) -> bool:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute) and decorator.attr in ("deleter", "getter", "setter"):
        return True
    name = _installed_name(module, decorator)
    parts = name.split(".")
    return name in _HARMLESS_BUILT_INS or any(".".join(parts[: n + 1]) in _HARMLESS for n in range(len(parts)))


def _installed_name(module: Module, node: ast.expr) -> str:
    """The full dotted name of something installed, `torch.no_grad` for any way to import it; empty when unknown."""
    name, dot, rest = ast.unparse(node).partition(".")
    if module.is_ours(name) or not all(part.isidentifier() for part in f"{name}{dot}{rest}".split(".")):
        return ""
    full_names = set()
    for origin in module.imports.get(name, ()):
        if origin.exact:
            full_names.add(f"{origin.module}.{origin.attribute}" if origin.attribute else origin.module)
    if len(full_names) > 1:  # imported in two ways, as in try/except ImportError
        return ""
    first = full_names.pop() if full_names else name
    return f"{first}{dot}{rest}"


def _works_by_effect(function: ast.expr) -> bool:
    """Whether an installed function's name says that it is called for its effect: seeds and registries."""
    name = ast.unparse(function).lower()
    return "seed" in name or "regist" in name


def _holds_own_value(module: Module, name: str) -> bool:
    """Whether no other name can stand for the same object unless it is defined from this one."""
    statements = module.bindings.get(name, ())
    if not statements or name in module.imports:
        return False
    return all(_gives_own_value(module, s, name) for s in statements)


def _gives_own_value(module: Module, statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (*syntax_queries.DEFINITIONS, ast.AugAssign)):
        return True
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    if isinstance(statement, ast.Assign | ast.AnnAssign) and len(targets) == 1:
        target = targets[0]
        if isinstance(target, ast.Name) and target.id == name:
            return _is_fresh(module, statement.value)
    # A loop, a block or unpacking may bind it to an object that has another name.
    return name not in syntax_queries.stored_names(statement)


def _is_fresh(module: Module, value: ast.expr | None) -> bool:
    """Whether an expression makes a new object: a literal, or what an installed function returns."""
    if value is None or isinstance(value, _DISPLAYS):
        return True
    return isinstance(value, ast.Call) and not module.is_ours(syntax_queries.root(value.func))
