"""Projects that start from a file: a model as ONNX, or a checkpoint. The file moves in, with all that belongs to it."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from layerline.pipeline import starter, table, trees
from layerline.pipeline.batches import answers
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.task import HOOKS


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a stage that imports sees in a file before anything is copied.

    Attributes:
        beside: further files that belong to it, relative to its folder.
        whole: arrays of the samples whose rows are whole inputs; with one of them, a batch is one sample.
        numbers: inputs without axes that get the same number in every sample, with that number.
        outputs: how many the model has.
        inputs: their names.
        dims: sizes that vary, each with where it is, in words.
    """

    beside: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    outputs: int = 1
    inputs: tuple[str, ...] = ()
    dims: Mapping[str, str] = field(default_factory=dict)


class Looks(Protocol):
    """A stage that imports."""

    @classmethod
    def look(cls, path: Path, data: Path | None) -> Look:
        """Reads as much as is needed, and checks the samples against it."""


def from_onnx(folder: Path, model: Path, data: Path | None = None) -> list[Path]:
    """Writes a project that starts at `import-onnx`.

    Args:
        folder: where it goes.
        model: the ONNX file; its external data comes along.
        data: an .npz with one array per input, samples along the first axis; the expected answers are
            called `label`, `labels`, `target` or `targets`, as in a batch.

    Returns:
        Everything written.

    Raises:
        ConfigError: a file is there already (nothing is overwritten), or the samples don't fit the model or each other.
        StageError: the model can't be read.
    """
    arrays = _arrays(data) if data else {}
    look = cast("Looks", table.stage_class("import-onnx")).look(_there(model), data)
    fields = [f"file: {starter.quoted(model.name)}"]
    fields += [f"external: [{', '.join(map(starter.quoted, look.beside))}]"] if look.beside else []
    fields += [f"data: {starter.quoted(data.name)}"] if data else []
    fields += [*starter.dims(look.dims), *starter.values(look.numbers)]
    sources = {Path(name): model.parent / name for name in (model.name, *look.beside)}
    texts = {
        "pipe.yaml": starter.pipe_yaml(
            folder.resolve().name, model.name, {"import-onnx": fields, "quantize": starter.mode(arrays)}
        ),
        "task.py": starter.task_py(
            model.name,
            "",
            data.name if data else "",
            arrays,
            inputs=look.inputs or ("input",),
            whole=look.whole,
            numbers=tuple(look.numbers),
            outputs=look.outputs,
        ),
    }
    return _write(folder, texts, sources | ({Path(data.name): data} if data else {}))


def from_checkpoint(
    folder: Path, weights: Path, model: str, data: Path | None = None, *, trust: bool = False
) -> list[Path]:
    """Writes a project that starts at `import-weights`.

    Args:
        folder: where it goes.
        weights: a .safetensors file or a torch checkpoint.
        model: `package.module:factory`, what makes the network; a module of the current folder is copied along.
        data: as for `from_onnx`, the arrays named as forward() names its arguments.
        trust: whether a pickle may run code.

    Raises:
        ConfigError: a file is there already, there is no such module or factory in it, or the samples can't be read or
            don't fit each other.
        StageError: the file is no checkpoint, as its first bytes show.
    """
    from layerline.pipeline.given import check_checkpoint

    check_checkpoint(_there(weights))
    arrays = _arrays(data, float32=True) if data else {}
    module, call = _factory(model)
    modules = _local(module)
    _check_factory(model, modules)
    fields = [
        f"file: {starter.quoted(weights.name)}",
        *(["trust: true # its pickled code may run"] if trust else []),
    ]
    inputs = [n for n, a in arrays.items() if a.rank and n != answers(arrays)]
    dynamic = ["dynamic:", *(f"  {starter.quoted(n)}: {{0: batch}}" for n in inputs)] if inputs else [starter.FIXED]
    stages = {"import-weights": fields, "export": dynamic, "quantize": starter.mode(arrays)}
    texts = {
        "pipe.yaml": starter.pipe_yaml(folder.resolve().name, weights.name, stages),
        "task.py": starter.task_py(weights.name, call, data.name if data else "", arrays),
    }
    files = {Path(weights.name): weights, **modules}
    return _write(folder, texts, files | ({Path(data.name): data} if data else {}))


