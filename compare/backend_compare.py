"""Compares what a backend computes from an ONNX file with ONNX Runtime, on the same feeds.

TensorRT engines were not run on a device yet; the tests run them on stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from layerline.backends.base import Backend, Feed, Session
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.backends.tensorrt.builder import TensorRT
from layerline.backends.tensorrt.engine_session import EngineSession
from layerline.backends.tensorrt.profiles import admitting
from layerline.compare.channel_errors import ELEMENTWISE
from layerline.compare.other_choices import Choices, choices
from layerline.compare.tensor_distance import Distance, diff_arrays
from layerline.compare.topk_indices import pointers, resolved
from layerline.compare.value_pairs import sides_of_qdq
from layerline.compare.value_types import Shape, types_of
from layerline.graph.analysis.ir_queries import first_output, graph_values, names
from layerline.graph.analysis.rounding_noise import drawn
from layerline.graph.analysis.shape_inference import infer_types
from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import modules
from layerline.graph.quantization import convert
from layerline.pipeline.errors import PipeError, StageError
from layerline.pipeline.report import LayerDiff
from layerline.pipeline.wording import quantity

# Runtimes compute a product and the elementwise operator behind it in one kernel.
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


_NO_CHOICES = Choices({}, {})


@dataclass(frozen=True)
class BackendDistances:
    """Distances from ONNX Runtime by value name, summed over the feeds that were run."""

    distances: Mapping[str, Distance]  # of every value that the session gives
    types: Mapping[str, tuple[str, Shape]]  # element type and shape of these values in the ONNX file
    ran: int  # number of feeds run
    outside: int  # number of feeds whose sizes no profile of an engine admits
    choices: Choices = _NO_CHOICES  # of the ONNX file
    # By value: for each feed in which it followed another choice than ONNX Runtime's, the nodes that chose otherwise.
    # Its distance leaves these feeds out.
    left_out: Mapping[str, Sequence[set[str]]] = field(default_factory=dict)

    def unseen(self, name: str) -> set[str]:
        """The nodes whose choice a value follows, and that the session does not give."""
        return self.choices.followed(name, self.choices.labels.keys() - self.distances.keys())

    def row(self, record: LayerDiff) -> LayerDiff:
        """The record with what was measured of its value; its tolerance stays only where something was."""
        distance = self.distances[record.name]
        left_out = self.left_out.get(record.name, ())
        others = " and ".join(sorted(set().union(*left_out)))
        if len(left_out) == self.ran:
            extra = {**record.extra, "size": f"follows another choice of {others}"}
            return replace(record, tolerance=None, extra=extra)
        extra = {**record.extra, **distance.flags}
        if left_out:
            probes = f"{len(left_out)} of {quantity(self.ran, 'probe')} (left out)"
            extra["size"] = f"follows another choice of {others} in {probes}"
        unseen = " and ".join(sorted(self.unseen(record.name)))
        if unseen and (distance.peak or distance.mismatch):
            extra["size"] = f"may follow another choice of {unseen}, which the runtime does not give"
        return replace(record, **distance.measures(), extra=extra)


class BackendSession:
    """A session of any backend. Its exceptions and missing outputs become errors that name the backend.

    Args:
        taps: inner values wanted beside the outputs; the session's `outputs` say which of them it gives.

    Raises:
        StageError: the backend refuses the model, or raises anything.
    """

    def __init__(self, backend: Backend, model: Path, taps: Sequence[str] = ()) -> None:
        self._where = f"backend {backend.name}"
        with self._border():
            self.session: Session = backend.open(model, taps)
            self.inputs = list(self.session.inputs)
            self.outputs = list(self.session.outputs)

    def run(self, feed: Feed) -> dict[str, Any]:
        """Runs on the inputs that the session takes; it may have left out those that nothing reads."""
        # A runtime drops inputs that nothing reads, and refuses them when they are fed.
        arrays = {name: array for name, array in feed.items() if name in self.inputs}
        if isinstance(self.session, EngineSession):
            for name, array in arrays.items():
                if array.dtype == np.float64:
                    arrays[name] = array.astype(np.float32)  # engines have no float64
        with self._border():
            results: dict[str, Any] = dict(self.session.run(arrays))
            # A tensor of some framework becomes an array; sequences and what is absent stay.
            results.update((name, np.asarray(value)) for name, value in results.items() if hasattr(value, "__array__"))
        missing = [name for name in self.outputs if name not in results]
        if missing:
            raise StageError(f"it gives no array for {missing[0]}, which is among its outputs", where=self._where)
        return results

    def admits(self, feed: Feed) -> bool:
        """Whether the sizes of the feed fit; only an engine has bounds."""
        if not isinstance(self.session, EngineSession):
            return True
        return bool(admitting(self.session.profiles, {name: array.shape for name, array in feed.items()}))

    @contextmanager
    def _border(self) -> Iterator[None]:
        try:
            yield
        except PipeError:
            raise
        except Exception as error:
            raise StageError(f"{type(error).__name__}: {error}", where=self._where) from error


def compare_engine(
    backend: TensorRT, model: Path, plan: Path, feeds: Sequence[Feed], records: Sequence[LayerDiff], tolerance: float
) -> tuple[tuple[LayerDiff, ...], list[str]]:
    """Adds to the records what a built engine computes on this machine's device.

    Where it can't run here, the records stay as they are and a note gives the reason.

    Outputs are measured on the engine itself and gated by `tolerance`, a relative L2 error. Inner values are measured
    on a second engine that gives them as outputs too; it fuses less than the one that ships, so they are not gated.

    Raises:
        StageError: the engine was built for this device and does not run on it.
    """
    reason = backend.unavailable_reason()
    if reason:
        return tuple(records), [f"The engine was built but not run here: {reason}."]
    try:
        engine = BackendSession(backend, plan)
    except StageError as error:
        if backend.name == "tensorrt":
            raise
        # Built ahead of time, perhaps for other devices than this machine's.
        return tuple(records), [f"The engine was built but not run here: {error.what}."]
    whole = measure(model, engine, feeds)
    if not whole.ran:
        return tuple(records), ["The engine was built but not run here: no probe fits the sizes of its profiles."]
    notes = [f"{quantity(whole.ran, 'probe was', 'probes were')} run."]
    inner = [r.name for r in records if r.name not in engine.outputs]
    parts = BackendDistances({}, {}, 0, 0)
    try:
        parts = measure(model, BackendSession(backend, model, inner), feeds)
    except StageError as error:
        # The engine that ships was measured; what a second one would say of inner values is extra.
        notes.append(f"Only the outputs were compared. With inner values: {error}")
    else:
        notes.append("Inner values were measured on a second engine, which fuses less.")
    rows: list[LayerDiff] = []
    for record in records:
        measured = _that_tells(record.name, whole, parts)
        if measured is not None:
            limit = None
            if record.name in engine.outputs:
                limit = tolerance
            record = measured.row(replace(record, tolerance=limit))
        rows.append(record)
    return tuple(rows), notes + _outside(whole)


def compare_on(
    backend: Backend, model: Path, session: BackendSession, feeds: Sequence[Feed]
) -> tuple[tuple[LayerDiff, ...], list[str]]:
    """Compares every value that the backend gives with ONNX Runtime's, which runs the graph as it is written.

    Args:
        backend: opens the model a second time, for the inner values: as outputs they keep it from fusing layers.
        session: the model as the backend runs it, opened without taps; the outputs are measured on it.

    Returns:
        One row per value in the order of the graph, and notes.

    Raises:
        StageError: the backend can't run the model.
    """
    onnx_model = onnx_files.read_model(model)
    ops: dict[str, str] = {}
    for node in onnx_model.graph:
        if node.op_type != "Constant":
            ops.update(dict.fromkeys(names(node.outputs), node.op_type))
    whole = measure(model, session, feeds)
    if not whole.ran:
        raise StageError("no probe fits the sizes that the engine is built for", where=f"backend {backend.name}")
    inner = [name for name in ops if name not in session.outputs]
    parts, notes = _measure_inner(backend, model, inner, feeds, whole)
    types = {**parts.types, **whole.types}
    written = _written_types(onnx_model)
    random, module_paths = drawn(onnx_model), modules(onnx_model)
    rows: list[LayerDiff] = []
    # An output that no node computes, an input that is passed on, comes last.
    measured_names = {**parts.distances, **whole.distances}.keys()
    sides = sides_of_qdq(onnx_model.graph, {*measured_names, *onnx_model.graph.initializers})
    for name in dict.fromkeys([*ops, *measured_names]):
        measured = _that_tells(name, whole, parts)
        if measured is None or name in sides:
            continue
        dtype, shape = types[name]
        dtype = written.get(name, dtype)
        op, module = ops.get(name, "Input"), module_paths.get(name, "")
        row = LayerDiff(name=name, op=op, module=module, dtype=dtype, shape=shape)
        if name in random:
            rows.append(replace(row, extra={"nondeterministic": random[name]}))
        else:
            rows.append(measured.row(row))
    return tuple(rows), notes + _outside(whole)


def _that_tells(name: str, whole: BackendDistances, parts: BackendDistances) -> BackendDistances | None:
    """The measurement that a value's row is from: for outputs that without taps, as users get them.

    An output behind a TopK whose indices that session does not give is told by the session that gives them.
    """
    if name in parts.distances and (name not in whole.distances or (whole.unseen(name) and not parts.unseen(name))):
        return parts
    if name in whole.distances:
        return whole
    return None


def _written_types(model: ir.Model) -> dict[str, str]:
    """numpy's name of the element type of each value in the file; what runs may emulate it in float32."""
    infer_types(model)
    types: dict[str, str] = {}
    for value in (*graph_values(model.graph), *model.graph.inputs):
        if value.name and value.dtype is not None and value.dtype != ir.DataType.STRING:
            types[value.name] = value.dtype.numpy().name
    return types


