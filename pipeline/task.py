"""Imports and calls the user's task.py. An error in it is reported as the user's, with its line."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from layerline.pipeline import process_env
from layerline.pipeline.errors import PipeError, TaskError, machine_lacks, ran_out_of_memory, words
from layerline.pipeline.folders import is_own_folder
from layerline.pipeline.outline import outlined

# Project folders whose modules are imported by `_Source` in this process.
_HOOKED: set[Path] = set()

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
# Names of the arguments that an error tells.
_ARGUMENTS = {"loss": ("model", "batch"), "metric": ("outputs", "targets"), "show": ("sample",)}
HOOKS = ("model", "train_data", "loss", "eval_data", "metric", "calib_data", "example_inputs", "teacher", "show")
# Hooks that give data: they may read files of the project, and are called once where they can be.
EXAMPLE_HOOKS = ("example_inputs", "eval_data", "train_data", "calib_data")
"""Hooks that can give the model's example inputs, the preferred one first."""
DATA_HOOKS = frozenset({"train_data", "eval_data", "calib_data", "example_inputs"})


class _Source(SourceFileLoader):
    """Compiles a module each time it is imported.

    A bytecode cache goes by size and mtime in whole seconds: after a quick edit it would run yesterday's code.
    """

    # Where imports are recorded: the `imported` of the task that was used last.
    record: ClassVar[dict[Path, str]] = {}

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        _Source.record[Path(path)] = hashlib.sha256(source).hexdigest()
        code: CodeType = self.source_to_code(source, path)
        return code


