"""The smallest ONNX model that shows a difference, its inputs, and a script that needs onnxruntime and numpy alone."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from layerline.backends.base import Array, Feed
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.value_pairs import pair_values
from layerline.compare.value_types import Shape, infer
from layerline.graph.analysis.proto_queries import reads
from layerline.graph.io import onnx_files
from layerline.pipeline.report import LayerDiff

INPUTS, EXPECTED, SCRIPT = "inputs.npz", "expected.npy", "repro.py"
_SCRIPT = '''"""{title}

model.onnx computes this value alone, from inputs.npz; expected.npy is what it should be, if it is not
only to be finite. Needs onnxruntime and numpy.
"""

from pathlib import Path

import numpy as np
import onnxruntime as ort

here = Path(__file__).parent
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession(str(here / "model.onnx"), options, providers=["CPUExecutionProvider"])
seen = np.asarray(session.run(None, dict(np.load(here / "inputs.npz")))[0], np.float64)
print(f"{{np.count_nonzero(~np.isfinite(seen))}} of {{seen.size}} elements are NaN or Inf")
if not (here / "expected.npy").exists():
    raise SystemExit
expected = np.load(here / "expected.npy").astype(np.float64)
error = np.where((seen == expected) | (np.isnan(seen) & np.isnan(expected)), 0.0, np.abs(seen - expected))
worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
print(f"worst element: {{[int(i) for i in worst]}} of {{list(seen.shape)}}")
print(f"seen {{seen[worst]:.6g}}, expected {{expected[worst]:.6g}}")
print(f"{{np.count_nonzero(error)}} of {{error.size}} elements differ")
print(f"relative L2 error: {{np.sqrt((error**2).sum()) / (np.sqrt((expected**2).sum()) or 1.0):.3g}}")
'''


def reproduce(
    reference: Light, candidate: Light, feeds: Sequence[Feed], bad: LayerDiff, equal: Collection[str], folder: Path
) -> None:
    """Writes the nodes of the candidate behind a value that differs, with inputs from the reference.

    The inputs are the nearest values that both models have. If the value is right from those, its error comes from
    further back: then the inputs are the nearest values that are equal in both.

    Args:
        bad: the row of the value.
        equal: values of the reference that the candidate computes alike.
        folder: gets `model.onnx`, `inputs.npz`, `expected.npy` and `repro.py`, of the feed that shows most.
    """
    pairs = pair_values(reference.model, candidate.model)
    fed = {info.name: info.name for info in candidate.fed}
    sources: dict[str, str] = {}
    for name_a, name_b in pairs.items():
        sources.setdefault(name_b, name_a)
    value = pairs[bad.name]
    types = infer(candidate, [*sources, *fed])
    nearest = fed | {b: a for b, a in sources.items() if b != value}
    alike = fed | {b: a for b, a in sources.items() if a in equal}
    for ends in (nearest, alike):
        cut = region(candidate, value, ends.keys(), types)
        needed = {info.name: ends[info.name] for info in cut.model.graph.input}
        runs = _runs(reference, feeds, needed, bad.name, types)
        if show(cut, runs, folder, bad) > 0.0:
            return


def _runs(
    reference: Light,
    feeds: Sequence[Feed],
    needed: Mapping[str, str],
    value: str,
    types: Mapping[str, tuple[str, Shape]],
) -> list[tuple[Feed, Array]]:
    """For each feed the inputs of a region, in its types, and the value that they should give."""
    session = OnnxRuntime(few_runs=True).open(reference, [*needed.values(), value])
    runs: list[tuple[Feed, Array]] = []
    for feed in feeds:
        values = {**feed, **session.run({name: feed[name] for name in session.inputs})}
        inputs = {b: np.asarray(values[a]).astype(types[b][0], copy=False) for b, a in needed.items()}
        runs.append((inputs, values[value]))
    return runs


def show(cut: Light, runs: Sequence[tuple[Feed, Array | None]], folder: Path, bad: LayerDiff) -> float:
    """Writes the model, and inputs and expected value of the run with the greatest error, which is returned.

    Args:
        runs: inputs and the value that they should give; None where it should only be finite.
    """
    session = OnnxRuntime(few_runs=True).open(cut)
    greatest = -1.0
    for inputs, expected in runs:
        [seen] = session.run(inputs).values()
        distance = Distance() if expected is None else diff_arrays(expected, seen)
        error = distance.rel_l2 + distance.one_sided
        if error > greatest:
            greatest, worst, right = error, inputs, expected
    folder.mkdir(parents=True, exist_ok=True)
    onnx_files.save(cut, folder)
    # savez takes no arrays of the names of its own parameters.
    with zipfile.ZipFile(folder / INPUTS, "w") as file:
        for name, array in worst.items():
            with file.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array))
    if right is not None:
        np.save(folder / EXPECTED, right)
    title = f"{bad.name!r} ({bad.op}) of {bad.where!r}".replace('"', "'").replace("\\", "/")
    (folder / SCRIPT).write_text(_SCRIPT.format(title=title), "utf-8")
    return greatest


def region(light: Light, value: str, ends: Collection[str], types: Mapping[str, tuple[str, Shape]]) -> Light:
    """The part of a model that computes `value`, as a model of its own; values in `ends` become its inputs."""
    model = light.model
    needed = {value}
    nodes: list[onnx.NodeProto] = []
    computed = set[str]()
    for node in reversed(model.graph.node):  # nodes stand behind what they read
        if needed.intersection(node.output) - (set(ends) - {value}):
            nodes.append(node)
            needed.update(reads(node))
            computed.update(node.output)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in needed}
    weights = {name: weight for name, weight in light.weights.items() if name in needed}
    inputs = needed.intersection(ends) - computed - initializers.keys() - weights.keys()
    out = onnx.ModelProto()
    out.CopyFrom(model)
    out.graph.Clear()
    out.graph.name = "region"
    out.graph.node.extend(reversed(nodes))
    out.graph.initializer.extend(initializers[name] for name in sorted(initializers))
    out.graph.input.extend(_info(name, types) for name in sorted(inputs))
    out.graph.output.append(_info(value, types))
    return Light(out, weights)


def _info(name: str, types: Mapping[str, tuple[str, Shape]]) -> onnx.ValueInfoProto:
    dtype, shape = types[name]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))