def measure(model: Path, session: BackendSession, feeds: Sequence[Feed]) -> BackendDistances:
    """Runs ONNX Runtime, on the file as it is written, and a session on every feed that fits.

    Of types that ONNX Runtime's CPU lacks (float4, bfloat16) or does not round to, it runs the emulation.
    Indices (ArgMax, TopK) are measured on the values that they point at in the reference. What is computed from other
    indices than the reference's is not measured.
    """
    onnx_model = onnx_files.read_model(model)
    # Only outputs of the session are measured, so no other index is looked at.
    indices = {name: pointer for name, pointer in pointers(onnx_model.graph).items() if name in session.outputs}
    data = [pointer.data for pointer in indices.values()]
    chosen = choices(onnx_model.graph)
    runnable = convert.runnable(onnx_model)
    # As it is written, without optimisations: the graph is judged, not another runtime.
    reference = OnnxRuntime().open(runnable, list(dict.fromkeys([*session.outputs, *data])))
    total: dict[str, Distance] = {}
    left_out: dict[str, list[set[str]]] = {}
    ran = 0
    for feed in feeds:
        if not session.admits(feed):
            continue
        ran += 1
        expected = {**feed, **reference.run(feed)}
        actual = session.run(feed)
        other_choices = chosen.differing(expected, actual)
        for name in session.outputs:
            if name not in expected:
                continue
            total.setdefault(name, Distance())
            followed = chosen.followed(name, other_choices)
            if followed:
                left_out.setdefault(name, []).append(followed)
            else:
                sides: Sequence[Any] = (expected[name], actual[name])
                if name in indices and np.shape(sides[0]) == np.shape(sides[1]):
                    sides = resolved(indices[name], expected, sides)
                total[name] += diff_arrays(*sides)
    return BackendDistances(total, types_of(reference), ran, len(feeds) - ran, chosen, left_out)


