"""The text of a new project's task.py, when it starts from a model or a checkpoint.

No name from a file becomes code: it is written as a literal, or left out where it would stand in a docstring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerline.pipeline.init.generated_files import check_python, in_prose, python_literal
from layerline.pipeline.inputs.batches import LABELS, answers

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


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What task.py is made of.

    Attributes:
        source: the file that the project starts from.
        model: the lines that define model(); none for a project that starts at ONNX.
        data: the file of samples; none when empty.
        arrays: what it holds, by name.
        inputs: names of the model's inputs.
        whole: arrays whose rows are whole inputs.
        numbers: arrays that repeat one number.
        outputs: how many the model has; None where that is seen only when it runs.
    """

    source: str
    model: str = ""
    data: str = ""
    arrays: Mapping[str, Array] = field(default_factory=dict)
    inputs: Sequence[str] = ("input",)
    whole: Sequence[str] = ()
    numbers: Sequence[str] = ()
    outputs: int | None = None

    def text(self) -> str:
        """task.py with hooks for what is known.

        Raises:
            ConfigError: the code for these names differs from the code for harmless ones in more than the names.
        """
        names = dict.fromkeys([self.data, *self.arrays, *self.inputs, *self.whole, *self.numbers])
        stand_ins = {n: n if n in LABELS else f"name_{i}" for i, n in enumerate(names)}
        stand_ins[""] = ""  # no samples, or an input without a name
        text, about = self._text(), self._about()
        twin = about + self._renamed(stand_ins)._code()
        check_python(text, twin, {stand_in: name for name, stand_in in stand_ins.items()}, "task.py")
        return text

    def _text(self) -> str:
        return self._about() + self._code()

    def _renamed(self, names: Mapping[str, str]) -> Hooks:
        return dataclasses.replace(
            self,
            data=names[self.data],
            arrays={names[n]: a for n, a in self.arrays.items()},
            inputs=[names[n] for n in self.inputs],
            whole=[names[n] for n in self.whole],
            numbers=[names[n] for n in self.numbers],
        )

    def _about(self) -> str:
        """The docstring."""
        source = in_prose(self.source, "the model" if not self.model else "the weights")
        if self.data:
            return f'"""Hooks for {source}, on the samples in {in_prose(self.data, "the .npz file")}."""\n'
        example = "\nexample_inputs() must be added: two samples for forward(), as a tuple or a dict.\n"
        hints = _HINTS.format(input=in_prose(self.inputs[0], "input"))
        return f'"""Hooks for {source}.\n{example if self.model else ""}{hints}'

    def _code(self) -> str:
        if not self.data:
            return f"\n{self.model}" if self.model else ""
        text = "\nimport numpy as np\n" + (f"{self.model}\n" if self.model else "\n")
        label = answers(self.arrays, self.inputs)
        return text + self._samples(label) + (self._evaluation(label) if label else "")

    def _samples(self, label: str) -> str:
        rows, steps, what = f"array[i : i + {BATCH}]", f"range(0, count, {BATCH})", f"{BATCH} samples each"
        if self.whole:
            rows = f"array[i] if name in {list(self.whole)!r} else array[i : i + 1]"
            steps, what = "range(count)", "One sample each"
        if any(not a.rank for a in self.arrays.values()):
            rows = f"array if array.ndim == 0 else {rows}"
        if self.numbers:
            rows = f"array[0] if name in {list(self.numbers)!r} else {rows}"
        others = f"{{k: v for k, v in samples().items() if k != {python_literal(label)}}}"
        counted = next((n for n, a in self.arrays.items() if a.rank and n != label), "")
        return _SAMPLES.format(
            data=python_literal(self.data),
            what=what,
            counted=python_literal(counted),
            rows=rows,
            steps=steps,
            inputs=others if label else "samples()",
        )

    def _evaluation(self, label: str) -> str:
        first = "" if self.outputs else _FIRST
        output = "outputs[0]" if self.outputs and self.outputs > 1 else "outputs"
        if self.arrays[label].kind in "iub":
            what, name = "Share of samples whose greatest output is the right one", "accuracy"
            value = f"({output}.argmax(axis=1) == labels).mean()"
        else:
            what, name = "Minus the mean absolute error", "minus_error"
            value = f"-abs({output} - labels).mean()"
        return _EVALUATION.format(label=label, what=what, first=first, name=name, value=value)
