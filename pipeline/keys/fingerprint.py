"""What each hook of the user's task depends on, read from the syntax tree, so that editing metric() never retrains.

A hook's fingerprint covers:
- its own definition, and the top-level names that it reaches in the project's modules;
- where its installed imports come from;
- the statements that run when these modules are imported;
- what its strings name: the content of files, the files that a pattern matches, and modules by their dotted name.

Layout, comments, docstrings and unreached names change nothing. Where the text doesn't show what is reached, more
counts, never less: the whole file (`globals()`, `import *`, a module passed as a value), or every Python file of the
project (`importlib`, `exec`, `sys.path`, a pickle). `pipe explain` shows the reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from layerline.pipeline.errors import TaskError
from layerline.pipeline.hashing import Hasher
from layerline.pipeline.keys import canonical, syntax, trees
from layerline.pipeline.keys.imports import Finder, Origin
from layerline.pipeline.keys.named_files import NamedFiles
from layerline.pipeline.untrusted import storable

# Built-ins that reach any name of the module they are used in.
_ANY_NAME = frozenset({"globals", "locals", "vars"})
# Built-ins, modules and attributes that reach any module. A pickle names the classes of what it holds.
_ANY_MODULE_BUILT_INS = frozenset({"__import__", "eval", "exec"})
_ANY_MODULE = frozenset(
    {
        *("builtins", "imp", "importlib", "pkgutil", "runpy", "zipimport"),
        *("cloudpickle", "dill", "joblib", "pickle", "shelve"),
    }
)
_ANY_MODULE_MEMBERS = frozenset(
    {"__globals__", "__path__", "f_globals", "read_pickle", "allow_pickle=True", "weights_only=False"}
)
# Names of functions that look something up by its dotted name, whichever library they belong to.
_LOOKS_UP = re.compile(r"instantiate|locate|import_\w+")
_ANY_MODULE_PARTS = frozenset(
    {
        *("gc.get_objects", "gc.get_referrers", "inspect.getmodule", "inspect.stack", "inspect.trace"),
        *("site.addpackage", "site.addsitedir"),
        *("sys.meta_path", "sys.modules", "sys.path", "sys.path_hooks", "torch.hub", "torch.package"),
        *("torch.hub.help", "torch.hub.list", "torch.hub.load"),
    }
)
# Passed on as a value, these give away every module; others are too often imported only to see if they are there.
_ANY_MODULE_VALUES = frozenset({"inspect", "sys"})
# A string that may be a module's name, or that of something in it: `nets`, `nets.build`, `nets.small:build`.
_DOTTED = re.compile(r"[^\W\d]\w*(\.\w+)*(:\w+(\.\w+)*)?")


@dataclass(frozen=True)
class Fingerprint:
    """A hook's digest and what went into it."""

    digest: str  # SHA-256 in hex; "absent" when the task doesn't define the hook
    reached: tuple[str, ...] = ()  # `file:name` of every definition that counts
    whole: Mapping[str, str] = field(default_factory=dict)  # files that count whole, with the reason
    files: Mapping[str, str] = field(default_factory=dict)  # data files named in the code, with their content's digest
    # folders named in the code; files in them count only where the code or `data:` names them
    folders: tuple[str, ...] = ()
    # where those of `files` lie that count by content
    paths: Mapping[str, Path] = field(default_factory=dict, repr=False, compare=False)
    function: bool = False  # whether the hook is surely a function: nothing but `def` at the top level binds its name


ABSENT = Fingerprint("absent")
_SHALLOWER = "write long sums and lists of operators as a loop, or read them from a file"


