"""`pipe init`: projects that start from a template, from a model as ONNX, or from a checkpoint.

A file moves into its project, with all that belongs to it.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from layerline.pipeline import stage_table
from layerline.pipeline.config import bounded_yaml
from layerline.pipeline.config.project import project_name
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.init import generated_files
from layerline.pipeline.init.generated_files import Hooks, StageSection
from layerline.pipeline.inputs.batches import answers
from layerline.pipeline.task import HOOKS
from layerline.pipeline.untrusted import is_file_name, is_importable, is_inside, printable

if TYPE_CHECKING:  # a cached run imports this file, and needs no array
    import numpy.typing as npt

MODEL = "model"
"""The folder of a model whose weights lie in files of their own."""
_TEMPLATE = "mnist"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a stage that imports sees in a file before anything is copied."""

    beside: tuple[str, ...] = ()  # further files that belong to it, relative to its folder
    # arrays of the samples whose rows are whole inputs; with one of them, a batch is one sample
    whole: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()  # inputs without axes that get the same number in every sample
    inputs: tuple[str, ...] = ()  # names of all inputs


class Looks(Protocol):
    """A stage that imports."""

    @classmethod
    def look(cls, path: Path, data: Path | None) -> Look:
        """Reads as much as is needed, and checks the samples against it."""


def begin(
    folder: Path,
    *,
    template: str | None = None,
    onnx: Path | None = None,
    weights: Path | None = None,
    model: str | None = None,
    data: Path | None = None,
    trust: bool = False,
) -> tuple[list[Path], str]:
    """Writes a project that starts from a template, an ONNX model, or weights; gives its files and the next step."""
    if [template, onnx, weights].count(None) < 2:
        raise ConfigError("a project starts from one thing: --template, --from-onnx or --from-checkpoint")
    step = f"cd {shlex.quote(str(folder))} && pipe run all"
    if weights is not None and model is not None:
        written = from_checkpoint(folder, weights, model, data, trust=trust)
        if data is None:
            step = f"add example_inputs() to {folder / 'task.py'}: two samples for forward(); then {step}"
        return written, step
    if weights is not None or model is not None or trust:
        raise ConfigError("--from-checkpoint and --model go together, and --trust with them")
    if onnx is not None:
        return from_onnx(folder, onnx, data), step
    if data is not None:
        raise ConfigError("--data goes with --from-onnx or --from-checkpoint")
    return from_template(folder, template or _TEMPLATE), step


def from_template(folder: Path, template: str) -> list[Path]:
    """Writes a project's pipe.yaml and task.py into `folder`, whose name it gets."""
    root = resources.files("layerline").joinpath("templates")
    templates = sorted(t.name for t in root.iterdir() if t.is_dir() and t.joinpath("pipe.yaml").is_file())
    if template not in templates:
        raise ConfigError(f"there is no template {template!r}", hint=f"there are: {', '.join(templates)}")
    generated_files.check_folder(folder)
    texts = {name: root.joinpath(template).joinpath(name).read_text("utf-8") for name in ("pipe.yaml", "task.py")}
    name = project_name(folder)
    line = f"name: {generated_files.yaml_value(name)}"
    config = re.sub(r"^name: \S+", lambda _: line, texts["pipe.yaml"], count=1, flags=re.MULTILINE)
    meant = bounded_yaml.plain(bounded_yaml.parse(texts["pipe.yaml"], "pipe.yaml")) | {"name": name}
    generated_files.check_yaml(config, meant, "pipe.yaml")
    return generated_files.write(
        folder, {Path("pipe.yaml"): config.encode(), Path("task.py"): texts["task.py"].encode()}
    )


def from_onnx(folder: Path, model: Path, data: Path | None = None) -> list[Path]:
    """Writes a project that starts at `import-onnx`; the model's external data comes along.

    `data` is an .npz with one array per input, samples along the first axis, and the answers under one of `LABELS`.
    """
    generated_files.check_folder(folder)
    _check_names(model, data)
    arrays = _arrays(data)
    stage = cast("Looks", stage_table.stage_class("import-onnx"))
    look = stage.look(_existing(model), data)
    place = _folder_of(model, look.beside, folder)
    fields: dict[str, Any] = {"file": (place / model.name).as_posix()}
    if look.beside:
        fields["external"] = [(place / name).as_posix() for name in look.beside]
    if data:
        fields["data"] = data.name
    name_of_data = fields.get("data", "")
    sections = {"import-onnx": StageSection(fields)}
    hooks = Hooks(
        source=model.name,
        data=name_of_data,
        arrays=arrays,
        inputs=look.inputs or ("input",),
        whole=look.whole,
        numbers=look.numbers,
    )
    copies = {place / name: model.parent / name for name in (model.name, *look.beside)}
    return _write(folder, sections, hooks, copies, data)


