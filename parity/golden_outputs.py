"""The gate on golden outputs: the module, as loaded here, must give what the ema stage recorded."""

from __future__ import annotations

from collections.abc import Mapping

from layerline.backends.base import Array, Feed
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
    with eval_fastpath.switched(on=fast):
        outputs = _outputs(call, feed, fast=fast)
    errors: dict[str, float] = {}
    missing: list[str] = []
    for name, output in outputs.items():
        key = f"outputs/{_recorded_name(name, call, stored)}"
        if key in stored:
            errors[name] = diff_arrays(stored[key], output).rel_l2
        else:
            missing.append(name)
    random: set[str] = set()
    if any(error > LIMIT for error in errors.values()):
        random = _random_outputs(call, feed, outputs)
    expected = f"at most {LIMIT:.0e}"
    results = []
    for name, error in errors.items():
        hint = _random_hint(random_op) if name in random else _CHANGED
        results.append(Gate(f"golden {name}", error <= LIMIT, f"relative L2 {error:.1e}", expected, hint))
    unrecorded = "no answer was recorded for it"
    return results + [Gate(f"golden {name}", False, unrecorded, expected, _CHANGED) for name in missing]


def _outputs(call: Call, feed: Feed, *, fast: bool) -> Mapping[str, Array]:
    """The module's outputs on the recorded inputs; those of the example, if it is the same."""
    same = True
    for name, example in call.feed.items():
        same = same and (feed[name].shape, feed[name].tobytes()) == (example.shape, example.tobytes())
    if same and not fast:
        return call.results
    return call.run(feed)


def _random_outputs(call: Call, feed: Feed, outputs: Mapping[str, Array]) -> set[str]:
    """Outputs that differ between two runs on one input."""
    again = call.run(feed)
    return {name for name, output in outputs.items() if again[name].tobytes() != output.tobytes()}


def _random_hint(random_op: str) -> str:
    op = f"non-deterministic op {random_op}".rstrip()
    return f"{op}: the model differs from itself on the same input; remove it, or give what it draws as an input"


def _recorded_name(output: str, call: Call, stored: Mapping[str, Array]) -> str:
    """The name under which an output was recorded, which lacks the `_out` of one that is named like an input."""
    plain = output.removesuffix("_out")
    if f"outputs/{output}" not in stored and plain in call.feed:
        return plain
    return output
