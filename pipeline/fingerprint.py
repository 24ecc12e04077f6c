"""What each hook of the user's task depends on, found by syntax tree, so that editing metric() never retrains.

A hook's fingerprint covers its own definition, the top-level names of the project's modules it reaches, where its
installed imports come from, statements that run on import, and the content of project files it names in a string.
Layout, comments, docstrings and names it doesn't reach change nothing. Where the text can't tell what is reached
(`globals()`, `import *`, a module passed as a value), the whole file counts, and the reason is kept for `pipe explain`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layerline.pipeline import canonical, syntax
from layerline.pipeline.errors import TaskError
from layerline.pipeline.files import Hasher


@dataclass(frozen=True)
class Fingerprint:
    """A hook's digest and what went into it.

    Attributes:
        digest: SHA-256 in hex; "absent" when the task doesn't define the hook.
        reached: `file:name` of every definition that counts.
        whole: files that count whole, with the reason.
        files: data files named in the code, with their content's digest.
    """

    digest: str
    reached: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


ABSENT = Fingerprint("absent")


class Reader:
    """Fingerprints the hooks of one task file, parsing each module of the project once."""

    def __init__(self, task: Path, hasher: Hasher) -> None:
        self.task, self.root, self.hasher = task.resolve(), task.resolve().parent, hasher
        self._modules: dict[Path, syntax.Module] = {}

    def hook(self, name: str) -> Fingerprint:
        """The fingerprint of one hook.

        Raises:
            TaskError: a file of the project doesn't parse; names file and line.
        """
        if not self.task.is_file():
            return ABSENT  # a project that starts from a file needs no task; a stage that needs one says so
        module = self.module(self.task)
        if name not in module.bindings and name not in module.imports and not module.stars:
            return ABSENT
        return _Walk(self).run(name)

    def module(self, path: Path) -> syntax.Module:
        if path not in self._modules:
            try:
                self._modules[path] = syntax.parse(path, self.root)
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", None)
                place = path.relative_to(self.root).as_posix() + (f":{line}" if line else "")
                raise TaskError(f"it is not valid Python: {error}", where=place) from error
        return self._modules[path]


class _Walk:
    """One traversal from a hook: collects what is reached, each definition once."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.root = reader, reader.root
        self.parts: dict[str, str] = {}
        self.whole: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self._seen: set[tuple[Path, str]] = set()
        self._imported: set[Path] = set()

    def run(self, hook: str) -> Fingerprint:
        self._import(self.reader.task)
        self._name(self.reader.module(self.reader.task), hook)
        if any(syntax.registers_subclasses(self.reader.module(p).tree) for p in self._imported):
            for path in sorted(self._imported):
                self._all(path, "the project has a metaclass or __init_subclass__, which may register classes by name")
        # A file that counts whole already covers its own parts.
        reached = tuple(sorted(p for p in self.parts if p.split(":")[0] not in self.whole))
        digest = canonical.digest({"parts": self.parts, "files": self.files})
        return Fingerprint(digest, reached, dict(sorted(self.whole.items())), dict(sorted(self.files.items())))

    def _import(self, path: Path) -> None:
        """Importing a module runs its bare statements, and those of the project's modules it imports."""
        if path in self._imported:
            return
        self._imported.add(path)
        module = self.reader.module(path)
        for index, statement in enumerate(module.effects):
            self._statement(module, f"on import #{index}", statement)
        for name, statements in module.bindings.items():
            if any(self._ours(module, d) for s in statements for d in syntax.decorators(s)):
                self._name(module, name)
        for loaded in module.loads:
            self._import(loaded)
        for star in module.stars:
            self._all(path, f"it has `from {star} import *`")
            if (inner := syntax.resolve(star, self.root)) is not None:
                self._all(inner, "another file imports * from it")

    def _ours(self, module: syntax.Module, name: str) -> bool:
        """Whether a name is defined by the project, here or in a module this one imports."""
        return name in module.bindings or any(o.path for o in module.imports.get(name, ()))

    def _name(self, module: syntax.Module, name: str) -> None:
        if (module.path, name) in self._seen:
            return
        self._seen.add((module.path, name))
        for index, statement in enumerate(module.bindings.get(name, ())):
            self._statement(module, name if index == 0 else f"{name} #{index}", statement)
        for origin in module.imports.get(name, ()):
            self._origin(module, name, origin, ())

    def _statement(self, module: syntax.Module, label: str, statement: ast.stmt) -> None:
        self.parts[f"{self._relative(module.path)}:{label}"] = syntax.dump(statement)
        bare, attributes, strings = syntax.loaded_names(statement)
        inner, star = syntax.local_imports(statement, self.root, syntax.package_of(module.path, self.root))
        if star:
            self._all(module.path, f"{label} imports * inside a function")
        for name in sorted((bare & syntax.DYNAMIC) - module.bindings.keys()):
            self._all(module.path, f"{label} uses {name}")
        for name in sorted(bare | {n for n, _ in attributes}):
            used = tuple(sorted(a for n, a in attributes if n == name)) if name not in bare else ()
            for origin in inner.pop(name, ()) or module.imports.get(name, ()):
                self._origin(module, name, origin, used)
            if name in module.bindings:
                self._name(module, name)
        for name, origins in inner.items():  # imported here, used elsewhere: a block such as try/except ImportError
            for origin in origins:
                self._origin(module, name, origin, ())
        for text in sorted(strings):
            self._file(text)

    def _origin(self, module: syntax.Module, name: str, origin: syntax.Origin, attributes: tuple[str, ...]) -> None:
        self.parts[f"{self._relative(module.path)}:import {name} from {origin.module}"] = str(origin.attribute)
        if origin.module.split(".")[0] in syntax.DYNAMIC:
            self._all(module.path, f"it uses {origin.module}")
        if origin.path is None:
            return
        self._import(origin.path)
        if origin.attribute is not None:
            self._attribute(origin.path, origin.attribute)
        elif attributes and origin.exact:
            for attribute in attributes:
                self._attribute(origin.path, attribute)
        else:
            self._all(origin.path, f"{self._relative(module.path)} uses the module {name} as a value")

    def _attribute(self, path: Path, name: str) -> None:
        target = self.reader.module(path)
        if name in target.bindings or name in target.imports:
            self._name(target, name)
        else:
            self._all(path, f"it defines no {name} that its text shows")

    def _all(self, path: Path, reason: str) -> None:
        """The whole file counts, and everything its imports name."""
        relative = self._relative(path)
        if relative in self.whole:
            return
        self.whole[relative] = reason
        module = self.reader.module(path)
        self.parts[f"{relative}:*"] = syntax.dump(module.tree)
        self._import(path)
        for name, origins in module.imports.items():
            for origin in origins:
                self._origin(module, name, origin, ())
        for text in sorted(syntax.loaded_names(module.tree)[2]):
            self._file(text)

    def _file(self, text: str) -> None:
        """A string that names a file of the project: its content counts."""
        if not text or len(text) > 255 or "\n" in text or "\0" in text or text.endswith(".py"):
            return
        path = self.root / text
        if path.is_file() and path.resolve().is_relative_to(self.root):
            self.files[path.resolve().relative_to(self.root).as_posix()] = self.reader.hasher.file(path)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
