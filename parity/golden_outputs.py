"""The gate on golden outputs: the module, as loaded here, must give what the ema stage recorded."""

from __future__ import annotations

from collections.abc import Mapping

from layerline.backends.base import Array
from layerline.compare.tensor_distance import diff_arrays
from layerline.export import eval_fastpath
from layerline.export.example_call import Call
from layerline.pipeline.report import Gate

LIMIT = 1e-4
"""Greatest relative L2 error against a golden output: another machine may round differently, no more."""
_CHANGED = "was model() changed?"


def gates(stored: Mapping[str, Array], call: Call, random_op: str = "", *, fast: bool = False) -> list[Gate]:
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
    fast = fast and eval_fastpath.taken(call.module)
    outputs: Mapping[str, Array] = call.results
    if fast or any(not _same(feed[name], example) for name, example in call.feed.items()):
        with eval_fastpath.switched(on=fast):
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
