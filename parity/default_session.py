"""What ships, run as its users run it: in a default onnxruntime session, with its rewrites and its memory re-use.

Comparisons elsewhere run a graph as it is written, so that they see the graph and not what a runtime makes of it.
Some models pass there and fail in a default session, or give other numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerline.backends.base import Array, Feed
from layerline.backends.cpu import int8_flag
from layerline.backends.light import Light
from layerline.backends.onnxruntime import OnnxRuntime
from layerline.compare import noise_floor
from layerline.compare.tensor_distance import diff_arrays
from layerline.compare.topk_indices import pointed_at, pointers
from layerline.compare.value_types import CODES, types_of
from layerline.export import declared_shapes
from layerline.graph.io import onnx_files
from layerline.graph.io.module_identity import modules
from layerline.parity.repro import region
from layerline.pipeline.errors import StageError
from layerline.pipeline.report import Gate

GATE = "default onnxruntime session"
LIMIT = 1e-4
"""Relative L2 error of an output that other kernels and another order of sums stay within."""
_EXPECTED = "runs every probe, and gives what the graph gives as it is written"
# They jump where a float crosses a threshold or a tie; so few elements may do so for another rounding alone.
FLIPS, FLIPPED_SHARE = 2, 0.01
_STEPS = frozenset("Round Floor Ceil Sign Greater GreaterOrEqual Less LessOrEqual Equal ArgMax ArgMin TopK".split())  # noqa: SIM905
_NUMBERS = frozenset(CODES) - {"bfloat16"}
_NO_INT8 = {"session.disable_quant_qdq": "1"}


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """What a default session makes of an artifact.

    Attributes:
        gates: one, which failed; none where all is well.
        notes: how far apart the outputs were, and what was put right or is excused.
    """

    gates: tuple[Gate, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Fault:
    """The first thing that went wrong: on which feed, where, and what."""

    feed: int
    what: str
    where: str = ""
    raised: bool = False


def limits(floors: Mapping[str, float], outputs: Collection[str]) -> dict[str, float]:
    """Greatest relative L2 error of each output: twice what parity allows one side, and at least LIMIT."""
    return {name: max(LIMIT, 2.0 * noise_floor.tolerance(floors.get(name, 0.0))) for name in outputs}


def check(
    path: Path,
    feeds: Sequence[Feed],
    *,
    allowed: Mapping[str, float],
    expected: Sequence[Mapping[str, Array]] | None = None,
    random: Collection[str] = (),
) -> Shipped:
    """Opens a saved model in a default session and runs it on every feed.

    Where it fails because shapes of inner values are declared wrong, they are put right in the file.

    Args:
        path: the model's file.
        feeds: arrays by input name.
        allowed: greatest relative L2 error by output; LIMIT for those left out.
        expected: what the graph gives as it is written, for each feed; run here where it isn't at hand.
        random: outputs that are drawn at random, which are not judged.
    """
    wanted = expected if expected is not None else _as_written(path, feeds)
    fault, worst = _run(path, feeds, wanted, allowed, random)
    notes: list[str] = []
    if fault is not None and (wrong := _corrected(path, feeds)):
        notes.append(f"the declared shape of {len(wrong)} inner values was wrong, first {wrong[0]}: put right")
        fault, worst = _run(path, feeds, wanted, allowed, random)
    if fault is not None and not fault.raised and int8_flag() == "":
        # Without VNNI, kernels that multiply u8 by s8 saturate: a property of this CPU, not of the model.
        float_fault, _ = _run(path, feeds, wanted, allowed, random, _NO_INT8)
        if float_fault is None:
            told = f"int8 kernels of a default session saturate on this CPU, which has no VNNI: {fault.what}"
            return Shipped(notes=(*notes, told))
    if fault is None:
        told = f"a default onnxruntime session gives the same on all {len(feeds)} feeds, within {worst:.1e}"
        return Shipped(notes=(*notes, told))
    where, flipped = _placed(path, feeds, fault)
    if flipped and not fault.raised:
        told = f"a default onnxruntime session differs from {where} on, where values lie next to a threshold"
        return Shipped(notes=(*notes, f"{told}: {fault.what}"))
    seen = f"feed {fault.feed} ({_told(feeds[fault.feed])}): {where}: {fault.what}"
    hint = "users who open the file without further options get this; leave the operator out, or report it to its maker"
    return Shipped(gates=(Gate(GATE, False, seen, _EXPECTED, hint),), notes=tuple(notes))


def _as_written(path: Path, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
    session = OnnxRuntime(few_runs=True).open(path)
    return [session.run(feed) for feed in feeds]


def _run(
    path: Path,
    feeds: Sequence[Feed],
    wanted: Sequence[Mapping[str, Array]],
    allowed: Mapping[str, float],
    random: Collection[str],
    config: Mapping[str, str] | None = None,
) -> tuple[_Fault | None, float]:
    """The first fault, and the greatest distance of an output."""
    worst = 0.0
    indices = pointers(onnx_files.read(path).model.graph)
    try:
        session = OnnxRuntime(defaults=True, config=config).open(path)
    except StageError as error:
        return _Fault(0, error.what, raised=True), worst
    for index, (feed, right) in enumerate(zip(feeds, wanted, strict=True)):
        try:
            found = session.run(feed)
        except StageError as error:
            return _Fault(index, error.what, raised=True), worst
        for name in (n for n in right if n in found and n not in random):
            apart = diff_arrays(right[name], found[name])
            if name in indices and apart.max_abs > 0 and not apart.mismatch:
                # Near ties may fall either way: what counts is how far the values they point at lie apart.
                source = indices[name].data
                values = {**feed, **OnnxRuntime(few_runs=True).open(path, [source]).run(feed)}
                apart = diff_arrays(*(pointed_at(indices[name], values[source], side[name]) for side in (right, found)))
            if apart.mismatch or apart.one_sided or apart.rel_l2 > allowed.get(name, LIMIT):
                what = apart.mismatch or f"relative L2 {apart.rel_l2:.1e}, {apart.one_sided} one-sided NaN or Inf"
                return _Fault(index, f"output {name} is off by {what}", name), worst
            worst = max(worst, apart.rel_l2)
    return None, worst


def _corrected(path: Path, feeds: Sequence[Feed]) -> list[str]:
    """Values whose declared shape was wrong; the file is written anew with shapes that hold on every feed."""
    light = onnx_files.parts(path)
    wrong = declared_shapes.correct(light.model, declared_shapes.measured(light, feeds))
    if wrong:
        onnx_files.save(light, path.parent)
    return wrong


def _placed(path: Path, feeds: Sequence[Feed], fault: _Fault) -> tuple[str, bool]:
    """Where it goes wrong: the node that the runtime names or the first bad one; and whether values flipped there."""
    light = onnx_files.parts(path)
    makers = {o: n for n in light.model.graph.node for o in n.output if o}
    named = next((n for n in light.model.graph.node if n.name and f"node {n.name}:" in fault.what), None)
    value, flips = (named.output[0], 0) if named is not None else _first_bad(light, feeds[fault.feed], fault)
    if value not in makers:
        return value or "the model", False
    node, module = makers[value], modules(light.model).get(value, "")
    where = f"{node.op_type} {node.name or value}" + (f", module {module}" if module else "")
    return where, node.op_type in _STEPS and flips > 0


def _first_bad(light: Light, feed: Feed, fault: _Fault) -> tuple[str, int]:
    """The first value, by halving, that a default session gets wrong where nothing behind it is left to compute.

    Also the number of its elements that are others, where they are few enough to be flips; 0 where they are not.
    """
    values: list[str] = [o for n in light.model.graph.node if n.op_type != "Constant" for o in n.output if o]
    try:
        session = OnnxRuntime(few_runs=True).open(light, values)
    except StageError:
        return fault.where, 0
    types, right = types_of(session), session.run(feed)
    values = [v for v in values if types[v][0] in _NUMBERS]

    def default(value: str) -> Array | None:
        part = region(light, value, {i.name for i in light.fed}, types)
        made = {o for n in part.model.graph.node for o in n.output}
        part.model.graph.value_info.extend(v for v in light.model.graph.value_info if v.name in made - {value})
        try:
            return OnnxRuntime(defaults=True).open(part).run({i.name: feed[i.name] for i in part.fed})[value]
        except StageError:
            return None

    def is_bad(value: str) -> bool:
        found = default(value)
        if found is None:
            return True
        apart = diff_arrays(right[value], found)
        return bool(apart.mismatch or apart.one_sided or apart.rel_l2 > LIMIT)

    good, bad = -1, len(values) - 1
    if not values or not is_bad(values[bad]):
        return fault.where, 0
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(values[middle]) else (middle, bad)
    other = default(values[bad])
    if other is None or other.shape != right[values[bad]].shape:
        return values[bad], 0
    changed = int((other != right[values[bad]]).sum())
    return values[bad], changed if changed <= max(FLIPS, FLIPPED_SHARE * other.size) else 0


def _told(feed: Feed) -> str:
    return ", ".join(f"{n} {tuple(a.shape)}" for n, a in feed.items())
