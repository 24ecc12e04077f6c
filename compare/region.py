"""The smallest ONNX model that shows a difference, its inputs, and a script that needs onnxruntime and numpy alone."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Array, Feed
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.value_pairs import pair_values
from layerline.compare.value_types import Shape, infer
from layerline.graph.analysis.ir_queries import fed, names, reads
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
    reference: ir.Model,
    candidate: ir.Model,
    feeds: Sequence[Feed],
    bad: LayerDiff,
    equal: Collection[str],
    folder: Path,
) -> None:
    """Writes the nodes of the candidate behind a value that differs, with inputs from the reference.

    The inputs are the nearest values that both models have. If the value is right from those, its error comes from
    further back: then the inputs are the nearest values that are equal in both.

    Args:
        equal: values of the reference that the candidate computes alike.
        folder: gets `model.onnx`, `inputs.npz`, `expected.npy` and `repro.py`, of the feed that shows most.
    """
    # Values of one name; outputs by their position.
    pairs = pair_values(reference, candidate)
    inputs = {name: name for name in names(fed(candidate))}
    sources: dict[str, str] = {}
    for name_a, name_b in pairs.items():
        # Of two values of the reference that stand for one of the candidate, the first is fed.
        sources.setdefault(name_b, name_a)
    value = pairs[bad.name]
    types = infer(candidate, [*sources, *inputs])
    # From the nearest values only the operator itself is left; it may be right, and its inputs wrong.
    nearest = inputs | {b: a for b, a in sources.items() if b != value}
    alike = inputs | {b: a for b, a in sources.items() if a in equal}
    for ends in (nearest, alike):
        cut = region(candidate, value, ends.keys(), types)
        needed = {name: ends[name] for name in names(cut.graph.inputs)}
        runs = _runs(reference, feeds, needed, bad.name, types)
        if show(cut, runs, folder, bad) > 0.0:
            return


def _runs(
    reference: ir.Model,
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
        # A half-precision region takes half-precision inputs.
        inputs = {b: np.asarray(values[a]).astype(types[b][0], copy=False) for b, a in needed.items()}
        runs.append((inputs, values[value]))
    return runs


def show(cut: ir.Model, runs: Sequence[tuple[Feed, Array | None]], folder: Path, bad: LayerDiff) -> float:
    """Writes the model, and inputs and expected value of the run with the greatest error, which is returned.

    Args:
        runs: inputs and the value that they should give; None where it should only be finite.
    """
    session = OnnxRuntime(few_runs=True).open(cut)
    greatest = -1.0
    for inputs, expected in runs:
        [actual] = session.run(inputs).values()
        distance = Distance()
        if expected is not None:
            distance = diff_arrays(expected, actual)
        # NaN on one side only is worse than any distance.
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
    # The title stands in the docstring of a script: nothing in a name may end it.
    title = f"{bad.name!r} ({bad.op}) of {bad.where!r}".replace('"', "'").replace("\\", "/")
    (folder / SCRIPT).write_text(_SCRIPT.format(title=title), "utf-8")
    return greatest


def region(
    model: ir.Model,
    value: str,
    ends: Collection[str],
    types: Mapping[str, tuple[str, Shape]],
    *,
    declared: bool = False,
) -> ir.Model:
    """The part of a model that computes `value`, as a model of its own; values in `ends` become its inputs.

    Args:
        types: of those values, and of `value`.
        declared: whether the values in between keep their declared shapes.
    """
    others = set(ends) - {value}
    needed = {value}
    read: dict[str, ir.Value] = {each.name or "": each for each in model.graph.outputs}
    nodes: list[ir.Node] = []
    computed = set[str]()
    for node in reversed(model.graph):  # nodes stand behind what they read
        if needed.intersection(names(node.outputs)) - others:
            nodes.append(node)
            for each in (*reads(node), *node.outputs):
                read[each.name or ""] = each
            needed.update(names(reads(node)))
            computed.update(names(node.outputs))
    stored = [each for name, each in model.graph.initializers.items() if name in needed]
    # Sorted: the same region gives the same file.
    inputs = sorted(needed.intersection(ends) - computed - set(names(stored)))
    view = ir.GraphView(
        [read[name] for name in inputs],
        [read[value]],
        nodes=nodes[::-1],
        initializers=stored,
        opset_imports=model.opset_imports,
        name="region",
    )
    # The nodes stay part of the model they come from.
    graph = view.clone()
    for node in graph:
        for each in node.outputs:
            if not declared:
                # Shapes from shape inference may be wrong at other sizes; without them the runtime finds its own.
                each.shape = each.type = None
    for each in (*graph.inputs, *graph.outputs):
        dtype, shape = types[each.name or ""]
        each.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
        each.shape = ir.Shape(shape)
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
