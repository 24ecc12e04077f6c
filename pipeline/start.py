"""Projects that start from a file: a model as ONNX, or a checkpoint. The file moves in, with all that belongs to it."""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from layerline.pipeline import starter, table
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
        data: an .npz with one array per input, samples along the first axis; `label` holds the expected answers.

    Returns:
        Everything written.

    Raises:
        ConfigError: a file is there already (nothing is overwritten), or the samples don't fit the model.
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
        ConfigError: a file is there already, there is no such module, or the samples can't be read.
    """
    arrays = _arrays(data) if data else {}
    module, call = _factory(model)
    fields = [
        f"file: {starter.quoted(_there(weights).name)}",
        *(["trust: true # its pickled code may run"] if trust else []),
    ]
    inputs = [n for n, a in arrays.items() if a.rank and n != starter.LABEL]
    dynamic = ["dynamic:", *(f"  {starter.quoted(n)}: {{0: batch}}" for n in inputs)] if inputs else []
    stages = {"import-weights": fields, "export": dynamic, "quantize": starter.mode(arrays)}
    texts = {
        "pipe.yaml": starter.pipe_yaml(folder.resolve().name, weights.name, stages),
        "task.py": starter.task_py(weights.name, call, data.name if data else "", arrays),
    }
    files = {Path(weights.name): weights, **_local(module)}
    return _write(folder, texts, files | ({Path(data.name): data} if data else {}))


def _there(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError("there is no such file", where=str(path))
    return path


def _arrays(data: Path) -> dict[str, starter.Array]:
    import numpy as np

    try:
        with np.load(_there(data), allow_pickle=False) as file:
            return {n: starter.Array(a.ndim, a.dtype.kind) for n in file.files if (a := file[n]) is not None}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"not an .npz file of plain arrays ({error})", where=str(data)) from error


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
