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
from collections.abc import Iterator
from pathlib import Path

import layerline
from layerline.pipeline.files import Hasher
from layerline.pipeline.keys import canonical, syntax_queries

_OWN = "layerline"
# Looked up by name when they are used, as the tables of backends are. The pipeline's own tables name every stage.
_NAMED = re.compile(rf"{_OWN}(\.\w+)+(:\w+)?")
_NOT_NAMED = f"{_OWN}.pipeline."
_AT_IMPORT, _LATER = "", "~"
# Of this process: files as they were read, with the name of their text in the memo; and what was parsed, by that name.
_READ: dict[Path, tuple[tuple[int, ...], str, bytes]] = {}
_PARSED: dict[str, str] = {}


def digest(stage: type, hasher: Hasher) -> str:
    """SHA-256 in hex over the code of a stage's class.

    Args:
        stage: the class.
        hasher: whose memo keeps what was parsed.
    """
    reader = _Reader({_OWN, stage.__module__.partition(".")[0]}, hasher)
    return canonical.digest(reader.reached(stage.__module__))


class _Reader:
    def __init__(self, packages: set[str], hasher: Hasher) -> None:
        self.packages, self.hasher = packages, hasher

    def reached(self, start: str) -> dict[str, str]:
        """The digest of each module that counts, by name.

        A package counts with what its own import runs; all that its functions import is followed where something is
        taken from it that is no module: it may be resolved on use.
        """
        found: dict[str, str] = {}
        pending, done = [(start, True)], set[tuple[str, bool]]()
        while pending:
            module, whole = pending.pop()
            path = self.path(module)
            if path is None or (module, whole) in done:
                continue
            done.add((module, whole))
            if "." in module:
                pending.append((module.rpartition(".")[0], False))
            found[module], *names = self.facts(module, path).split()
            for name in names:
                if not name.startswith(_LATER):
                    pending.append(self.target(name))
                elif whole or path.name != "__init__.py":
                    pending.append(self.target(name.removeprefix(_LATER)))
        return found

    def target(self, name: str) -> tuple[str, bool]:
        """The module behind `base:attribute`, and whether all of it may be reached."""
        base, _, attribute = name.partition(":")
        if base == _OWN:  # `from layerline import Stage` reaches the module that defines it, not all that are exported
            for module, exported in layerline.EXPORTS.items():
                if attribute in exported:
                    return module, True
        inner = f"{base}.{attribute}"
        return (inner, True) if attribute and self.path(inner) is not None else (base, True)

    def path(self, module: str) -> Path | None:
        """The file of a module of ours; None for any other."""
        top, *parts = module.split(".")
        if top not in self.packages or top not in sys.modules:
            return None
        if not parts and not hasattr(sys.modules[top], "__path__"):
            file = getattr(sys.modules[top], "__file__", None)
            return Path(file) if file else None
        for place in getattr(sys.modules[top], "__path__", ()):
            base = Path(place, *parts)
            files = (base / "__init__.py", base.with_name(f"{base.name}.py")) if parts else (base / "__init__.py",)
            for file in files:
                if file.is_file():
                    return file
        return None

    def facts(self, module: str, path: Path) -> str:
        """The digest of a module's syntax, and what it imports: one word each."""
        s = path.stat()
        stamp = (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        if path not in _READ or _READ[path][0] != stamp:
            source = path.read_bytes()
            _READ[path] = stamp, f"code {module} {hashlib.sha256(source).hexdigest()}", source
        name, source = _READ[path][1:]
        return self.hasher.recall(name, lambda: self.parsed(module, path, source, name))

    def parsed(self, module: str, path: Path, source: bytes, name: str) -> str:
        if name in _PARSED:
            return _PARSED[name]
        tree = ast.parse(source)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = dict.fromkeys(self.imports(tree, package, _AT_IMPORT))
        if not module.startswith(_NOT_NAMED):
            texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            found |= dict.fromkeys(f"{_LATER}{text}" for text in texts if _NAMED.fullmatch(text))
        _PARSED[name] = " ".join([hashlib.sha256(syntax_queries.dump(tree).encode()).hexdigest(), *found])
        return _PARSED[name]

    def imports(self, node: ast.AST, package: str, when: str) -> Iterator[str]:
        """What import statements in a tree name, those that run later marked; those for type checkers left out."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (f"{when}{alias.name}" for alias in child.names if self.is_ours(alias.name))
            elif isinstance(child, ast.ImportFrom):
                around = package.split(".")[: package.count(".") + 2 - child.level] if child.level else []
                base = ".".join([*around, *([child.module] if child.module else [])])
                yield from (f"{when}{base}:{alias.name}" for alias in child.names if self.is_ours(base))
            elif isinstance(child, syntax_queries.FUNCTIONS):
                yield from self.imports(child, package, _LATER)
            elif not (isinstance(child, ast.stmt) and syntax_queries.is_never_run(child)):
                yield from self.imports(child, package, when)

    def is_ours(self, module: str) -> bool:
        return module.partition(".")[0] in self.packages
