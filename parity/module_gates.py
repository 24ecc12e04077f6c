"""Gates on the module itself: a later call gives what a first one gives, and it gives what the ema stage recorded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from layerline.backends.base import Array
from layerline.compare.tensor_distance import diff_arrays
from layerline.export import kept_state
from layerline.export.example_call import Call, place_of
from layerline.export.probe_files import Probe
from layerline.graph.io.module_identity import source
from layerline.parity.module_runs import outputs_or_error
from layerline.pipeline.report import Gate

# Greatest relative L2 distance of a later call, or of another machine: kernels may round differently.
LIMIT = 1e-4
# Relative L2 error up to which the fast path and the layers differ by rounding alone.
FASTPATH_LIMIT = 1e-3
_CHANGED = "was model() changed?"


def state_gate(call: Call, probes: Sequence[Probe], root: Path) -> tuple[list[Gate], list[str]]:
    """Compares a later call with a first call on every probe.

    Args:
        root: the project's folder, for source lines.

    Returns:
        The gate, if it failed, and notes; both empty when no attribute changes.
    """
    if isinstance(call.first, str):
        return [], [f"cannot check whether forward() keeps state: copying the module failed with {call.first}"]
    owners = {**call.keeps, **kept_state.changed(call.first, call.module)}
    # No attribute changes, so a later call computes what the first one did.
    if not owners:
        return [], []
    names = ", ".join(f"{name!r} ({_where(name, owner, root)})" for name, owner in owners.items())
    later = call.pristine()
    # Whatever a call leaves behind is there from now on.
    call.run(call.feed, later)
    difference = ""
    for probe in probes:
        difference = difference or _difference(call, later, probe)
    if not difference:
        return [], [f"forward() changes the attribute {names}; later calls give the same outputs on every probe"]
    failed = Gate(
        "module keeps no state",
        False,
        f"forward() changes the attribute {names}, and {difference}",
        "a later call gives what a first call gives",
        "keep no state: compute it from the inputs on every call, in __init__, or make it an input and an output",
    )
    return [failed], []


def _difference(call: Call, later: nn.Module, probe: Probe) -> str:
    """What differs in a later call, in words; empty where nothing does."""
    first = _seeded(call, None, probe)
    again = _seeded(call, later, probe)
    if isinstance(first, str):
        return ""
    if isinstance(again, str):
        return f"a later call raises {again} ({probe.label})"
    for name, output in again.items():
        distance = diff_arrays(first[name], output)
        if distance.mismatch or distance.one_sided or distance.rel_l2 > LIMIT:
            amount = distance.mismatch or f"relative L2 {distance.rel_l2:.1e}"
            return f"{name} differs in a later call ({probe.label}): {amount}"
    return ""


def _seeded(call: Call, module: nn.Module | None, probe: Probe) -> Mapping[str, Array] | str:
    # The same seed for both calls: a module that draws numbers must not differ for that reason.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return outputs_or_error(call, probe.feed, module)


def _where(name: str, owner: nn.Module, root: Path) -> str:
    """The module that holds an attribute, and the line of its forward() that sets it, where there is one."""
    path, _, attribute = name.rpartition(".")
    module = place_of(path)
    try:
        lines, first = inspect.getsourcelines(type(owner).forward)
        file = inspect.getsourcefile(type(owner)) or ""
    except (OSError, TypeError):
        return module
    # An assignment (also of an element, or with an operator), or a method call such as .append().
    sets = re.compile(rf"\.{re.escape(attribute)}\b(\[.*\])?\s*([-+*/|&@]?=(?!=)|\.\w+\()")
    for number, line in enumerate(lines, first):
        if sets.search(line):
            return f"{module}, {source([(file, number)], root)}"
    return module


def golden_gates(stored: Mapping[str, Array], call: Call, random_op: str = "", *, fast: bool = False) -> list[Gate]:
    """One gate per output; none if nothing was recorded.

    Args:
        stored: recorded tensors, as `inputs/<name>` and `outputs/<name>`.
        random_op: an operator of the module that draws at random, for the hint.
        fast: whether torch's fast path was open when the outputs were recorded.
    """
    if not stored:
        return []
    recorded = [key.removeprefix("inputs/") for key in stored if key.startswith("inputs/")]
    if set(recorded) != call.feed.keys():
        actual = f"recorded for the inputs {', '.join(recorded)}; forward() takes {', '.join(call.feed)}"
        return [Gate("golden outputs", False, actual, "the same inputs", "was model() or the example changed?")]
    feed = {name: stored[f"inputs/{name}"] for name in call.feed}
    fast = fast and fastpath_taken(call.module)
    outputs: Mapping[str, Array] = call.results
    if fast or any(not _same(feed[name], example) for name, example in call.feed.items()):
        with fastpath_switched(on=fast):
            outputs = call.run(feed)
    errors: dict[str, float] = {}
    missing: list[str] = []
    for name, output in outputs.items():
        key = f"outputs/{name}"
        plain = name.removesuffix("_out")
        if key not in stored and plain in call.feed:
            key = f"outputs/{plain}"  # an output that is named like an input was recorded without `_out`
        if key in stored:
            errors[name] = diff_arrays(stored[key], output).rel_l2
        else:
            missing.append(name)
    # A second run costs time, so it is made only where an output differs.
    again: Mapping[str, Array] = outputs
    if any(error > LIMIT for error in errors.values()):
        again = call.run(feed)
    expected = f"at most {LIMIT:.0e}"
    results = []
    for name, error in errors.items():
        hint = _CHANGED
        if not _same(again[name], outputs[name]):
            hint = f"non-deterministic op {random_op}".rstrip()
            hint += ": the model differs from itself on the same input; remove it, or give what it draws as an input"
        results.append(Gate(f"golden {name}", error <= LIMIT, f"relative L2 {error:.1e}", expected, hint))
    unrecorded = "no answer was recorded for it"
    return results + [Gate(f"golden {name}", False, unrecorded, expected, _CHANGED) for name in missing]


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@contextmanager
def fastpath_switched(*, on: bool) -> Iterator[bool]:
    """Inside, torch's eval fast path of nn.TransformerEncoder is on or off. Yields whether it was on before."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    try:
        yield before
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def fastpath_taken(module: nn.Module) -> bool:
    """Whether a part of the module has such a path."""
    return any(isinstance(m, nn.TransformerEncoderLayer | nn.MultiheadAttention) for m in module.modules())


def fastpath_notes(call: Call, probes: Sequence[Probe]) -> list[str]:
    """That the exported layers differ from the fast path, on the first probe where they do."""
    if not fastpath_taken(call.module):
        return []
    # As users of the module get it, unless they switch it off.
    with fastpath_switched(on=True):
        for probe in probes:
            fast = call.run(probe.feed)
            apart = max(diff_arrays(fast[name], output).rel_l2 for name, output in probe.outputs.items())
            if apart > FASTPATH_LIMIT:
                note = (
                    "the module is exported and compared without torch's eval fast path, which writes 0 where "
                    f"src_key_padding_mask hides a position: with it the outputs differ by {apart:.1e} "
                    f"({probe.label}). In torch, torch.backends.mha.set_fastpath_enabled(False) gives what the ONNX "
                    "gives"
                )
                return [note]
    return []
