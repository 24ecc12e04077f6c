"""What each hook of the user's task depends on, found by syntax tree, so that editing metric() never retrains.

A hook's fingerprint covers its own definition, the top-level names of the project's modules it reaches, where its
installed imports come from, statements that run on import, and what it names in a string: the content of files, also
by a pattern, and modules of the project by their dotted name.
Layout, comments, docstrings and names it doesn't reach change nothing. Where the text can't tell what is reached,
more counts, never less: the whole file (`globals()`, `import *`, a module passed as a value), or every file of the
project (`importlib`, `exec`, `sys.path`, a pickle). The reason is kept for `pipe explain`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from layerline.pipeline.errors import TaskError
from layerline.pipeline.files import Hasher
from layerline.pipeline.inputs.untrusted import storable
from layerline.pipeline.keys import canonical, syntax, syntax_queries
from layerline.pipeline.keys.imports import Finder, Origin
from layerline.pipeline.keys.patterns import has_wildcard, matches, size_and_time

# Built-ins that reach any name of the module they are used in.
_ANY_NAME = frozenset({"globals", "locals", "vars"})
# Built-ins, modules and attributes that reach any module.
_ANY_MODULE_BUILT_INS = frozenset({"__import__", "eval", "exec"})
_ANY_MODULE = frozenset(
    {
        *("builtins", "cloudpickle", "dill", "hydra", "imp", "importlib", "joblib", "jsonargparse", "pickle"),
        *("pkgutil", "pydoc", "runpy", "shelve", "zipimport"),
    }
)
_ANY_MODULE_MEMBERS = frozenset({"__globals__", "f_globals", "read_pickle", "allow_pickle=True", "weights_only=False"})
_ANY_MODULE_PARTS = {
    "gc": frozenset({"get_objects", "get_referrers"}),
    "inspect": frozenset({"getmodule", "stack", "trace"}),
    "sys": frozenset({"meta_path", "modules", "path", "path_hooks"}),
    "torch": frozenset({"hub", "package"}),
    "torch.hub": frozenset({"help", "list", "load"}),
}
# Passed on as a value, these give away every module; others are too often imported only to see if they are there.
_ANY_MODULE_VALUES = frozenset({"inspect", "sys"})
# Their files are no data: what Layerline and git keep, and what the kernel makes up when it is read.
_NO_DATA = (".git", ".layerline", "/dev", "/proc", "/sys")
# A string that may be a module's name, or that of something in it: `nets`, `nets.build`, `nets.small:build`.
_DOTTED = re.compile(r"[^\W\d]\w*(\.\w+)*(:\w+(\.\w+)*)?")
# Of the files that one pattern matches, so many count by content, and the rest by name, size and time.
_MATCHES = 10_000
# Functions that look for files by a pattern, in one folder and in all below it.
_SEARCHES = frozenset({"glob", "glob1", "iglob"})
_DEEP_SEARCHES = frozenset({"fnmatch", "fnmatchcase", "fwalk", "rglob", "walk"})
_MATCHED_FOLDERS = 1_000
# A choice in a pattern, as some readers know it: `*.{csv,txt}`.
_BRACES = re.compile(r"\{[^{}]*,[^{}]*\}")


@dataclass(frozen=True)
class Fingerprint:
    """A hook's digest and what went into it.

    Attributes:
        digest: SHA-256 in hex; "absent" when the task doesn't define the hook.
        reached: `file:name` of every definition that counts.
        whole: files that count whole, with the reason.
        files: data files named in the code, with their content's digest.
        folders: folders named in the code; files in them count only where the code or `data:` names them.
        paths: where those of `files` lie that count by content.
        function: whether the hook is surely a function: nothing but `def` at the top level binds its name.
    """

    digest: str
    reached: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    paths: Mapping[str, Path] = field(default_factory=dict, repr=False, compare=False)
    function: bool = False


ABSENT = Fingerprint("absent")
_SHALLOWER = "write long sums and lists of operators as a loop, or read them from a file"


class Reader:
    """Fingerprints the hooks of one task file, parsing each module of the project once.

    Args:
        task: the task file.
        hasher: for data files that the code names.
        project: the project's folder; that of the task when not given.
    """

    def __init__(self, task: Path, hasher: Hasher, project: Path | None = None) -> None:
        project = project or task.parent
        # A link keeps the name it has in the project, wherever it leads.
        self.root, self.hasher = project.resolve(), hasher
        self.task = self.root / task.relative_to(project)
        self.finder = Finder(self.root, self.task.parent)
        self._modules: dict[Path, syntax.Module] = {}

    def hook(self, name: str) -> Fingerprint:
        """The fingerprint of one hook.

        Raises:
            TaskError: a file of the project doesn't parse; names file and line.
        """
        if not self.task.is_file():
            return ABSENT  # a project that starts from a file needs no task; a stage that needs one says so
        try:
            with _deep_recursion():
                module = self.module(self.task)
                found = _Walk(self).run(name)
        except RecursionError as error:
            raise TaskError(
                f"what {name}() reaches is nested too deeply", where=self.relative(self.task), hint=_SHALLOWER
            ) from error
        defined = name in module.bindings or name in module.imports or module.stars
        return found if defined or self.relative(self.task) in found.whole else ABSENT

    def module(self, path: Path) -> syntax.Module:
        if path not in self._modules:
            try:
                self._modules[path] = syntax.parse(path, self.finder)
            except (RecursionError, MemoryError) as error:  # Python itself can't compile it either
                raise TaskError("it is nested too deeply", where=self.relative(path), hint=_SHALLOWER) from error
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", None)
                what = error.msg if isinstance(error, SyntaxError) else str(error)
                place = self.relative(path) + (f":{line}" if line else "")
                raise TaskError(f"it is not valid Python: {what}", where=place) from error
        return self._modules[path]

    def imported_as_read(self, imported: Mapping[Path, str]) -> str:
        """The first file that was imported with other bytes than were read here; empty where there is none."""
        for path, digest in imported.items():
            if path in self._modules and self._modules[path].digest != digest:
                return self.relative(path)
        return ""

    @cached_property
    def sources(self) -> list[Path]:
        """Every Python file of the project."""
        return list(self.finder.sources())

    def relative(self, path: Path) -> str:
        """A path as it is told: below the project's folder, never absolute."""
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
    """One traversal from a hook: collects what is reached, each definition once."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.finder = reader, reader.finder
        self.parts: dict[str, str] = {}
        self.whole: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.paths: dict[str, Path] = {}
        self._seen: set[tuple[Path, str]] = set()
        self._pending: list[tuple[syntax.Module, str]] = []
        self._imported: dict[Path, None] = {}
        self._counted: set[Path] = set()
        self._order: dict[Path, set[tuple[int, int, str]]] = {}
        self._strings: set[str] = set()
        self._looked_up: set[tuple[Path, str]] = set()
        self._places: dict[Path, None] = {reader.root: None}
        self._named: dict[Path, None] = {}
        self._matched: dict[Path, None] = {}
        self._searches: set[str] = set()
        self._read_as_modules: set[str] = set()
        self._expanded: set[tuple[Path, str, bool]] = set()

    def run(self, hook: str) -> Fingerprint:
        self._import(self.reader.task)
        self._name(self.reader.module(self.reader.task), hook)
        self._settle()
        # A file that counts whole already covers its own parts.
        counted = {self.reader.relative(p) for p in self._counted}
        reached = tuple(sorted(p for p in self.parts if p.split(":")[0] not in counted))
        digest = canonical.digest({"parts": self.parts, "files": self.files, "order": self._sequence()})
        folders = tuple(sorted(self.reader.relative(f) for f in self._named))
        whole, files = dict(sorted(self.whole.items())), dict(sorted(self.files.items()))
        bound = self.reader.module(self.reader.task).bindings.get(hook, ())
        function = bool(bound) and all(isinstance(s, syntax_queries.FUNCTIONS) for s in bound)
        return Fingerprint(digest, reached, whole, files, folders, self.paths, function)

    def _settle(self) -> None:
        """Adds what only the whole picture shows, until nothing more turns up."""
        size = -1
        self._follow()
        while size != (size := sum(len(found) for found in self._found())):
            modules = [self.reader.module(p) for p in self._imported]
            if any(m.registers for m in modules):
                for module in modules:
                    self._all(module.path, "a metaclass, __init_subclass__ or __subclasses__ may find its classes")
            for text in sorted(self._strings):
                self._module(text)
                for folder in [*self._places, *self._named, *self._matched]:
                    self._file(folder, text)
                    self._pattern(folder, text)
            self._follow()

    def _found(self) -> tuple[Sized, ...]:
        return self.parts, self.files, self._strings, self._places, self._named, self._matched, self._searches

    def _sequence(self) -> dict[str, list[str]]:
        """What counts, in the order in which it runs on import, for each file in which that order can matter."""
        eventful = any(self.reader.module(p).effects for p in self._imported)
        rebound = {path for path, name in self._seen if self.reader.module(path).is_rebound(name)}
        found = {}
        for path in self._imported if eventful else sorted(rebound):
            labels = [label for *_, label in sorted(self._order.get(path, ()))]
            found[self.reader.relative(path)] = [n for n in labels if eventful or not n.startswith("import ")]
        return found

    def _import(self, path: Path) -> None:
        """Importing a module runs the packages around it, the modules it imports, and its statements with an effect."""
        if path in self._imported:
            return
        module = self.reader.module(path)
        self._imported[path] = None
        self._places[path.parent] = None
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
        """A top-level name counts; it is looked at when its turn comes, for a chain of calls may be long."""
        if (module.path, name) not in self._seen:
            self._seen.add((module.path, name))
            self._pending.append((module, name))

    def _follow(self) -> None:
        while self._pending:
            self._definition(*self._pending.pop())

    def _definition(self, module: syntax.Module, name: str) -> None:
        rebound = module.is_rebound(name)
        for statement in module.imported_by.get(name, ()) if rebound else ():
            self._runs(module, statement, f"{name} by {ast.unparse(statement)}")
        for index, statement in enumerate(module.bindings.get(name, ())):
            label = name if index == 0 else f"{name} #{index}"
            if rebound or syntax_queries.runs_when_defined(statement):
                self._runs(module, statement, label)
            self._statement(module, label, statement)
        for origin in module.imports.get(name, ()):
            self._origin(module, name, origin, set())

    def _statement(self, module: syntax.Module, label: str, statement: ast.stmt) -> None:
        self.parts[f"{self.reader.relative(module.path)}:{label}"] = module.dump(statement)
        seen, inner = self._uses(module, statement, label), syntax.imports(statement, module, self.finder)
        for name in seen.names():
            for origin in [*inner.pop(name, ()), *module.imports.get(name, ())]:
                self._origin(module, name, origin, seen.taken_from(name))
            if name in module.bindings or module.is_rebound(name):
                self._name(module, name)
        for name, origins in inner.items():  # imported here, used elsewhere: a block such as try/except ImportError
            for origin in origins:
                self._origin(module, name, origin, set())

    def _runs(self, module: syntax.Module, statement: ast.stmt, label: str) -> None:
        self._order.setdefault(module.path, set()).add((statement.lineno, statement.col_offset, label))

    def _uses(self, module: syntax.Module, tree: ast.AST, label: str) -> syntax_queries.Uses:
        """What a tree refers to; what can't be followed from it is taken whole."""
        seen = module.uses(tree)
        self._refers(seen)
        built_ins = {n for n in seen.bare if n not in module.bindings}
        for name in sorted(built_ins & _ANY_NAME):
            self._all(module.path, f"{label} uses {name}")
        for name in sorted((built_ins & _ANY_MODULE_BUILT_INS) | (seen.members & _ANY_MODULE_MEMBERS)):
            self._everything(module, f"{label} uses {name}")
        return seen

    def _origin(self, module: syntax.Module, name: str, origin: Origin, attributes: set[str]) -> None:
        """Follows an imported name of which only `attributes` are used; all of it when there are none."""
        self.parts[f"{self.reader.relative(module.path)}:import {name} from {origin.module}"] = str(origin.attribute)
        dotted = f"{origin.module}.{origin.attribute}" if origin.attribute else origin.module
        if (binary := self.finder.compiled(dotted)) is not None:
            self._counts(self.reader.relative(binary), binary)
        if origin.path is None:
            self._installed(module, origin, attributes)
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

    def _installed(self, module: syntax.Module, origin: Origin, attributes: set[str]) -> None:
        taken = {origin.attribute} if origin.attribute else attributes
        if origin.module.split(".")[0] in _ANY_MODULE:
            self._everything(module, f"it uses {origin.module}")
            return
        telling = taken & _ANY_MODULE_PARTS.get(origin.module, frozenset())
        if telling or (not taken and origin.module in _ANY_MODULE_VALUES):
            self._everything(module, f"it uses {origin.module}.{min(telling, default='*')}")

    def _attribute(self, path: Path, name: str, *, surely: bool = True) -> None:
        target = self.reader.module(path)
        if name in target.bindings or name in target.imports:
            self._name(target, name)
        elif (inner := self.finder.submodule(path, name)) is None:
            self._all(path, f"it defines no {name} that its text shows")
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
        seen = self._uses(module, module.tree, "it")
        for name, origins in syntax.imports(module.tree, module, self.finder).items():
            for origin in origins:
                self._origin(module, name, origin, set() if origin.path else seen.taken_from(name))

    def _everything(self, module: syntax.Module, reason: str) -> None:
        """Every Python file of the project counts: any of them may be reached."""
        self.whole.setdefault(self.reader.relative(module.path), f"{reason}, and so does every Python file here")
        for path in self.reader.sources:
            if path not in self._counted:
                self._counted.add(path)
                self._text(path)

    def _text(self, path: Path) -> None:
        try:
            tree = self.reader.module(path).tree
        except TaskError:  # never meant for this Python: its bytes count
            self._counts(self.reader.relative(path), path)
        else:
            self.parts[f"{self.reader.relative(path)}:*"] = syntax_queries.dump(tree)
            self._refers(syntax_queries.uses(tree))

    def _refers(self, seen: syntax_queries.Uses) -> None:
        self._strings |= seen.strings
        self._searches |= seen.all() & (_SEARCHES | _DEEP_SEARCHES)

    def _module(self, text: str) -> None:
        """A string that reads as a dotted name: each module of the project on its way counts whole."""
        if len(text.encode("utf-8", "replace")) > 200 or text in self._read_as_modules:
            return
        if not _DOTTED.fullmatch(text):
            return
        self._read_as_modules.add(text)
        parts = text.replace(":", ".").split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if (path := self.finder.find(name)) is not None:
                self._script(path)
            if (binary := self.finder.compiled(name)) is not None:
                self._counts(self.reader.relative(binary), binary)

    def _script(self, path: Path) -> None:
        try:
            self._all(path, "a string names it")
        except TaskError:  # never meant for this Python, or what it imports isn't: its bytes count
            self._counts(self.reader.relative(path), path)

    def _pattern(self, folder: Path, text: str) -> None:
        """A string with wildcards: the files it matches in the project count, as do those that come and go."""
        deep = bool(self._searches & _DEEP_SEARCHES)
        text = _BRACES.sub("*", text).strip("/")  # f"{folder}/*.txt" leaves "/*.txt"
        parts = text.split("/")
        if not has_wildcard(text) or len(text) > 255 or not text.isprintable():
            return
        if not self._searches and not text.strip("*?/") and folder in self._places:
            return  # print("*")
        key = (folder, text, deep)
        if key in self._expanded:
            return
        self._expanded.add(key)
        found = matches(folder, ["**", *parts] if deep and parts[0] != "**" else parts, self.reader.root)
        for path in islice(found, _MATCHES):
            self._match(path)
        rest = [(self.reader.relative(path), *size_and_time(path)) for path in found]
        if rest:
            self.files[f"{len(rest)} more files that {text} matches"] = canonical.digest(sorted(rest))

    def _match(self, path: Path) -> None:
        if self.reader.relative(path) in self.files:
            return
        with suppress(OSError):  # gone again, or not ours to read
            if path.is_file():
                self._data(path)
            elif path.is_dir() and path not in self._places and len(self._matched) < _MATCHED_FOLDERS:
                self._matched[path] = None

    def _file(self, folder: Path, text: str) -> None:
        """A string that names a file: its content counts. One that names a folder is a place to look for more files."""
        if (folder, text) in self._looked_up or len(text) > 255 or not text.strip("./"):
            return
        self._looked_up.add((folder, text))
        for name in dict.fromkeys((text, text.lstrip("/"))):  # f"{folder}/train.npy" leaves "/train.npy"
            path = Path(os.path.normpath(folder / name))
            if any(path.is_relative_to(p) or p in path.parts for p in _NO_DATA):
                continue
            with suppress(OSError):  # no name of a file after all: too long, or not ours to read
                if path.is_file():
                    self._data(path)
                elif path.is_dir() and path.is_relative_to(self.reader.root) and path not in self._places:
                    self._named[path] = None

    def _counts(self, name: str, path: Path) -> None:
        """A file's content counts."""
        self.files[name], self.paths[name] = self.reader.hasher.file(path), path

    def _data(self, path: Path) -> None:
        if not path.is_relative_to(self.reader.root):
            place = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
            self._counts(f"{path.name} outside the project ({place[:8]})", path)
        elif path.suffix != ".py":
            self._counts(self.reader.relative(path), path)
        else:
            self._script(path)
