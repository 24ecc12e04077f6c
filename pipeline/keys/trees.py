"""Syntax trees without the modules that they belong to: layout, what runs on import, and what a statement binds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
_NEVER_RUN = frozenset({"__name__ == '__main__'", "'__main__' == __name__", "TYPE_CHECKING", "typing.TYPE_CHECKING"})


def reads_docstrings(source: bytes) -> bool:
    """Whether a file may compute from docstrings, its own or those of what it imports."""
    return b"__doc__" in source or b"getdoc" in source


def tree_of(source: bytes, name: str, *, docstrings: bool = False) -> ast.Module:
    """The syntax tree of a file, without what never runs when it is imported; `docstrings` are kept or left out."""
    tree = ast.parse(source, filename=name)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            kept = []
            for statement in body:
                is_docstring = isinstance(statement, ast.Expr)
                if (docstrings and is_docstring) or not _never_runs(statement):
                    kept.append(statement)
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
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
            # What it binds inside is its own; its decorators, defaults and bases may bind names of the module.
            pending += node.decorator_list
            if isinstance(node, ast.ClassDef):
                pending += [*node.bases, *node.keywords]
            else:
                pending += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            continue
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


def root_name(node: ast.AST) -> str:
    """The name that a chain of attributes, items and calls starts from; empty where it starts from something else."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return getattr(node, "id", "")


def _never_runs(statement: ast.stmt) -> bool:
    """A docstring, or an `if` that is false when the module is imported: for its own process or for type checkers."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return isinstance(statement, ast.If) and not statement.orelse and ast.unparse(statement.test) in _NEVER_RUN
