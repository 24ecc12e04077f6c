"""The user's code as syntax trees: what names stand for, what binds them, and what runs when a module is imported."""

from __future__ import annotations

import ast
import dis
import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from layerline.pipeline.keys.imports import Finder, Origin

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
# Methods that change the object they belong to, whether they are called here or handed to another function.
_CHANGES = frozenset(
    {
        *("__delitem__", "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop"),
        *("popitem", "popleft", "putenv", "register", "remove", "setdefault", "update"),
    }
)
# Decorators of the standard library, of torch and of dataclass libraries that register nothing; a name stands for all
# below it. Any other installed decorator may, so that what it decorates counts for every hook.
_HARMLESS = frozenset(
    {
        *("classmethod", "property", "staticmethod"),
        *("abc", "attr", "attrs", "contextlib", "dataclasses", "enum", "pydantic", "typing", "typing_extensions"),
        *("functools.cache", "functools.cached_property", "functools.lru_cache", "functools.partialmethod"),
        *("functools.singledispatch", "functools.singledispatchmethod", "functools.total_ordering", "functools.wraps"),
        *("torch.compile", "torch.enable_grad", "torch.inference_mode", "torch.jit", "torch.no_grad"),
    }
)
_PROPERTY_PARTS = ("deleter", "getter", "setter")
_APPLIES = frozenset({"filter", "map", "reduce"})
# A metaclass of these runs no code of the project when a class is defined.
_PLAIN_METACLASSES = frozenset({"ABCMeta", "EnumMeta", "EnumType", "type"})
_NEVER_RUN = frozenset({"__name__ == '__main__'", "'__main__' == __name__", "TYPE_CHECKING", "typing.TYPE_CHECKING"})
# How the instructions end that use a name of the module, not one of a function; the last one is of Python 3.12.
_OF_MODULE = ("_NAME", "_GLOBAL", "_GLOBALS")


@dataclass
class Uses:
    """What a statement refers to."""

    bare: set[str] = field(default_factory=set)  # names used other than for one attribute
    attributes: set[tuple[str, str]] = field(default_factory=set)  # (name, attribute) pairs
    # names of all attributes, whatever they are taken from, and constant keywords (`weights_only=False`)
    members: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)  # string and bytes constants, docstrings left out

    def names(self) -> list[str]:
        """Every name referred to."""
        return sorted(self.bare | {name for name, _ in self.attributes})

    def taken_from(self, name: str) -> set[str]:
        """The attributes that are all that is used of a name; empty when the name itself is used."""
        if name in self.bare:
            return set()
        return {attribute for base, attribute in self.attributes if base == name}


@dataclass
class Module:
    """A parsed file of the project."""

    path: Path
    package: str  # dotted package that its relative imports start from
    tree: ast.Module  # its syntax tree, without docstrings and without what never runs
    digest: str  # SHA-256 of its bytes, in hex
    # statements that bind or change each top-level name
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[Origin]] = field(default_factory=dict)  # where each imported top-level name comes from
    imported_by: dict[str, list[ast.stmt]] = field(default_factory=dict)  # the statements that import it
    # statements whose run on import can change more than the names they bind
    effects: list[ast.stmt] = field(default_factory=list)
    # import statements that run on import, with the module of the project that each imports
    loads: list[tuple[ast.stmt, Path]] = field(default_factory=list)
    stars: list[Origin] = field(default_factory=list)  # what is imported with `*`
    registers: bool = False  # whether classes may be found here by other means than their names

    _dumps: dict[ast.AST, str] = field(default_factory=dict)
    _uses: dict[ast.AST, Uses] = field(default_factory=dict)

    def dump(self, node: ast.AST) -> str:
        """A node of this module's tree as text; made once for all hooks."""
        if node not in self._dumps:
            self._dumps[node] = dump(node)
        return self._dumps[node]

    def uses(self, node: ast.Module | ast.stmt) -> Uses:
        """What a statement of this module, or all of it, refers to; looked up once for all hooks."""
        if node not in self._uses:
            self._uses[node] = _uses(node)
        return self._uses[node]

    def is_rebound(self, name: str) -> bool:
        """Whether more than one statement binds or changes a name, so that their order matters."""
        return len(self.bindings.get(name, ())) + len(self.imported_by.get(name, ())) > 1

    def is_ours(self, name: str) -> bool:
        """Whether a name is the project's: defined here or in a module of the project that this one imports."""
        return name in self.bindings or any(origin.path for origin in self.imports.get(name, ()))


