"""The code of a stage: the modules of ours that it is made of, by syntax tree; an upgrade reruns what it changes.

From the stage's module every import is followed, those inside of functions too, within Layerline and within the
package that the stage comes from. Layout, comments and docstrings change nothing. What other packages do counts by
their versions. A module is parsed once per version of its text; the result is kept in the project's memo.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import layerline
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys import canonical, trees
from layerline.pipeline.keys.imports import Finder, imported

_OWN = "layerline"
# Looked up by name when they are used, as the tables of backends are. The pipeline's own tables name every stage.
_NAMED = re.compile(rf"{_OWN}(\.\w+)+(:\w+)?")
_NOT_NAMED = f"{_OWN}.pipeline."
_LATER = "~"  # before an import that runs only when a function does


def digest(stage: type, hasher: Hasher) -> str:
    """SHA-256 in hex over the code of a stage's class; the hasher's memo keeps what was parsed."""
    return canonical.digest(reached(stage.__module__, hasher))


def reached(start: str, hasher: Hasher) -> dict[str, str]:
    """The digest of each module that counts for the module `start`, by name.

    A package counts with what its own import runs. What its functions import is followed only where something is taken
    from the package that is no module: it may be resolved on use.
    """
    packages = dict.fromkeys([_OWN, start.partition(".")[0]])
    roots = []  # the folders that hold them
    for package in packages:
        module_object = sys.modules.get(package)
        places = [*getattr(module_object, "__path__", ())] or [getattr(module_object, "__file__", None)]
        roots += [Path(place).parent for place in places if place]
    find = cache(Finder(roots[0], roots).find)  # many modules import the same ones
    digests: dict[str, str] = {}
    pending = [(start, True)]
    done: set[tuple[str, bool]] = set()
    while pending:
        module, whole = pending.pop()
        path = find(module)
        if path is None or (module, whole) in done:
            continue
        done.add((module, whole))
        if "." in module:
            pending.append((module.rpartition(".")[0], False))
        source = path.read_bytes()
        is_package = path.name == "__init__.py"
        name = f"code {module} {hashlib.sha256(source).hexdigest()}"
        digests[module], *names = hasher.recall(name, partial(_facts, module, source, is_package)).split()
        for imported_name in names:
            base = imported_name.removeprefix(_LATER)
            runs = whole or not is_package or base == imported_name
            if runs and re.split("[.:]", base, maxsplit=1)[0] in packages:
                pending.append(_target(base, find))
    return digests


def _target(name: str, find: Callable[[str], Path | None]) -> tuple[str, bool]:
    """The module behind `base:attribute`, and whether all of it may be reached."""
    base, _, attribute = name.partition(":")
    if base == _OWN:  # `from layerline import Stage` reaches the module that defines it, not all that are exported
        for module, exported in layerline.EXPORTS.items():
            if attribute in exported:
                return module, True
    inner = f"{base}.{attribute}"
    if attribute and find(inner) is not None:
        return inner, True
    return base, True


@cache
def _facts(module: str, source: bytes, is_package: bool) -> str:
    """The digest of a module's syntax, and each `base:attribute` that it imports or names, all in one line."""
    tree = trees.tree_of(source, module, docstrings=trees.reads_docstrings(source))
    package = module
    if not is_package:
        package = module.rpartition(".")[0]
    at_import = set(trees.executed(tree))
    names: dict[str, None] = {}  # as an ordered set
    strings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            when = _LATER
            if node in at_import:
                when = ""
            for base, attribute in imported(node, package):
                names[f"{when}{base}:{attribute or ''}"] = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    if not module.startswith(_NOT_NAMED):
        names |= {f"{_LATER}{text}": None for text in strings if _NAMED.fullmatch(text)}
    return " ".join([hashlib.sha256(trees.dump(tree).encode()).hexdigest(), *names])
