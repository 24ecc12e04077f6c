"""Which statements do more, when their module is imported, than to bind names: those count for every hook.

Something that looks like a plain call or decorator may register a function of the project, or change an object that
another name stands for. Where the text leaves it open, it counts.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Protocol

from layerline.pipeline.keys.imports import Origin
from layerline.pipeline.keys.trees import DEFINITIONS, FUNCTIONS, executed, root_name

# Methods that change the object they belong to, whether they are called here or handed to another function.
_CHANGES = frozenset(
    {
        *("__delitem__", "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop"),
        *("popitem", "popleft", "putenv", "register", "remove", "setdefault", "update"),
    }
)
_CHANGES_ARGUMENT = frozenset(
    {"copyto", "delattr", "delitem", "heapify", "heappop", "heappush", "setattr", "setitem", "shuffle"}
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


class Names(Protocol):
    """What the names of a module stand for."""

    @property
    def bindings(self) -> Mapping[str, Sequence[ast.stmt]]: ...
    @property
    def imports(self) -> Mapping[str, Sequence[Origin]]: ...

    def is_ours(self, name: str) -> bool: ...


def has_effect(module: Names, statement: ast.stmt) -> bool:
    """Whether a statement that binds names can change more than these when it runs."""
    return any(_node_has_effect(module, node) for node in executed(statement))


def changed_names(statement: ast.stmt, module_names: set[str]) -> set[str]:
    """Names of the module that a function rebinds, or whose value it changes, whenever it is called.

    A name that is local to the function may be among them.
    """
    changed: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Global):
            changed |= set(node.names)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed |= {root_name(node)} & module_names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed |= {root_name(node.func)} & module_names
    return changed


def registers_subclasses(node: ast.AST) -> bool:
    """Whether classes may be found by other means than their names: a metaclass, a hook, or a list of them."""
    if isinstance(node, ast.keyword) and node.arg == "metaclass":
        return ast.unparse(node.value).rpartition(".")[2] not in _PLAIN_METACLASSES
    if isinstance(node, ast.Attribute):
        return node.attr == "__subclasses__"
    return isinstance(node, FUNCTIONS) and node.name == "__init_subclass__"


def _node_has_effect(module: Names, node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).lower()  # the names of seeds and registries say that they work by their effect
        if "seed" in called or "regist" in called or _changes_more(called):
            return True
        return module.is_ours(root_name(node.func)) or _hands_on(module, node)
    if isinstance(node, DEFINITIONS):
        return any(not _is_harmless(module, decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.Attribute) and node.attr in _CHANGES:
        return True
    if isinstance(node, ast.Attribute | ast.Subscript):  # another name may stand for the object that is changed
        return not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):  # `x += [1]` changes the list itself
        return True
    # `_ = f()`: the result isn't wanted, so the call is made for its effect.
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_" for t in node.targets)


def _changes_more(called: str) -> bool:
    """Whether the name of a function says that it changes what it is given, or a setting of its library."""
    if "(" in called:  # a method of something that was just made
        return False
    function = called.rpartition(".")[2]
    # torch ends the names of such functions in one underscore: `nn.init.zeros_`.
    in_place = function.endswith("_") and not function.endswith("__")
    return in_place or function.startswith("set_") or function in _CHANGES_ARGUMENT


def _hands_on(module: Names, call: ast.Call) -> bool:
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
        if applies and isinstance(value, ast.Name | ast.Attribute) and module.is_ours(root_name(value)):
            return True
    return False


def _is_harmless(module: Names, decorator: ast.expr) -> bool:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute) and decorator.attr in _PROPERTY_PARTS:
        return True
    parts = _installed_name(module, decorator).split(".")
    return any(".".join(parts[: length + 1]) in _HARMLESS for length in range(len(parts)))


def _installed_name(module: Names, node: ast.expr) -> str:
    """The full dotted name of something installed, `torch.no_grad` for any way to import it; empty when unknown."""
    first, dot, rest = ast.unparse(node).partition(".")
    if module.is_ours(first) or not all(part.isidentifier() for part in f"{first}{dot}{rest}".split(".")):
        return ""
    full_names = {origin.dotted for origin in module.imports.get(first, ()) if origin.exact} or {first}
    if len(full_names) > 1:  # imported in two ways, as in try/except ImportError
        return ""
    return f"{full_names.pop()}{dot}{rest}"