def _measure_inner(
    backend: Backend, model: Path, inner: Sequence[str], feeds: Sequence[Feed], whole: BackendDistances
) -> tuple[BackendDistances, list[str]]:
    """The inner values that the backend gives, and a note about those that it does not give.

    To read a value may change what the runtime computes, not only how it fuses: openvino's int8 kernels go wrong where
    a convolution's output is read beside the Relu behind it. So the outputs must stay what they are without taps.
    """
    nothing = BackendDistances({}, {}, 0, 0)
    fused = _fused_away(model)
    without_fused = [name for name in inner if name not in fused]
    # With all of them first: most runtimes read any value without harm.
    for wanted in (inner, without_fused):
        if not wanted:
            return nothing, []
        try:
            tapped = BackendSession(backend, model, wanted)
            if not set(wanted) & set(tapped.outputs):
                return nothing, [f"{backend.name} gives no inner values: only the outputs were compared."]
            measured = measure(model, tapped, feeds)
        except StageError as error:
            return nothing, [f"Only the outputs were compared. With inner values: {error}"]
        if not _is_disturbed(whole, measured):
            count = len(measured.distances.keys() & set(inner))
            note = "Inner values were measured in a second session, which may fuse less."
            if count < len(inner):
                note += f" {backend.name} gives {count} of {len(inner)}."
            return measured, [note]
    return nothing, [
        f"Only the outputs were compared: {backend.name} computes other outputs where inner values are read."
    ]


def _is_disturbed(whole: BackendDistances, tapped: BackendDistances) -> bool:
    """Whether the outputs of a session with taps are further from those without than other roundings take them."""
    for name, before in whole.distances.items():
        after = tapped.distances.get(name, before)
        if whole.unseen(name):
            continue  # perhaps the two sessions only choose other elements of equal size
        # Other roundings move an output by about as much again; a wrong kernel moves it by its own size.
        if after.one_sided > before.one_sided or after.rel_l2 > max(4 * before.rel_l2, 0.1):
            return True
    return False


def _fused_away(model: Path) -> set[str]:
    """Values between a product and the elementwise operator behind it, which a runtime never stores."""
    fused = set[str]()
    for node in onnx_files.read_model(model).graph:
        if node.op_type not in _PRODUCTS:
            continue
        readers = [use.node.op_type for use in node.outputs[0].uses()]
        if len(readers) == 1 and readers[0] in ELEMENTWISE:
            fused.add(first_output(node))
    return fused


def _outside(whole: BackendDistances) -> list[str]:
    if not whole.outside:
        return []
    return [f"{quantity(whole.outside, 'probe lies', 'probes lie')} outside of every profile, and did not run."]
