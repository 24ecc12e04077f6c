"""The files of a new project: pipe.yaml and task.py of one that starts from a file, and how they are written.

What comes from outside is written as a literal, in YAML by ruamel and in Python by repr. Each file is parsed again, and
compared with what it should say, before it is written.
"""

from __future__ import annotations

import ast
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerline.pipeline.config import bounded_yaml
from layerline.pipeline.config.bounded_yaml import plain
from layerline.pipeline.errors import ConfigError
from layerline.pipeline.inputs.batches import answers
from layerline.pipeline.untrusted import check_utf8, printable

if TYPE_CHECKING:  # a cached run imports this file, and needs no array
    import numpy.typing as npt

FIXED = "dynamic: {image: {0: batch}} # by the names of forward(); else every size stays the example's, the batch too"
BATCH = 16
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-+ /")
_FIELD = "field"

# pipe.yaml


@dataclass(frozen=True)
class StageSection:
    """What pipe.yaml says of a stage: its fields by name, and comments behind them."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    comments: Sequence[str] = ()

    def lines(self) -> list[str]:
        """As YAML, without indentation."""
        fields = [f"{name}: {yaml_value(value)}" for name, value in self.fields.items()]
        return [*fields, *(f"# {printable(text)}" for text in self.comments)]


def pipe_yaml(name: str, source: str, stages: Mapping[str, StageSection]) -> str:
    """pipe.yaml with a few lines for each stage, read again to be sure; a stage without lines keeps its defaults."""
    title = f"From {printable(source, 80)} to a TensorRT engine. `pipe run all` brings everything up to date."
    meant: dict[str, Any] = {"name": name, "task": "task.py"}
    text = "\n".join([f"# {title}", *StageSection(meant).lines()]) + "\n"
    for stage, section in stages.items():
        lines = section.lines()
        if lines:
            text += f"\n{stage}:\n" + "".join(f"  {line}\n" for line in lines)
            meant[stage] = dict(section.fields) or None
    check_yaml(text, meant, "pipe.yaml")
    return text


def yaml_value(value: Any) -> str:
    """A value as ruamel.yaml writes it, on one line."""
    from ruamel.yaml import YAML

    text = ""
    # With escapes where something can't be shown, and in quotes where ruamel doesn't read what it writes (`[?0]`).
    for allow_unicode, style in ((True, None), (False, None), (False, '"')):
        dumper: Any = YAML(typ="safe", pure=True)
        dumper.default_flow_style, dumper.default_style, dumper.width = True, style, 1 << 30
        dumper.sort_base_mapping_type_on_output, dumper.allow_unicode = False, allow_unicode
        written = io.StringIO()
        # As a field: behind a lone value there would be the end of a document.
        dumper.dump({_FIELD: value}, written)
        text = written.getvalue().strip()[len(f"{{{_FIELD}: " if style is None else f'{{"{_FIELD}": ') : -1]
        with suppress(ConfigError):
            if text.isprintable() and plain(bounded_yaml.parse(f"{_FIELD}: {text}", _FIELD)) == {_FIELD: plain(value)}:
                break
    return text


def check_yaml(text: str, meant: Mapping[str, Any], where: str) -> None:
    """Reads a generated file again. Raises ConfigError if it doesn't say what was meant."""
    if plain(bounded_yaml.parse(text, where)) != dict(meant):
        raise _unsafe(where)


# task.py

