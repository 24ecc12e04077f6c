"""A module of the user's code: what its names stand for, what binds or changes them, and what runs on import."""

from __future__ import annotations

import ast
import dis
import hashlib
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from layerline.pipeline.keys.effects import changed_names, has_effect, registers_subclasses
from layerline.pipeline.keys.imports import Finder, Origin
from layerline.pipeline.keys.trees import bound_names, dump, executed, reads_docstrings, tree_of

# How the instructions end that use a name of the module, not one of a function; the last one is of Python 3.12.
_OF_MODULE = ("_NAME", "_GLOBAL", "_GLOBALS")
_MANGLED = re.compile(r"_[^\W_]\w*__\w")


@dataclass
class Uses:
    """What a statement refers to."""

    bare: set[str] = field(default_factory=set)  # names used other than for one attribute
    attributes: set[tuple[str, str]] = field(default_factory=set)  # (name, attribute) pairs
    # names of all attributes, whatever they are taken from, and constant keywords (`weights_only=False`)
    members: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)  # string and bytes constants

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
    tree: ast.Module  # its syntax tree, without what never runs
    digest: str  # SHA-256 of its bytes, in hex
    reads_docstrings: bool  # whether it may compute from docstrings of any file
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


def parse(path: Path, finder: Finder, *, docstrings: bool = False) -> Module:
    """Reads one file of the project, with or without its docstrings. Raises SyntaxError: the file isn't Python."""
    source = path.read_bytes()
    module = Module(
        path,
        finder.package(path),
        tree_of(source, path.name, docstrings=docstrings),
        hashlib.sha256(source).hexdigest(),
        reads_docstrings(source),
    )
    _compiled(module.tree)
    body = module.tree.body
    for statement in body:
        _bind_imports(module, statement, finder)
        for name in bound_names(statement):
            module.bindings.setdefault(name, []).append(statement)
    module_names = module.bindings.keys() | module.imports.keys()
    for statement in body:
        changed = changed_names(statement, module_names)
        if changed:  # seldom, and compiling takes time
            changed &= _module_names(statement)
        for name in changed:
            if statement not in module.bindings.setdefault(name, []):
                module.bindings[name].append(statement)
    module.registers = any(map(registers_subclasses, ast.walk(module.tree)))
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            continue
        if not bound_names(statement) or has_effect(module, statement):
            module.effects.append(statement)
    return module


def imports(node: ast.AST, module: Module, finder: Finder) -> dict[str, list[Origin]]:
    """Where the names come from that import statements anywhere in a tree bind."""
    origins: dict[str, list[Origin]] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            for name, origin in finder.origins(inner, module.package):
                origins.setdefault(name, []).append(origin)
    return origins


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
    # In a class the compiler reads `__x` as `_Class__x`: a name that stands nowhere in the text.
    result.bare |= {name for name in module_names if _MANGLED.match(name)}
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