def parse(path: Path, finder: Finder) -> Module:
    """Reads one file of the project. Raises SyntaxError: the file isn't Python."""
    source = path.read_bytes()
    module = Module(path, finder.package(path), tree_of(source, path.name), hashlib.sha256(source).hexdigest())
    _compiled(module.tree)
    body = module.tree.body
    for statement in body:
        _bind_imports(module, statement, finder)
        for name in bound_names(statement):
            module.bindings.setdefault(name, []).append(statement)
    module_names = module.bindings.keys() | module.imports.keys()
    for statement in body:
        for name in _changed_names(statement, module_names):
            if statement not in module.bindings.setdefault(name, []):
                module.bindings[name].append(statement)
    module.registers = any(map(_registers_subclasses, ast.walk(module.tree)))
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            continue
        if not bound_names(statement) or any(_node_has_effect(module, node) for node in executed(statement)):
            module.effects.append(statement)
    return module


def tree_of(source: bytes, name: str) -> ast.Module:
    """The syntax tree of a file, without docstrings, without what never runs when it is imported."""
    tree = ast.parse(source, filename=name)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            kept = [statement for statement in body if not _never_runs(statement)]
            if not kept and not isinstance(node, ast.Module):
                kept = [ast.copy_location(ast.Pass(), body[0])]
            node.body = kept  # type: ignore[attr-defined]
    return tree


def dump(value: object) -> str:
    """A tree as text, the same for any layout and comments, and on every supported Python."""
    if isinstance(value, ast.Constant):
        return f"{type(value.value).__name__}:{value.value!r}"
    if isinstance(value, list):
        return f"[{','.join(map(dump, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    parts = []
    for name, inner in ast.iter_fields(value):
        if name not in ("ctx", "kind", "type_comment", "type_ignores") and inner is not None and inner != []:
            parts.append(f"{name}={dump(inner)}")
    return f"{type(value).__name__}({','.join(parts)})"


def imports(node: ast.AST, module: Module, finder: Finder) -> dict[str, list[Origin]]:
    """Where the names come from that import statements anywhere in a tree bind."""
    origins: dict[str, list[Origin]] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            for name, origin in finder.origins(inner, module.package):
                origins.setdefault(name, []).append(origin)
    return origins


def runs_when_defined(statement: ast.stmt) -> bool:
    """Whether the place of a statement among the others can matter; that of a plain function can't."""
    return not isinstance(statement, FUNCTIONS) or len(list(executed(statement))) > 1


def executed(statement: ast.AST) -> Iterator[ast.AST]:
    """What runs when the statement does: of a function its decorators and defaults, of a class all but its methods."""
    pending = [statement]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            pending += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            pending += getattr(node, "decorator_list", [])
        else:
            pending += ast.iter_child_nodes(node)


def bound_names(statement: ast.stmt) -> set[str]:
    """Names a top-level statement binds, or whose value it changes (`config["lr"] = 1`, `net.width = 8`)."""
    names: set[str] = set()
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return names
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
            continue  # what it binds inside is its own
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            called = {inner.func for inner in ast.walk(node.value) if isinstance(inner, ast.Call)}
            names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name) and n not in called}
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        if isinstance(node, ast.comprehension):  # its targets live in a scope of their own
            pending += [node.iter, *node.ifs]
        else:
            pending += ast.iter_child_nodes(node)
    return names


def _compiled(tree: ast.Module) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as that of `x is 1`: the import itself tells it
        code: CodeType = compile(tree, "", "exec", dont_inherit=True, optimize=0)
    return code


def _module_names(tree: ast.Module | ast.stmt) -> set[str]:
    """Names of the module that a tree looks up or changes, in nested functions too, as the compiler resolves them."""
    names: set[str] = set()
    if isinstance(tree, ast.stmt):
        tree = ast.Module([tree], [])
    pending = [_compiled(tree)]
    while pending:
        code = pending.pop()
        names |= {step.argval for step in dis.get_instructions(code) if step.opname.endswith(_OF_MODULE)}
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _uses(tree: ast.Module | ast.stmt) -> Uses:
    """What a tree refers to; names that are local to a function are no references."""
    result = Uses()
    module_names = _module_names(tree)
    bases: set[ast.Name] = set()
    for node in ast.walk(tree):  # an attribute comes before the name that it is taken from
        if isinstance(node, ast.Attribute):
            result.members.add(node.attr)
            if isinstance(node.value, ast.Name):
                bases.add(node.value)
                if node.value.id in module_names:
                    result.attributes.add((node.value.id, node.attr))
        elif isinstance(node, ast.Name) and node.id in module_names and node not in bases:
            result.bare.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            result.strings.add(os.fsdecode(node.value))
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            result.members.add(f"{node.arg}={node.value.value!r}")
    return result