_SAMPLES = '''

def samples():
    """Arrays by input name; samples along the first axis."""
    with np.load(SAMPLES) as file:
        return dict(file)


def rows(name, array, start):
    """What an input gets in the batch that begins at a sample."""
    if array.ndim == 0:
        return array
    if name in NUMBERS:  # the same number in every sample
        return array[0]
    if name in WHOLE:  # each row is a whole input
        return array[start]
    return array[start : start + BATCH]


def batches(arrays):
    """Batches as dicts by input name."""
    count = max(len(array) for array in arrays.values() if array.ndim)
    starts = range(0, count, BATCH)
    return [{name: rows(name, array, start) for name, array in arrays.items()} for start in starts]


def calib_data():
    """What quantisation takes its ranges from."""
    return batches({name: array for name, array in samples().items() if name != LABEL})
'''
_EVALUATION = '''

def eval_data():
    """The same, with the expected answers under LABEL."""
    return batches(samples())


def metric(outputs, labels):
    """%s. Higher is better."""
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs  # the first where there are several
    return {%s}
'''
_ACCURACY = _EVALUATION % (
    "Share of samples whose greatest output is the right one",
    '"accuracy": float((outputs.argmax(axis=1) == labels).mean())',
)
_ERROR = _EVALUATION % ("Minus the mean absolute error", '"minus_error": float(-abs(outputs - labels).mean())')
_EXAMPLE = "\nexample_inputs() must be added: two samples for forward(), as a tuple or a dict.\n"
_HINTS = """
fp16 needs no hooks. int8, and a figure of what either costs, take samples:

    def calib_data():
        return [{{"{input}": array}}, ...]  # batches by input name

    def eval_data():
        return [{{"{input}": array, "label": answers}}, ...]

    def metric(outputs, labels):
        return {{"accuracy": float((outputs.argmax(axis=1) == labels).mean())}}
"""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What task.py is made of."""

    source: str  # the file that the project starts from
    model_import: str = ""  # imports what makes the network; none for a project that starts at ONNX
    model: str = ""  # the expression that makes the network
    data: str = ""  # the file of samples; none when empty
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)  # what it holds, by name
    inputs: Sequence[str] = ("input",)  # names of the model's inputs
    whole: Sequence[str] = ()  # arrays whose rows are whole inputs
    numbers: Sequence[str] = ()  # arrays that repeat one number

    def text(self) -> str:
        """task.py with hooks for what is known."""
        source = _in_prose(self.source, "the file that the project starts from")
        code = about = ""
        if self.model:
            code = f"\n\ndef model():\n    return {self.model}\n"
            about = _EXAMPLE
        if not self.data:
            about = f"Hooks for {source}.\n{about}"
            about += _HINTS.format(input=_in_prose(self.inputs[0], "input"))
            return python_file(about, self.model_import, {}, code)
        about = f"Hooks for {source}, on the samples in {_in_prose(self.data, 'the .npz file')}."
        imports = "\n".join(part for part in ("import numpy as np\n", self.model_import) if part)
        label = answers(self.arrays, self.inputs)
        constants = {
            "SAMPLES": self.data,
            "LABEL": label,
            "NUMBERS": list(self.numbers),
            "WHOLE": list(self.whole),
            "BATCH": 1 if self.whole else BATCH,
        }
        code += _SAMPLES
        if label:
            evaluation = _ERROR
            if self.arrays[label].dtype.kind in "iub":  # numbers of classes
                evaluation = _ACCURACY
            code += evaluation
        return python_file(about, imports, constants, code)


def python_file(about: str, imports: str, constants: Mapping[str, Any], code: str) -> str:
    """A Python file, read again to be sure, whose names from outside stand only in `constants`, written by repr."""
    text = f'"""{about}"""\n'
    if imports:
        text += f"\n{imports}"
    if constants:
        text += "\n" + "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    text += code
    try:
        docstring, *statements = ast.parse(text).body
        written = {}
        rest = []
        for statement in statements:
            if isinstance(statement, ast.Assign):  # of the code only functions have others
                written[ast.unparse(statement.targets[0])] = ast.literal_eval(statement.value)
            else:
                rest.append(ast.dump(statement))
        meant = [ast.dump(statement) for statement in ast.parse(imports + code).body]
        is_same = written == dict(constants) and rest == meant and ast.literal_eval(ast.unparse(docstring)) == about
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        is_same = False
    if not is_same:
        raise _unsafe("task.py")
    return text


def _in_prose(text: str, other: str) -> str:
    """A name inside of a docstring; `other` where it is long or holds anything but plain ASCII letters and digits."""
    if 0 < len(text) <= 80 and _PLAIN.issuperset(text):
        return text
    return other


def _unsafe(where: str) -> ConfigError:
    return ConfigError(
        "a name from the model or the samples can't be written into this file as it is; nothing was written",
        where=where,
        hint="rename its inputs, sizes and arrays, or the file itself",
    )


# All files or none, never over a file that is there, never through a link.


def write(folder: Path, contents: Mapping[Path, bytes | Path]) -> list[Path]:
    """Writes a project's files, and gives their paths; on any failure, Ctrl-C too, what was made is taken away again.

    `contents` are bytes, or the file to copy: onnx takes linked data files for an attack. Nothing is overwritten.
    """
    targets = {folder / name: content for name, content in contents.items()}
    folders = {folder}
    for target in targets:
        folders |= {parent for parent in target.parents if folder in parent.parents}
    for path in sorted(folders):
        check_folder(path)
    for target in targets:
        if os.path.lexists(target):
            raise _taken(target)
    made: list[Path] = []
    try:
        for target, content in targets.items():
            for parent in [p for p in reversed(target.parents) if not p.exists()]:
                parent.mkdir()
                made.append(parent)
            made.append(target)
            _put(target, content, made)
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # someone else has put a file there by now: that stays
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()
        raise
    return list(targets)


def check_folder(folder: Path) -> None:
    """Refuses a project's folder, or one in it, that is a link or a file. Raises ConfigError: it is one."""
    if folder.is_symlink():
        raise ConfigError(
            f"it is a link to {folder.readlink()}, and new projects are not written through links",
            where=str(folder),
            hint="name the folder that it leads to, or another",
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError("it is a file, not a folder", where=str(folder))
    check_utf8(folder)


def _taken(path: Path) -> ConfigError:
    return ConfigError("it is there already", where=str(path), hint="choose another folder; nothing was written")


def _put(target: Path, content: bytes | Path, made: list[Path]) -> None:
    try:
        file = target.open("xb")  # refuses whatever has come to lie there since it was looked at, a link too
    except FileExistsError:
        made.remove(target)
        raise _taken(target) from None
    with file:
        if isinstance(content, bytes):
            file.write(content)
            return
        with content.open("rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