class Reader:
    """Fingerprints the hooks of one task file of a project, parsing each of its modules once."""

    def __init__(self, task: Path, hasher: Hasher, project: Path | None = None) -> None:
        project = project or task.parent
        # A link keeps the name it has in the project, wherever it leads.
        self.root = project.resolve()
        self.hasher = hasher
        self.task = self.root / task.relative_to(project)
        self.finder = Finder(self.root, [self.task.parent])
        # Those that were read, without and with docstrings.
        self._modules: dict[tuple[Path, bool], syntax.Module] = {}
        self._keeps_docstrings = False
        self._reads_docstrings = False  # whether a file that the current walk reached reads docstrings

    def hook(self, name: str) -> Fingerprint:
        """The fingerprint of one hook. Raises TaskError: a file of the project doesn't parse; names file and line."""
        if not self.task.is_file():
            return ABSENT  # a project that starts from a file needs no task; a stage that needs one says so
        try:
            with _deep_recursion():
                self._keeps_docstrings = self._reads_docstrings = False
                fingerprint = _Walk(self).run(name)
                if self._reads_docstrings:
                    # They may be those of other files, so all count.
                    self._keeps_docstrings = True
                    fingerprint = _Walk(self).run(name)
                module = self.module(self.task)
        except RecursionError as error:
            raise TaskError(
                f"what {name}() reaches is nested too deeply", where=self.relative(self.task), hint=_SHALLOWER
            ) from error
        is_defined = name in module.bindings or name in module.imports or module.stars
        # A file that counts whole may define the hook in a way that its text doesn't show.
        if is_defined or self.relative(self.task) in fingerprint.whole:
            return fingerprint
        return ABSENT

    def module(self, path: Path) -> syntax.Module:
        """A file of the project, parsed once. Raises TaskError: it doesn't parse; names file and line."""
        key = (path, self._keeps_docstrings)
        if key not in self._modules:
            self._modules[key] = self._parse(path)
        module = self._modules[key]
        self._reads_docstrings |= module.reads_docstrings
        return module

    def _parse(self, path: Path) -> syntax.Module:
        where = self.relative(path)
        try:
            return syntax.parse(path, self.finder, docstrings=self._keeps_docstrings)
        except (RecursionError, MemoryError) as error:  # Python itself can't compile it either
            raise TaskError("it is nested too deeply", where=where, hint=_SHALLOWER) from error
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            message = getattr(error, "msg", error)
            if line:
                where = f"{where}:{line}"
            raise TaskError(f"it is not valid Python: {message}", where=where) from error

    def was_edited(self, path: Path, digest: str) -> bool:
        """Whether a file was read here with other bytes than those of this SHA-256."""
        versions = [self._modules[key] for key in ((path, False), (path, True)) if key in self._modules]
        return any(module.digest != digest for module in versions)

    @cached_property
    def sources(self) -> list[Path]:
        """Every Python file of the project."""
        return list(self.finder.sources())

    def relative(self, path: Path) -> str:
        """A path as reports and keys hold it: below the project's folder, never absolute."""
        return storable(path.relative_to(self.root).as_posix())


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Room for the deepest tree that Python itself compiles: a sum of three thousand terms."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 10_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class _Walk:
    """One traversal from a hook, which visits each definition once."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.finder = reader.finder
        self.parts: dict[str, str] = {}
        self.whole: dict[str, str] = {}
        self.files = NamedFiles(reader.root, reader.hasher, self._script)
        self._visited: set[tuple[Path, str]] = set()
        self._pending: list[tuple[syntax.Module, str]] = []
        self._imported: dict[Path, None] = {}
        self._counted: set[Path] = set()
        self._order: dict[Path, set[tuple[int, int, str]]] = {}
        self._strings: set[str] = set()
        self._modules_named: set[str] = set()  # strings that were looked up as names of modules

    def run(self, hook: str) -> Fingerprint:
        self._import(self.reader.task)
        self._name(self.reader.module(self.reader.task), hook)
        self._settle()
        # A file that counts whole already covers its own parts.
        counted = {self.reader.relative(p) for p in self._counted}
        bound = self.reader.module(self.reader.task).bindings.get(hook, ())
        return Fingerprint(
            digest=canonical.digest({"parts": self.parts, "files": self.files.digests, "order": self._sequence()}),
            reached=tuple(sorted(part for part in self.parts if part.split(":")[0] not in counted)),
            whole=dict(sorted(self.whole.items())),
            files=dict(sorted(self.files.digests.items())),
            folders=tuple(self.files.named_folders()),
            paths=self.files.paths,
            function=bool(bound) and all(isinstance(statement, trees.FUNCTIONS) for statement in bound),
        )

    def _settle(self) -> None:
        """Looks up strings and subclasses until nothing new is reached: a string may name a module with more."""
        self._follow()
        size_before = -1
        while self._size() != size_before:
            size_before = self._size()
            modules = [self.reader.module(p) for p in self._imported]
            if any(m.registers for m in modules):
                for module in modules:
                    self._all(module.path, "a metaclass, __init_subclass__ or __subclasses__ may find its classes")
            for text in sorted(self._strings):
                self._module(text)
                self.files.look_up(text)
            self._follow()

    def _size(self) -> int:
        """How much the walk holds. It only grows, so an equal size means that nothing was added."""
        return len(self.parts) + len(self._strings) + len(self.files)

    def _sequence(self) -> dict[str, list[str]]:
        """What counts, in the order in which it runs on import, by file."""
        has_effects = any(self.reader.module(p).effects for p in self._imported)
        sequence = {}
        for path in self._imported:
            labels = [label for *_, label in sorted(self._order.get(path, ()))]
            if not has_effects:  # then the order of imports doesn't matter
                labels = [label for label in labels if not label.startswith("import ")]
            sequence[self.reader.relative(path)] = labels
        return sequence

    def _import(self, path: Path) -> None:
        """Importing a module runs the packages around it, the modules it imports, and its statements with an effect."""
        if path in self._imported:
            return
        module = self.reader.module(path)
        self._imported[path] = None
        for name, origins in module.imports.items():
            if any(origin.module == "__future__" for origin in origins):  # it changes how the whole file is compiled
                self.parts[f"{self.reader.relative(path)}:import {name} from __future__"] = "*"
        self.files.add_place(path.parent)
        for around in self.finder.parents(path):
            self._import(around)
        for index, statement in enumerate(module.effects):
            self._runs(module, statement, f"on import #{index}")
            self._statement(module, f"on import #{index}", statement)
        for statement, loaded in module.loads:
            self._runs(module, statement, f"import {self.reader.relative(loaded)}")
            self._import(loaded)
        for star in module.stars:
            self._star(module, star)

    def _star(self, module: syntax.Module, star: Origin) -> None:
        self.parts[f"{self.reader.relative(module.path)}:import * from {star.module}"] = "*"
        if star.path is None:
            return
        self._all(module.path, f"it has `from {star.module} import *`")
        self._all(star.path, "another file imports * from it")
        if star.path.name == "__init__.py":  # __all__ may name modules that it doesn't import itself
            for inner in sorted(star.path.parent.glob("*.py")):
                self._all(inner, "another file imports * from its package")

    def _name(self, module: syntax.Module, name: str) -> None:
        """A top-level name counts. It waits in a list: recursion would limit how long a chain of calls may be."""
        if (module.path, name) not in self._visited:
            self._visited.add((module.path, name))
            self._pending.append((module, name))

    def _follow(self) -> None:
        while self._pending:
            self._definition(*self._pending.pop())

    def _definition(self, module: syntax.Module, name: str) -> None:
        rebound = module.is_rebound(name)
        for statement in module.imported_by.get(name, ()):
            if rebound:
                self._runs(module, statement, f"{name} by {ast.unparse(statement)}")
        for index, statement in enumerate(module.bindings.get(name, ())):
            label = name
            if index:
                label = f"{name} #{index}"
            if rebound or trees.runs_when_defined(statement):
                self._runs(module, statement, label)
            self._statement(module, label, statement)
        for origin in module.imports.get(name, ()):
            self._origin(module, name, origin, set())

    def _statement(self, module: syntax.Module, label: str, statement: ast.stmt) -> None:
        self.parts[f"{self.reader.relative(module.path)}:{label}"] = module.dump(statement)
        uses = self._uses(module, statement, label)
        inner = syntax.imports(statement, module, self.finder)
        for name in uses.names():
            for origin in [*inner.pop(name, ()), *module.imports.get(name, ())]:
                self._origin(module, name, origin, uses.taken_from(name))
            if name in module.bindings or module.is_rebound(name):
                self._name(module, name)
        for name, origins in inner.items():  # imported here, used elsewhere: a block such as try/except ImportError
            for origin in origins:
                self._origin(module, name, origin, set())

    def _runs(self, module: syntax.Module, statement: ast.stmt, label: str) -> None:
        self._order.setdefault(module.path, set()).add((statement.lineno, statement.col_offset, label))

    def _uses(self, module: syntax.Module, tree: ast.Module | ast.stmt, label: str) -> syntax.Uses:
        """What a tree refers to. Where that can't be followed, the whole file or the whole project counts."""
        uses = module.uses(tree)
        self._refers(uses)
        built_ins = {n for n in uses.bare if n not in module.bindings}
        for name in sorted(built_ins & _ANY_NAME):
            self._all(module.path, f"{label} uses {name}")
        lookups = {n for n in uses.members if n in _ANY_MODULE_MEMBERS or _LOOKS_UP.fullmatch(n)}
        for name in sorted((built_ins & _ANY_MODULE_BUILT_INS) | lookups):
            self._everything(module, f"{label} uses {name}")
        return uses

    def _origin(self, module: syntax.Module, name: str, origin: Origin, attributes: set[str]) -> None:
        """Follows an imported name of which only `attributes` are used; all of it when there are none."""
        self.parts[f"{self.reader.relative(module.path)}:import {name} from {origin.module}"] = str(origin.attribute)
        for dotted in dict.fromkeys((origin.module, origin.dotted)):
            binary = self.finder.compiled(dotted)
            if binary is not None:
                self.files.count(binary)
        if origin.path is None:
            if origin.attribute:
                attributes = {origin.attribute}
            dynamic = {n for n in attributes if f"{origin.module}.{n}" in _ANY_MODULE_PARTS or _LOOKS_UP.fullmatch(n)}
            if origin.module.split(".")[0] in _ANY_MODULE:
                self._everything(module, f"it uses {origin.module}")
            elif dynamic or (not attributes and origin.module in _ANY_MODULE_VALUES):
                self._everything(module, f"it uses {origin.module}.{min(dynamic, default='*')}")
            return
        self._import(origin.path)
        if origin.attribute == "*":
            self._star(module, origin)
        elif origin.attribute is not None:
            self._attribute(origin.path, origin.attribute, surely=origin.exact)
        elif attributes and origin.exact:
            for attribute in sorted(attributes):
                self._attribute(origin.path, attribute)
        else:
            self._all(origin.path, f"{self.reader.relative(module.path)} uses the module {name} as a value")

    def _attribute(self, path: Path, name: str, *, surely: bool = True) -> None:
        target = self.reader.module(path)
        if name in target.bindings or name in target.imports:
            self._name(target, name)
            return
        inner = self.finder.submodule(path, name)
        if inner is None:
            self._all(path, f"its text doesn't show where it defines {name}")
        elif surely:
            self._all(inner, f"it is used through its package {path.parent.name}")

    def _all(self, path: Path, reason: str) -> None:
        """The whole file counts, and everything its imports name."""
        if path in self._counted:
            return
        self._counted.add(path)
        self.whole[self.reader.relative(path)] = reason
        module = self.reader.module(path)
        self.parts[f"{self.reader.relative(path)}:*"] = module.dump(module.tree)
        self._import(path)
        uses = self._uses(module, module.tree, "it")
        for name, origins in syntax.imports(module.tree, module, self.finder).items():
            for origin in origins:
                attributes = set() if origin.path else uses.taken_from(name)
                self._origin(module, name, origin, attributes)

    def _everything(self, module: syntax.Module, reason: str) -> None:
        """Any Python file of the project may be reached, so all of them count."""
        self.whole.setdefault(self.reader.relative(module.path), f"{reason}, and so does every Python file here")
        for path in self.reader.sources:
            if path in self._counted:
                continue
            self._counted.add(path)
            try:
                source = self.reader.module(path)
            except TaskError:  # not written for this Python; its bytes count
                self.files.count(path)
            else:
                self.parts[f"{self.reader.relative(path)}:*"] = source.dump(source.tree)
                self._refers(source.uses(source.tree))

    def _refers(self, uses: syntax.Uses) -> None:
        self._strings |= uses.strings
        self.files.add_names({*uses.names(), *uses.members})

    def _module(self, text: str) -> None:
        """A string that reads as a dotted name: each module of the project on its way counts whole."""
        if len(text.encode("utf-8", "replace")) > 200 or not _DOTTED.fullmatch(text) or text in self._modules_named:
            return
        self._modules_named.add(text)
        parts = text.replace(":", ".").split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            path = self.finder.find(name)
            if path is not None:
                self._script(path)
            binary = self.finder.compiled(name)
            if binary is not None:
                self.files.count(binary)

    def _script(self, path: Path) -> None:
        try:
            self._all(path, "a string names it")
        except TaskError:  # it, or what it imports, is not written for this Python; its bytes count
            self.files.count(path)