def from_checkpoint(
    folder: Path, weights: Path, model: str, data: Path | None = None, *, trust: bool = False
) -> list[Path]:
    """Writes a project that starts at `import-weights`; `model` is the `package.module:factory` of the network.

    A module of the current folder is copied along. Arrays of `data` are named as forward() names its arguments.
    """
    from layerline.pipeline.inputs.input_checks import check_checkpoint

    generated_files.check_folder(folder)
    _check_names(weights, data)
    check_checkpoint(_existing(weights))
    arrays = _arrays(data, float32=True)
    model_import, call = _factory(model)
    modules = _local(model.partition(":")[0])
    imported = StageSection({"file": weights.name})
    if trust:
        imported = StageSection({"file": weights.name, "trust": True}, ["its pickled code may run"])
    inputs = [n for n, a in arrays.items() if a.ndim and n != answers(arrays)]
    export = StageSection(comments=[generated_files.FIXED])
    if inputs:
        export = StageSection({"dynamic": {name: {0: "batch"} for name in inputs}})
    sections = {"import-weights": imported, "export": export}
    name_of_data = ""
    if data:
        name_of_data = data.name
    hooks = Hooks(source=weights.name, model_import=model_import, model=call, data=name_of_data, arrays=arrays)
    return _write(folder, sections, hooks, {Path(weights.name): weights, **modules}, data)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError("there is no such file", where=str(path))
    return path


def _arrays(data: Path | None, *, float32: bool = False) -> dict[str, npt.NDArray[Any]]:
    """What the samples hold, checked; `float32`: they go into a network that computes in it."""
    import numpy as np

    from layerline.pipeline.inputs import input_checks, npz

    if data is None:
        return {}
    arrays = npz.read(_existing(data))
    input_checks.check_samples(arrays, data.name)
    label = answers(arrays)
    if float32 and label:
        input_checks.check_answers(arrays[label], data.name, label)
    for name, array in arrays.items():
        if float32 and array.dtype == np.float64:
            input_checks.checked_cast(array, np.float32, name, data.name)
    return arrays


def _factory(spec: str) -> tuple[str, str]:
    """The import and the call of `package.module:factory`."""
    module, _, attribute = spec.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    if any(not part.isidentifier() or keyword.iskeyword(part) for part in parts):
        raise ConfigError(f"expected package.module:factory, saw {spec!r}", where="--model")
    first, dot, rest = attribute.partition(".")
    name = first
    if first in HOOKS:  # a hook of task.py has this name
        name, first = f"build_{first}", f"{first} as build_{first}"
    return f"from {module} import {first}\n", f"{name}{dot}{rest}()"


def _local(module: str) -> dict[Path, Path]:
    """Python files of the current folder that the module consists of; none where it is installed."""
    top = module.partition(".")[0]
    here = Path.cwd()
    if (here / f"{top}.py").is_file():
        return {Path(f"{top}.py"): here / f"{top}.py"}
    # All of the package: which of its modules are imported shows only when it runs.
    sources = sorted((here / top).rglob("*.py"))
    if sources:
        return {path.relative_to(here): path for path in sources}
    if importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"there is no module {top!r}, here or installed",
            where="--model",
            hint="run pipe init in the folder that holds it, or install its package",
        )
    return {}


def _check_names(*files: Path | None) -> None:
    """Refuses files whose name would do more in a project's folder than name them."""
    for file in files:
        if file and _danger(file.name):
            raise ConfigError(_danger(file.name), where=printable(file.name, 80), hint="rename it")


def _danger(name: str) -> str:
    """Why a file or folder of this name must not lie in a project; empty where it may."""
    if not is_file_name(name):
        return "its name holds a control character, a backslash, or bytes that are no UTF-8"
    if is_importable(name):
        return "Python would take a file of this name for code of the project"
    if name.startswith((".", "__")):
        return "its name begins as those of files that tools keep"
    return ""


def _folder_of(model: Path, beside: Sequence[str], folder: Path) -> Path:
    """Where the model and the files with its weights go, below the project. A model that lies in the project stays."""
    if model.name in beside:
        raise ConfigError("it stores weights in itself, beside what it says of them", where=printable(model.name))
    for stored in beside:
        reason = ""
        if not is_inside(stored):
            reason = "it leads out of the model's folder"
        for part in stored.split("/"):
            reason = reason or _danger(part)
        if reason:
            raise ConfigError(
                f"it stores weights in {printable(stored, 80)!r}: {reason}",
                where=printable(model.name, 80),
                hint="save the model again, with another name for the file of its weights",
            )
    if beside and model.parent.resolve() != folder.resolve():
        return Path(MODEL)
    return Path()


def _write(
    folder: Path,
    sections: Mapping[str, StageSection],
    hooks: Hooks,
    copies: Mapping[Path, Path],
    data: Path | None,
) -> list[Path]:
    """Writes the texts, and copies the files that don't lie there already; nothing is overwritten."""
    quantize = StageSection({"mode": "int8"})
    if not hooks.arrays:
        quantize = StageSection({"mode": "fp16"}, ["int8 takes samples: see task.py"])
    sections = {**sections, "quantize": quantize}
    config = generated_files.pipe_yaml(project_name(folder), hooks.source, sections)
    texts = {Path("pipe.yaml"): config.encode(), Path("task.py"): hooks.text().encode()}
    samples: dict[Path, Path] = {}
    if data:
        samples = {Path(data.name): data}
    for name in (*copies, *samples):
        if name in texts:
            raise ConfigError(f"every project has a {name} of its own", where=str(name), hint="rename your file")
        if name in copies and name in samples:
            raise ConfigError("two files of the project have this name", where=str(name), hint="rename one of them")
    files = {**copies, **samples}
    # A file that lies in the project already stays where it is.
    moves = {name: file for name, file in files.items() if (folder / name).resolve() != file.resolve()}
    return generated_files.write(folder, {**texts, **moves})