class Task:
    """Hooks are plain functions at the top level of the file; each is optional until a stage calls it.

    The file is imported on the first call, not before: planning and cached runs never run user code. `loaded` is called
    right after that, before any hook runs. The file's folder is put on sys.path, so that it can import its neighbours.
    """

    def __init__(self, path: Path, root: Path | None = None, loaded: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.root = root or path.parent
        self._loaded = loaded
        self.imported: dict[Path, str] = {}  # SHA-256 of each module of the project that was imported for this task
        self._module: ModuleType | None = None

    def has(self, hook: str) -> bool:
        """Whether the task defines `hook`."""
        return callable(self.get_raw(hook))

    def get_raw(self, hook: str) -> Any:
        """What the file calls by that name; None where it defines nothing so called."""
        return getattr(self._load(), hook, None)

    def call(self, hook: str, *args: Any) -> Any:
        """Calls a hook. Raises TaskError where it is missing or raised, with the line in the user's file."""
        return self.get(hook)(*args)

    def get(self, hook: str) -> Callable[..., Any]:
        """The hook as a function whose exceptions become TaskErrors that name it."""
        function = self.get_raw(hook)
        if not callable(function):
            raise TaskError(
                f"this stage needs the hook {hook}(), which {self.path.name} does not define",
                where=self.path.name,
                hint=f"add `def {hook}(…)` to {self.path.name}",
            )

        def guarded(*args: Any) -> Any:
            with self.blaming(f"{hook}()", arguments=lambda: dict(zip(_ARGUMENTS.get(hook, ()), args, strict=False))):
                return function(*args)

        return guarded

    @contextmanager
    def blaming(
        self, what: str, on: Callable[[], str] | None = None, arguments: Callable[[], dict[str, Any]] = dict
    ) -> Iterator[None]:
        """The border to the user's code: what `what` raises becomes a TaskError with the line in the user's files.

        `on` describes what it was called with, in few words; `arguments` gives that of a hook by name.
        """
        try:
            yield
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # GeneratorExit and what is derived from BaseException alone included
            process_env.put_right()
            if _is_ours(error):
                raise
            if ran_out_of_memory(error):
                raise machine_lacks(MemoryError()) from error
            called_with = ""
            if on is not None:
                called_with = f" on {on()}"
            named = [f"{name}: {outlined(value)}" for name, value in arguments().items()]
            if named:
                called_with = f"; it was called with {', '.join(named)}"
            raise self._blame(what, error, called_with) from error
        self._refuse_settings(what)

    def _refuse_settings(self, what: str) -> None:
        complaint = process_env.put_right()
        if complaint is not None:
            raise TaskError(f"{what} {complaint[0]}", where=self.path.name, hint=complaint[1])

    def _load(self) -> ModuleType:
        _Source.record = self.imported  # hooks import further modules when they run
        if self._module is not None:
            return self._module
        if not self.path.is_file():
            raise no_task_file(str(self.path))
        _put_first_on_path(self.path.parent.resolve())
        file = self.path.parent.resolve() / self.path.name  # a link keeps its name and its neighbours
        spec = importlib.util.spec_from_loader("layerline_task", _Source("layerline_task", str(file)))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs: dataclasses, pickling and data loader workers look the module up by name.
        sys.modules[spec.name] = module
        with self.blaming("importing it"):
            spec.loader.exec_module(module)
        self._loaded()
        self._module = module
        return module

    @contextmanager
    def border(self) -> Iterator[None]:
        """Around a stage: what the project's code raises outside of hooks, as in forward(), becomes a TaskError."""
        try:
            yield
        except (OSError, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:
            process_env.put_right()
            if _is_ours(error) or not self._frame(
                [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
            ):
                raise
            raise self._blame("code of the project", error, "") from error
        self._refuse_settings("code of the project")

    def _frame(self, frames: Sequence[tuple[str, Any]]) -> str:
        """The innermost of the project's own lines on the way, as file:line; empty where there is none."""
        root, where = self.path.parent.resolve(), ""
        for name, line in frames:
            file = Path(name)
            if file.is_absolute() and is_own_folder(file.resolve().parent, root):
                where = f"{file.resolve().relative_to(root)}:{line}"
        return where

    def _blame(self, what: str, error: BaseException, on: str) -> TaskError:
        text = words(error)
        # The innermost line of the project, not of torch, is where the user can do something.
        frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        if "Original Traceback" in text:  # of a loader's worker process: its frames are in the text alone
            frames += _FRAME.findall(text)
            text = text.strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
        where = self._frame(frames) or self.path.name
        if isinstance(error, SyntaxError) and isinstance(error.lineno, int):
            where = f"{Path(str(error.filename or self.path)).name}:{error.lineno}"
        hint = "run again with --debug for the traceback"
        if GUARD.hidden and isinstance(error, ImportError | AttributeError):
            names = ", ".join(sorted(path.name for path in GUARD.hidden))
            hint = f"not imported, since an installed module has its name: {names}; rename it"
        return TaskError(f"{what} raised {type(error).__name__}: {text}{on}", where=where, hint=hint)


def no_task_file(where: str) -> TaskError:
    """The error of a project without its task file."""
    return TaskError(
        "there is no such task file", where=where, hint="create it, or name another with `task:` in pipe.yaml"
    )


def _is_ours(error: BaseException) -> bool:
    """Whether it is an error of Layerline's; a class of the user's own may have any exit code, and any text."""
    return isinstance(error, PipeError) and str(type(error).__module__).startswith("layerline.")


def _put_first_on_path(folder: Path) -> None:
    """Makes a project's modules importable as they are now, whatever this process imported before."""
    for name, module in list(sys.modules.items()):
        if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Source):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    GUARD.protect(folder)
    # Finders keep what they saw in a folder; files may have come since.
    for entry in [e for e in sys.path_importer_cache if is_own_folder(Path(e), folder)]:
        del sys.path_importer_cache[entry]
    if folder not in _HOOKED:
        _HOOKED.add(folder)
        sys.path_hooks.insert(0, partial(_finder, folder))


def _finder(folder: Path, entry: str) -> FileFinder:
    if not is_own_folder(Path(entry), folder):
        raise ImportError("for the interpreter's own finder", path=entry)
    return FileFinder(entry, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Source, SOURCE_SUFFIXES))


_OURS = "layerline"
_DISTRIBUTION = re.compile(r"[A-Za-z0-9._-]+")


class ModuleNameGuard(MetaPathFinder):
    """Keeps a project's `queue.py` or `onnx.py` from hiding the module of that name that torch or Layerline imports.

    The project's folder comes first on the import path. For such names the installed module is imported anyway.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.hidden: set[Path] = set()  # files that are not imported, since an installed module has their name

    def protect(self, folder: Path) -> None:
        """Guards against the modules of a project's folder from now on, and no longer against those of another."""
        self._folder, self.hidden = folder, set()
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002  the protocol's
    ) -> ModuleSpec | None:
        """The installed module where the project has one of its name that must not hide it; else None."""
        if path is not None or self._folder is None:
            return None
        own = PathFinder.find_spec(fullname, [str(self._folder)])
        if own is None or own.loader is None or own.origin is None:  # none, or a folder that hides nothing
            return None
        others = [e for e in sys.path if not is_own_folder(Path(e or ".").resolve(), self._folder)]
        installed = PathFinder.find_spec(fullname, others)
        if installed is None or installed.loader is None:
            return None
        if fullname not in sys.stdlib_module_names and fullname not in _needed():
            return None
        self.hidden.add(Path(own.origin))
        return installed


GUARD = ModuleNameGuard()


@cache
def _needed() -> frozenset[str]:
    """Top-level modules of Layerline's distribution, of what it requires, and of what that requires."""
    # Requirements of requirements too: torch imports networkx, which must not be the project's.
    wanted, pending = {_OURS}, [_OURS]
    while pending:
        name = pending.pop()
        requirements: list[str] = []
        with suppress(metadata.PackageNotFoundError):  # required on another platform, or for an extra not installed
            requirements = metadata.requires(name) or []
        for requirement in requirements:
            needed = _normal(requirement)
            optional = "extra" in requirement.partition(";")[2]
            if needed not in wanted and (name == _OURS or not optional):
                wanted.add(needed)
                pending.append(needed)
    owned = metadata.packages_distributions().items()
    return frozenset({_OURS, *(module for module, owners in owned if not wanted.isdisjoint(map(_normal, owners)))})


def _normal(requirement: str) -> str:
    name = _DISTRIBUTION.match(requirement)
    if name is None:
        return ""
    return re.sub(r"[-_.]+", "-", name[0]).lower()