def _there(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError("there is no such file", where=str(path))
    return path


def _arrays(data: Path, *, float32: bool = False) -> dict[str, starter.Array]:
    """What the samples hold, checked; `float32`: they go into a network that computes in it."""
    import numpy as np

    from layerline.pipeline import given

    try:
        with np.load(_there(data), allow_pickle=False) as file:
            arrays = {n: file[n] for n in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"not an .npz file of plain arrays ({error})", where=str(data)) from error
    given.check_samples(arrays, data.name)
    if float32 and (label := answers(arrays)):
        given.check_answers(arrays[label], data.name, label)
    for name, array in arrays.items() if float32 else ():
        if array.dtype == np.float64:
            given.checked_cast(array, np.float32, name, data.name)
    return {n: starter.Array(a.ndim, a.dtype.kind) for n, a in arrays.items()}


def _factory(spec: str) -> tuple[str, str]:
    """The module of `package.module:factory`, and the lines that call it."""
    module, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigError(f"expected package.module:factory, saw {spec!r}", where="--model")
    first, _, rest = attribute.partition(".")
    name = f"build_{first}" if first in HOOKS else first
    imported = f"{first} as {name}" if name != first else first
    return (
        module,
        f"from {module} import {imported}\n\n\ndef model():\n    return {name}{'.' if rest else ''}{rest}()\n",
    )


def _check_factory(spec: str, files: Mapping[Path, Path]) -> None:
    """Refuses a module that is not among the files copied along, and a factory that it does not define.

    Raises:
        ConfigError: names the nearest of those there are.
    """
    module, _, attribute = spec.partition(":")
    if not files:
        return  # installed: what it holds is known when it is imported
    stem = Path(*module.split("."))
    source = next((files[p] for p in (stem.with_suffix(".py"), stem / "__init__.py") if p in files), None)
    if source is None:
        there = ", ".join(sorted(".".join(p.with_suffix("").parts) for p in files))
        raise ConfigError(f"there is no module {module!r} here", where="--model", hint=f"there are: {there}")
    try:
        body = ast.parse(source.read_bytes()).body
    except SyntaxError as error:
        raise ConfigError(f"not valid Python: {error.msg}", where=f"{source.name}:{error.lineno}") from None
    imports = (n for s in body for n in ast.walk(s) if isinstance(n, ast.Import | ast.ImportFrom))
    names = {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}
    names, wanted = names.union(*map(trees.bound_names, body)), attribute.partition(".")[0]
    # `from x import *` and a __getattr__ hold names that only importing it shows.
    if not names & {wanted, "*", "__getattr__"}:
        near = difflib.get_close_matches(wanted, names, 1)
        hint = f"did you mean {module}:{near[0]}?" if near else f"it defines {', '.join(sorted(names)) or 'nothing'}"
        raise ConfigError(f"{source.name} defines no {wanted!r}", where="--model", hint=hint)


def _local(module: str) -> dict[Path, Path]:
    """Python files of the current folder that the module consists of; none where it is installed.

    Raises:
        ConfigError: it is neither here nor installed.
    """
    top, here = module.partition(".")[0], Path.cwd()
    if (here / f"{top}.py").is_file():
        return {Path(f"{top}.py"): here / f"{top}.py"}
    if found := sorted((here / top).rglob("*.py")):
        return {p.relative_to(here): p for p in found}
    if importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"there is no module {top!r}, here or installed",
            where="--model",
            hint="run pipe init in the folder that holds it, or install its package",
        )
    return {}


def _write(folder: Path, texts: Mapping[str, str], files: Mapping[Path, Path]) -> list[Path]:
    """Writes the texts and copies the files (target below the folder to source); nothing is overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("it is a file, not a folder", where=str(folder))
    if taken := [str(t) for t in files if str(t) in texts]:
        raise ConfigError(f"every project has a {taken[0]} of its own", where=taken[0], hint="rename your file")
    moves = {folder / t: s for t, s in files.items() if (folder / t).resolve() != s.resolve()}
    for path in (*moves, *(folder / name for name in texts)):
        if path.exists():
            raise ConfigError("it is there already", where=str(path), hint="choose another folder; nothing was written")
    for target, source in moves.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        # A copy, not a link: onnx takes linked data files for an attack.
        shutil.copyfile(source, target)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [*(folder / name for name in texts), *moves]
