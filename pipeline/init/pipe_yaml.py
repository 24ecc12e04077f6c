"""The text of a new project's pipe.yaml, when it starts from a model or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from layerline.pipeline.init.generated_files import check_yaml, comment, yaml_value
from layerline.pipeline.inputs.untrusted import printable

FIXED = "dynamic: {image: {0: batch}} # by the names of forward(); else every size stays the example's, the batch too"
# So many of a model's names are written into a comment.
_NAMED = 20


@dataclass(frozen=True)
class Section:
    """What pipe.yaml says of a stage.

    Attributes:
        fields: by name.
        notes: a comment behind a field, by its name.
        comments: lines of their own.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    comments: Sequence[str] = ()

    def lines(self) -> list[str]:
        """As YAML, without indentation."""
        return [
            *(_line(name, value, self.notes.get(name, "")) for name, value in self.fields.items()),
            *map(comment, self.comments),
        ]


def pipe_yaml(name: str, source: str, stages: Mapping[str, Section]) -> str:
    """pipe.yaml with a few lines for each stage; a stage without lines keeps its defaults.

    Raises:
        ConfigError: read again, it doesn't say what is written here.
    """
    title = f"From {shown(source)} to a TensorRT engine. `pipe run all` brings everything up to date."
    named = {"name": name, "task": "task.py"}
    text = "\n".join([comment(title), *(_line(key, value) for key, value in named.items())]) + "\n"
    for stage, section in stages.items():
        if lines := section.lines():
            text += f"\n{stage}:\n" + "".join(f"  {line}\n" for line in lines)
    sections = {stage: dict(section.fields) or None for stage, section in stages.items() if section.lines()}
    check_yaml(text, {**named, **sections}, "pipe.yaml")
    return text


def _line(name: str, value: Any, note: str = "") -> str:
    return f"{name}: {yaml_value(value)}{' ' + comment(note) if note else ''}"


def quantize(*, samples: bool) -> Section:
    """int8 where there are samples to calibrate on."""
    if samples:
        return Section({"mode": "int8"})
    return Section({"mode": "fp16"}, notes={"mode": "int8 takes samples: see task.py"})


def dims(there: Mapping[str, str]) -> list[str]:
    """A comment with the sizes that vary."""
    if not there:
        return []
    example = yaml_value({next(iter(there)): {"min": 1, "max": 8}})
    told = ", ".join(f"{shown(n)} ({printable(where, 200)})" for n, where in islice(there.items(), _NAMED))
    more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
    return [f"dims: {printable(example, 300)} # sizes to build for, else found by trial: {told}{more}"]


def values(numbers: Mapping[str, float]) -> list[str]:
    """A comment with the inputs that might as well be constants."""
    if not numbers:
        return []
    example = yaml_value(dict(islice(numbers.items(), _NAMED)))
    return [f"values: {printable(example, 2000)} # makes it a constant; then leave it out of samples() in task.py"]


def shown(text: str) -> str:
    """A name in a comment."""
    return printable(text, 80)


def project_name(folder: Path) -> str:
    """What a project in a folder is called."""
    return printable(folder.resolve().name, 100) or "project"
