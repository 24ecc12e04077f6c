"""Where a name that the user's code imports comes from: a file of the project, or an installed module."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from layerline.pipeline.folders import is_foreign_folder, is_own_folder


@dataclass(frozen=True)
class Origin:
    """Where an imported name comes from."""

    module: str  # dotted name of the module
    attribute: str | None  # what is taken from it; None when it is the module itself
    path: Path | None  # its file in the project; None for an installed module
    # False where the text leaves it open: `import a.b` binds `a`, not this module; and in `from a import b`, where
    # `a/b.py` exists, `a` itself need not define `b`
    exact: bool = True

    @property
    def dotted(self) -> str:
        """Module and attribute, as they would be written."""
        return ".".join(part for part in (self.module, self.attribute) if part)


class Finder:
    """Finds a project's modules as the interpreter would, on the path `roots`; what lies outside is installed."""

    def __init__(self, project: Path, roots: Sequence[Path]) -> None:
        self.project = project
        self._roots = list(roots)
        self._looked_up: set[str] = set()

    def find(self, module: str) -> Path | None:
        """The file of a module of the project, None for one that is installed."""
        if not module:
            return None
        for root in self._roots:
            path = _below(root, module)
            if path is not None:
                return path
        if self._widen(module.partition(".")[0]):
            return self.find(module)
        return None

    def compiled(self, module: str) -> Path | None:
        """The binary of a module without source that lies in the project: an extension, or bytecode alone."""
        for root in self._roots:
            base = root.joinpath(*module.split("."))
            for path in (base / "__init__", base):
                for suffix in (*EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES):
                    file = path.with_name(path.name + suffix)
                    if file.is_file():
                        return file
        return None

    def origins(self, statement: ast.Import | ast.ImportFrom, package: str) -> list[tuple[str, Origin]]:
        """Each name that an import statement binds in a module of `package`, with where it can come from."""
        pairs = []
        for alias, (base, _) in zip(statement.names, imported(statement, package), strict=True):
            top = alias.name.partition(".")[0]
            if isinstance(statement, ast.ImportFrom):
                pairs += self._of_attribute(base, alias)
            elif alias.asname or top == alias.name:
                pairs.append((alias.asname or top, Origin(alias.name, None, self.find(alias.name))))
            else:
                dotted = Origin(alias.name, None, self.find(alias.name), exact=False)
                pairs += [(top, Origin(top, None, self.find(top))), (top, dotted)]
        return pairs

    def submodule(self, path: Path, name: str) -> Path | None:
        """The module `name` of the package whose __init__.py is `path`."""
        if path.name != "__init__.py":
            return None
        return _below(path.parent, name)

    def package(self, path: Path) -> str:
        """The dotted package that relative imports in this file start from."""
        return ".".join(path.relative_to(self._root(path)).parts[:-1])

    def parents(self, path: Path) -> list[Path]:
        """The __init__.py of each package around a module, outermost first: importing the module runs them."""
        folders = [f for f in path.parents if f.is_relative_to(self._root(path)) and f != self._root(path)]
        return [f / "__init__.py" for f in reversed(folders) if (f / "__init__.py").is_file()]

    def sources(self) -> Iterator[Path]:
        """Every Python file of the project, hidden folders and environments left out."""
        for folder, inner, files in os.walk(self.project):
            inner[:] = sorted(i for i in inner if not i.startswith(".") and not is_foreign_folder(Path(folder, i)))
            yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))

    def _of_attribute(self, base: str, alias: ast.alias) -> list[tuple[str, Origin]]:
        name = alias.asname or alias.name
        submodule = ".".join(part for part in (base, alias.name) if part)
        path = self.find(base)
        inner = None
        if path is not None or not base or any(r.joinpath(*base.split(".")).is_dir() for r in self._roots):
            inner = self.find(submodule)
        if inner is None:
            return [(name, Origin(base, alias.name, path))]
        pairs = [(name, Origin(submodule, None, inner))]
        if path is not None:
            pairs.append((name, Origin(base, alias.name, path, exact=False)))
        return pairs

    def _root(self, path: Path) -> Path:
        holding = [r for r in [*self._roots, self.project] if path.is_relative_to(r)]
        return max(holding, key=lambda r: len(r.parts))

    def _widen(self, top: str) -> bool:
        """Whether an installed module is the project's own after all: an editable install, or PYTHONPATH."""
        if not top or top in self._looked_up or top in sys.stdlib_module_names:
            return False
        self._looked_up.add(top)
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
            return False
        if spec is None or not (spec.has_location or spec.submodule_search_locations):
            return False
        places = list(spec.submodule_search_locations or ())
        if spec.has_location and spec.origin:
            places.append(spec.origin)
        roots = [Path(p).resolve().parent for p in places if p]
        new = [r for r in roots if is_own_folder(r, self.project) and r not in self._roots and _below(r, top)]
        self._roots += new
        return bool(new)


def imported(statement: ast.Import | ast.ImportFrom, package: str) -> list[tuple[str, str | None]]:
    """What an import statement in a module of `package` names: the absolute module, and what is taken from it."""
    if isinstance(statement, ast.Import):
        return [(alias.name, None) for alias in statement.names]
    parts: list[str] = []
    if package and statement.level:
        parts = package.split(".")
        parts = parts[: len(parts) - statement.level + 1]  # one level is the package itself
    if statement.module:
        parts.append(statement.module)
    return [(".".join(parts), alias.name) for alias in statement.names]


def _below(root: Path, module: str) -> Path | None:
    # Thousands of names are looked up for one key: Path would take most of the time.
    base = os.path.join(root, *module.split("."))  # noqa: PTH118
    # In the interpreter's order: a package hides a module of the same name.
    for candidate in (f"{base}{os.sep}__init__.py", f"{base}.py"):
        if os.path.isfile(candidate):  # noqa: PTH113
            return Path(candidate)
    return None