def _bind_imports(module: Module, statement: ast.stmt, finder: Finder) -> None:
    for node in executed(statement):
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


def _changed_names(statement: ast.stmt, module_names: set[str]) -> set[str]:
    """Top-level names that a function rebinds, or whose value it changes, whenever it is called."""
    changed: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Global):
            changed |= set(node.names)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed |= {_root(node)} & module_names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed |= {_root(node.func)} & module_names
    if not changed:  # the usual case, and compiling takes time
        return changed
    return changed & _module_names(statement)


def _registers_subclasses(node: ast.AST) -> bool:
    """Whether classes may be found by other means than their names: a metaclass, a hook, or a list of them."""
    if isinstance(node, ast.keyword) and node.arg == "metaclass":
        return ast.unparse(node.value).rpartition(".")[2] not in _PLAIN_METACLASSES
    if isinstance(node, ast.Attribute):
        return node.attr == "__subclasses__"
    return isinstance(node, FUNCTIONS) and node.name == "__init_subclass__"


def _never_runs(statement: ast.stmt) -> bool:
    """A docstring, or an `if` that is false when the module is imported: for its own process or for type checkers."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return isinstance(statement, ast.If) and not statement.orelse and ast.unparse(statement.test) in _NEVER_RUN


def _node_has_effect(module: Module, node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).lower()  # the names of seeds and registries say that they work by their effect
        return module.is_ours(_root(node.func)) or "seed" in called or "regist" in called or _hands_on(module, node)
    if isinstance(node, _DEFINITIONS):
        return any(not _is_harmless(module, decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.Attribute) and node.attr in _CHANGES:
        return True
    if isinstance(node, ast.Attribute | ast.Subscript):  # another name may stand for the object that is changed
        return not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):  # `x += [1]` changes the list itself
        return True
    # `_ = f()`: the result isn't wanted, so the call is made for its effect.
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_" for t in node.targets)


def _hands_on(module: Module, call: ast.Call) -> bool:
    """Whether an installed function gets a function of the project as an argument: it may call or keep it."""
    if _is_harmless(module, call):
        return False
    applies = ast.unparse(call.func).rpartition(".")[2] in _APPLIES
    for argument in [*call.args, *call.keywords]:
        value = argument.value if isinstance(argument, ast.keyword | ast.Starred) else argument
        if isinstance(value, ast.Lambda) and any(_node_has_effect(module, node) for node in ast.walk(value.body)):
            return True
        if isinstance(value, ast.Name):
            definitions = module.bindings.get(value.id, ())
            if any(isinstance(statement, FUNCTIONS) for statement in definitions):
                return True
        if applies and isinstance(value, ast.Name | ast.Attribute) and module.is_ours(_root(value)):
            return True
    return False


def _is_harmless(module: Module, decorator: ast.expr) -> bool:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute) and decorator.attr in _PROPERTY_PARTS:
        return True
    parts = _installed_name(module, decorator).split(".")
    return any(".".join(parts[: length + 1]) in _HARMLESS for length in range(len(parts)))


def _installed_name(module: Module, node: ast.expr) -> str:
    """The full dotted name of something installed, `torch.no_grad` for any way to import it; empty when unknown."""
    first, dot, rest = ast.unparse(node).partition(".")
    if module.is_ours(first) or not all(part.isidentifier() for part in f"{first}{dot}{rest}".split(".")):
        return ""
    full_names = {origin.dotted for origin in module.imports.get(first, ()) if origin.exact} or {first}
    if len(full_names) > 1:  # imported in two ways, as in try/except ImportError
        return ""
    return f"{full_names.pop()}{dot}{rest}"


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes, items and calls starts from; empty where it starts from something else."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return getattr(node, "id", "")
