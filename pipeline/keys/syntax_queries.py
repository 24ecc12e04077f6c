"""Questions about one syntax tree of the user's code: what it refers to, binds and changes, and what of it runs."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*FUNCTIONS, ast.Lambda)
MUTATORS = frozenset({"add", "append", "clear", "discard", "extend", "insert", "pop", "register", "remove", "update"})
# A metaclass of these runs no code of the project when a class is defined.
_PLAIN_METACLASSES = frozenset({"ABCMeta", "EnumMeta", "EnumType", "type"})


@dataclass
class Uses:
    """What a statement refers to.

    Attributes:
        bare: names used other than for one attribute.
        attributes: (name, attribute) pairs.
        members: names of all attributes, whatever they are taken from, and constant keywords (`weights_only=False`).
        strings: string and bytes constants, docstrings left out.
    """

    bare: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)

    def names(self) -> list[str]:
        """Every name referred to."""
        return sorted(self.bare | {name for name, _ in self.attributes})

    def all(self) -> set[str]:
        """Every name and attribute referred to."""
        return self.bare | self.members | {name for name, _ in self.attributes}

    def taken_from(self, name: str) -> set[str]:
        """The attributes that are all that is used of a name; empty when the name itself is used."""
        return {a for n, a in self.attributes if n == name} if name not in self.bare else set()


def dump(node: ast.AST) -> str:
    """The tree as text, the same for any layout, comments and docstrings, and on every supported Python."""
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    parts = []
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "kind", "type_comment", "type_ignores") or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list) and value and is_docstring(value[0]):
            value = value[1:]
        parts.append(f"{name}={_dump_field(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def uses(tree: ast.AST) -> Uses:
    """What a tree refers to, nested functions included; names that are local to a function are no references."""
    result = Uses()
    _collect(tree, result, frozenset())
    return result


def registers_subclasses(tree: ast.AST) -> bool:
    """Whether classes may be found here by other means than their names: a metaclass, a hook, or a list of them."""
    return any(
        (isinstance(n, FUNCTIONS) and n.name == "__init_subclass__")
        or (isinstance(n, ast.Attribute) and n.attr == "__subclasses__")
        or (isinstance(n, ast.keyword) and n.arg == "metaclass" and _last_name(n.value) not in _PLAIN_METACLASSES)
        for n in ast.walk(tree)
    )


def runs_when_defined(statement: ast.stmt) -> bool:
    """Whether the place of a statement among the others can matter; that of a plain function can't."""
    return not isinstance(statement, FUNCTIONS) or len(list(executed(statement))) > 1


def executed(statement: ast.AST) -> Iterator[ast.AST]:
    """What runs when the statement does: of a function its decorators and defaults, of a class all but its methods."""
    pending = [statement]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, FUNCTIONS):
            pending += [*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)]
        elif isinstance(node, ast.Lambda):
            pending += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
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
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
            continue  # what it binds inside is its own
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            called = {id(n.func) for n in ast.walk(node.value) if isinstance(n, ast.Call)}
            names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name) and id(n) not in called}
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping):
            name = node.rest if isinstance(node, ast.MatchMapping) else node.name
            names |= {name} if name else set()
        if isinstance(node, ast.comprehension):  # its targets live in a scope of their own
            pending += [node.iter, *node.ifs]
        else:
            pending += ast.iter_child_nodes(node)
    return names


def changed_by_functions(node: ast.AST, module_names: set[str], local: frozenset[str] = frozenset()) -> set[str]:
    """Top-level names that a function rebinds, or whose value it changes, whenever it is called."""
    if isinstance(node, _SCOPES):
        local = _local_in(node, local)
    changed: set[str] = set()
    name = _changed_value(node)
    if name in module_names and name not in local:  # a look-up, for a module may have 100,000 names
        changed.add(name)
    if isinstance(node, ast.Global):
        changed = set(node.names)
    for child in ast.iter_child_nodes(node):
        changed |= changed_by_functions(child, module_names, local)
    return changed


def _changed_value(node: ast.AST) -> str:
    """The name whose value this one node changes, if any."""
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return root(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return root(node.func)
    return ""


def stored_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _local_in(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, around: frozenset[str]) -> frozenset[str]:
    """Names that don't mean the module's in a function's body, given those around it."""
    declared = {n for g in _own_nodes(function) if isinstance(g, ast.Global) for n in g.names}
    return (around | _arguments(function) | _own_names(function)) - declared


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function's or class's body, without those of the functions and classes in it."""
    pending = list(getattr(scope, "body", ())) if not isinstance(scope, ast.Lambda) else [scope.body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda, *COMPREHENSIONS)):
            pending += ast.iter_child_nodes(node)


def _own_names(scope: ast.AST) -> frozenset[str]:
    """Names that a function's or class's body binds."""
    names = {n.id for n in _own_nodes(scope) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return frozenset(names | {n.name for n in _own_nodes(scope) if isinstance(n, DEFINITIONS)})


def _arguments(scope: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> frozenset[str]:
    args = scope.args
    variadic = [arg for arg in (args.vararg, args.kwarg) if arg]
    return frozenset(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, *variadic])


def root(node: ast.AST) -> str:
    """The name that a chain of attributes, items and calls starts from; empty where it starts from something else."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def is_docstring(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def is_never_run(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":` and `if TYPE_CHECKING:`, without an else."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    return ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _collect(node: ast.AST, result: Uses, local: frozenset[str]) -> None:
    """Adds what a tree refers to; `local` are the names that don't mean the module's here."""
    if isinstance(node, ast.Name) and node.id not in local:
        result.bare.add(node.id)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        result.strings.add(os.fsdecode(node.value))
    elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        result.members.add(f"{node.arg}={node.value.value!r}")
    elif isinstance(node, ast.Attribute):
        result.members.add(node.attr)
        if isinstance(node.value, ast.Name):
            if node.value.id not in local:
                result.attributes.add((node.value.id, node.attr))
            return
    elif isinstance(node, ast.ClassDef):  # a name that its body binds is looked up there, then among the module's
        local -= _own_names(node)
    inside = _local_in(node, local) if isinstance(node, _SCOPES) else local
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if name == "body" and isinstance(value, list) and value and is_docstring(value[0]):
            children = value[1:]
        for child in children:
            if isinstance(child, ast.AST):
                _collect(child, result, inside if name == "body" else local)


def _dump_field(value: object) -> str:
    if isinstance(value, ast.AST):
        return dump(value)
    if isinstance(value, list):
        return "[" + ",".join(_dump_field(v) for v in value) + "]"
    return repr(value)
