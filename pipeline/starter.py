"""The text of a new project's two files, when it starts from a model or a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerline.pipeline.batches import answers

FIXED = "# dynamic: {image: {0: batch}} # by the names of forward(); else every size stays the example's, the batch too"
BATCH = 16

_SAMPLES = '''
def samples():
    """Arrays by input name; samples along the first axis."""
    with np.load({data}) as file:
        return dict(file)


def batches(arrays):
    """{what}, as dicts by input name."""
    count = len(arrays[{counted}])
    return [{{name: {rows} for name, array in arrays.items()}} for i in {steps}]


def calib_data():
    """What quantisation takes its ranges from."""
    return batches({inputs})
'''
_EVALUATION = '''

def eval_data():
    """The same, with the expected answers under "{label}"."""
    return batches(samples())


def metric(outputs, labels):
    """{what}. Higher is better."""
{first}    return {{"{name}": float({value})}}
'''
_FIRST = "    outputs = outputs[0] if isinstance(outputs, tuple) else outputs  # the first where there are several\n"
_HINTS = '''
fp16 needs no hooks. int8, and a figure of what either costs, take samples:

    def calib_data():
        return [{{"{input}": array}}, ...]  # batches by input name

    def eval_data():
        return [{{"{input}": array, "label": answers}}, ...]

    def metric(outputs, labels):
        return {{"accuracy": float((outputs.argmax(axis=1) == labels).mean())}}
"""
'''


@dataclass(frozen=True)
class Array:
    """One array of the samples: number of axes, and numpy's letter for its kind of type."""

    rank: int
    kind: str


def pipe_yaml(name: str, source: str, stages: Mapping[str, Sequence[str]]) -> str:
    """pipe.yaml with a few lines for each stage; a stage without lines keeps its defaults."""
    head = f"# From {source} to a TensorRT engine. `pipe run all` brings everything up to date.\n"
    head += f"name: {quoted(name)}\ntask: task.py\n"
    return head + "".join(
        f"\n{n}:\n" + "".join(f"  {line}\n" for line in lines) for n, lines in stages.items() if lines
    )


def mode(arrays: Mapping[str, Array]) -> list[str]:
    """The fields of quantize: int8 where there are samples to calibrate on."""
    return ["mode: int8"] if arrays else ["mode: fp16 # int8 takes samples: see task.py"]


def dims(there: Mapping[str, str]) -> list[str]:
    """A comment with the sizes that vary."""
    if not there:
        return []
    first = f"{quoted(next(iter(there)))}: {{min: 1, max: 8}}"
    told = ", ".join(f"{n} ({where})" for n, where in there.items())
    return [f"# dims: {{{first}}} # sizes to build for, else found by trial: {told}"]


def values(numbers: Mapping[str, float]) -> list[str]:
    """A comment with the inputs that might as well be constants."""
    told = ", ".join(f"{quoted(n)}: {number}" for n, number in numbers.items())
    return [f"# values: {{{told}}} # makes it a constant; then leave it out of samples() in task.py"] if told else []


def quoted(text: str) -> str:
    """Text as YAML writes it."""
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in {"true", "false", "null", "yes", "no"}
    return text if plain else json.dumps(text, ensure_ascii=False)


def task_py(
    source: str,
    model: str,
    data: str,
    arrays: Mapping[str, Array],
    *,
    inputs: Sequence[str] = ("input",),
    whole: Sequence[str] = (),
    numbers: Sequence[str] = (),
    outputs: int | None = None,
) -> str:
    """task.py with hooks for what is known.

    Args:
        source: the file that the project starts from.
        model: the lines that define model(); none for a project that starts at ONNX.
        data: the file of samples; none when empty.
        arrays: what it holds.
        inputs: names of the model's inputs.
        whole: arrays whose rows are whole inputs.
        numbers: arrays that repeat one number.
        outputs: how many the model has; None where that is seen only when it runs.
    """
    if not data:
        example = (
            "\nexample_inputs() must be added: two samples for forward(), as a tuple or a dict.\n" if model else ""
        )
        return f'"""Hooks for {source}.\n{example}' + _HINTS.format(input=inputs[0]) + (f"\n{model}" if model else "")
    text = f'"""Hooks for {source}, on the samples in {data}."""\n\nimport numpy as np\n'
    text += f"{model}\n" if model else "\n"
    label = answers(arrays, inputs)
    text += _samples(data, arrays, whole, numbers, label)
    return text + (_evaluation(label, arrays[label], outputs) if label else "")


def _samples(data: str, arrays: Mapping[str, Array], whole: Sequence[str], numbers: Sequence[str], label: str) -> str:
    rows, steps, what = f"array[i : i + {BATCH}]", f"range(0, count, {BATCH})", f"{BATCH} samples each"
    if whole:
        rows, steps, what = (
            f"array[i] if name in {list(whole)!r} else array[i : i + 1]",
            "range(count)",
            "One sample each",
        )
    if any(not a.rank for a in arrays.values()):
        rows = f"array if array.ndim == 0 else {rows}"
    if numbers:
        rows = f"array[0] if name in {list(numbers)!r} else {rows}"
    inputs = f'{{k: v for k, v in samples().items() if k != "{label}"}}' if label else "samples()"
    counted = next((n for n, a in arrays.items() if a.rank and n != label), "")
    return _SAMPLES.format(
        data=json.dumps(data), what=what, counted=json.dumps(counted), rows=rows, steps=steps, inputs=inputs
    )


def _evaluation(label: str, labels: Array, outputs: int | None) -> str:
    given = "outputs[0]" if outputs and outputs > 1 else "outputs"
    first = "" if outputs else _FIRST
    if labels.kind in "iub":
        what, name = "Share of samples whose greatest output is the right one", "accuracy"
        value = f"({given}.argmax(axis=1) == labels).mean()"
    else:
        what, name, value = "Minus the mean absolute error", "minus_error", f"-abs({given} - labels).mean()"
    return _EVALUATION.format(label=label, what=what, first=first, name=name, value=value)
