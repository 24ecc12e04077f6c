"""export: the weights as ONNX, every value compared with torch at the example size and at every other size it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from layerline.pipeline.errors import StageError, TaskError
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Gate, LayerDiff, Report
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import Task

if TYPE_CHECKING:
    from torch import nn

    from layerline.backends.base import Feed
    from layerline.export.dynamic_axes import Axes
    from layerline.export.example_call import Call
    from layerline.export.probe import Probe
    from layerline.parity.default_session import Shipped
    from layerline.parity.parity import Parity
    from layerline.parity.probe_inputs import Prober
    from layerline.parity.value_verdicts import Within
    from layerline.training.run.shipping import Example


GOLDEN = 1e-4
"""Greatest relative L2 error of the module against its golden outputs: another machine may round otherwise, no more."""


class _Field(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Axis(_Field):
    """A dynamic axis; `batch` alone is short for `{name: batch}`."""

    name: str
    """Axes of one name have one size."""
    min: PositiveInt | None = None
    """Smallest size; found out where it is left open."""
    max: PositiveInt | None = None
    """Greatest size, which becomes the upper bound of the engine's profiles."""
    multiple: PositiveInt = 1
    """Every size is a multiple of this."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        return {"name": raw} if isinstance(raw, str) else raw


class Tolerance(_Field):
    """|onnx - torch| <= atol + rtol |torch|, for every element of every value."""

    rtol: float = Field(default=1e-3, ge=0)
    atol: float = Field(default=1e-5, ge=0)


class Range(_Field):
    """Values that an integer input takes, both ends included."""

    low: int
    high: int


class Export(Stage):
    """Exports through torch.export and proves the result on probes, which later stages reuse."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 5
    takes: ClassVar[Mapping[str, str]] = {"weights": "weights"}
    gives: ClassVar[str] = "onnx"
    uses: ClassVar[tuple[str, ...]] = ("model", "example_inputs", "eval_data", "train_data", "calib_data")
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (uses[1:], ("eval_data", "train_data"))
    env: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnxscript", "onnxruntime")

    opset: int = Field(default=20, ge=18)
    """Version of ONNX's operators."""
    dynamic: dict[str, dict[int, Axis]] = Field(default_factory=dict)
    """Axes that change size, by input and axis: `{x: {0: batch}}`."""
    ranges: dict[str, Range] = Field(default_factory=dict)
    """What integer inputs may hold, by input: `{ids: {low: 0, high: 30521}}`. Masks of 0 and 1 are also padded on the
    right and the left, unless their range has one value (`{attention_mask: {low: 1, high: 1}}`, whatever the example
    holds)."""
    tolerance: Literal["auto"] | Tolerance = "auto"
    """auto: within a stated multiple of torch's own float32 error, measured per value; or
    `{rtol: 1.0e-3, atol: 1.0e-5}` for every element of every value."""
    probes: int = Field(default=4, ge=0)
    """Samples of the eval (else training) data to compare on, beside the example and the other sizes."""

    def run(self, work: Work) -> Report:
        from layerline.compare import noise_floor
        from layerline.export import declared_shapes, probe_files
        from layerline.export.dynamic_axes import settle
        from layerline.export.onnx_signature import signature
        from layerline.graph.io import onnx_files

        prober, found, gates, result = self._prove(work)
        light = prober.traced.light
        settle(light.model, prober.axes, [(p.feed, p.outputs) for p in found])
        declared_shapes.correct(light.model, result.shapes)
        onnx_files.save(light, work.out)
        probe_files.save(work.out, [p.feed for p in found])
        noise_floor.save(work.out, result.floors)
        signature(light, prober.dims, prober.integers).save(work.out)
        default = _as_users_do(work, found, result)
        prober.notes += default.notes
        return _report(self, prober, result, [*gates, *default.gates])

    def debug(self, work: Work, folder: Path) -> LayerDiff | None:
        """Writes the smallest ONNX that shows the first bad value, with inputs, to `folder`; None where all is good.

        Raises:
            StageError: every value passes, and a gate fails: no part of the ONNX is at fault.
        """
        from layerline.parity.repro import reproduce

        prober, found, gates, result = self._prove(work)
        bad = reproduce(prober.traced, found, result.rows, folder)
        failed = [g for g in (*gates, *result.gates) if not g.passed]
        if bad is None and failed:
            raise _at_the_gates(failed)
        return bad

    def _prove(self, work: Work) -> tuple[Prober, list[Probe], list[Gate], Parity]:
        from layerline.export import eval_fastpath

        with eval_fastpath.switched(on=False) as fast:
            return self._compare(work, fast=fast)

    def _compare(self, work: Work, *, fast: bool) -> tuple[Prober, list[Probe], list[Gate], Parity]:
        from layerline.export import eval_fastpath, random_values
        from layerline.export.torch_export import trace
        from layerline.graph.io import module_identity
        from layerline.parity import state_gate
        from layerline.parity.parity import parity
        from layerline.parity.probe_inputs import Prober

        call, axes = self._call(_module(work), work.task)
        integers = _ranges(self.ranges, call)  # before the trace, which may take minutes
        work.log.say(f"exporting {type(call.module).__name__} at opset {self.opset}")
        traced = trace(call, axes, self.opset, work.task.path.parent)
        prober = Prober(call=call, axes=axes, traced=traced, integers=integers)
        found = prober.probes(_samples(work, call, self.probes), self.probes)
        nodes, values = len(traced.model.graph.node), len(traced.nodes)
        work.log.say(f"{nodes} nodes; comparing {values} values on {len(found)} feeds")
        result = parity(traced, found, rule := _rule(self.tolerance))
        failed = {g.name for g in result.gates if not g.passed}
        more = prober.narrower([p for p in found if p.gate in failed])
        if not failed and all(r.passed for r in result.rows):
            more = prober.deeper(found, work.task.path.parent)
        if more:
            result = parity(traced, found := [*found, *more], rule)
        result = replace(result, gates=prober.explained(result.gates, found))
        kept, notes = state_gate.gate(call, found, work.task.path.parent)
        prober.notes += [*notes, *(eval_fastpath.notes(call, found) if fast else [])]
        random = random_values.first(traced.program, traced.nodes, module_identity.sources(traced.model))
        return prober, found, [*_golden(work, call, random, fast=fast), *kept], result

    def check(self, look: Inspection) -> None:
        from layerline.export.example_call import refuse_training
        from layerline.export.torch_export import refuse_opset
        from layerline.parity import early_checks

        with look.item("export.opset"):
            refuse_opset(self.opset)
        with look.item("export.dynamic"):
            module, example = look.need("network"), look.need("example")
            refuse_training(module)
            call, axes = self._call(module, look.task, example)
            early_checks.refuse_sizes(call, axes)
            told = ", ".join(f"{given} axis {axis} is {name}" for (given, axis), name in axes.names.items())
            look.ok("export.dynamic", told or "no axis changes its size")
            with look.item("export.ranges"):
                _ranges(self.ranges, call)
            with look.item("export"):
                signature, names, ops = early_checks.traced(call, axes, self.opset, look.root)
                look.shared["signature"], look.shared["names"], look.shared["ops"] = signature, names, ops
                look.shared["all names"] = early_checks.all_names(call, axes, self.opset, look.root)
                look.shared["run"] = lambda feed: [*call.run(feed).values()]
                look.ok("export", f"forward() can be traced; outputs {', '.join(call.outputs)}")

    def _call(self, module: nn.Module, task: Task, example: Example | None = None) -> tuple[Call, Axes]:
        """The module with its weights and an example that is large enough along every dynamic axis to trace with."""
        from layerline.export.dynamic_axes import Bounds, declare
        from layerline.export.example_call import call
        from layerline.training.data.batches import example_inputs

        first = call(module, *(example or example_inputs(task, forward=module.forward)))
        declared = {
            name: {i: (a.name, Bounds(min=a.min, max=a.max, multiple=a.multiple)) for i, a in axes.items()}
            for name, axes in self.dynamic.items()
        }
        axes = declare(first.feed, declared)
        grown = axes.grown(first.feed)
        if all(grown[n] is a for n, a in first.feed.items()):
            return first, axes
        try:
            return call(first.pristine(), *first.arguments(grown)), axes
        except TaskError as error:
            seen = ", ".join(f"{n}={axes.size(grown, n)}" for n in axes.bounds)
            raise TaskError(
                f"a size of one can't be traced as dynamic, and at {seen} {error.what}",
                where="example_inputs",
                hint="give an example of at least 2 there, or tie the other inputs' axes by the same name in `dynamic`",
            ) from error


def _at_the_gates(failed: Sequence[Gate]) -> StageError:
    told = "; ".join(f"{g.name}: {g.seen}, expected {g.expected}" for g in failed)
    return StageError(
        f"every inner value passes, so there is no smaller model to show; what fails is {told}",
        where="export",
        hint="; ".join(dict.fromkeys(g.hint for g in failed if g.hint)) or "see: pipe diff export",
    )


def _module(work: Work) -> nn.Module:
    """model() in eval mode with the artifact's weights."""
    from torch import nn

    from layerline.export.example_call import refuse_training
    from layerline.training.model import canonical_names
    from layerline.training.state import safetensors_io

    given = work.task.call("model")
    if not isinstance(given, nn.Module):
        raise TaskError(f"model() gave {type(given).__name__}, expected a torch.nn.Module", where="model")
    # float32 throughout: half precision is the quantize stage's decision, with a report of its cost.
    module = canonical_names.unwrap(given).float().eval()
    canonical_names.load(module, safetensors_io.load(work.inputs["weights"] / "model.safetensors")[0])
    refuse_training(module)
    return module


def _samples(work: Work, call: Call, count: int) -> Feed:
    """The first samples of the data behind the example's own, by input name; empty where there is no data."""
    from layerline.training.data.batches import first_samples

    hook = next((h for h in ("eval_data", "train_data") if work.task.has(h)), None)
    if hook is None or count == 0:
        return {}
    size = _batch(call)
    with work.task.blaming(f"{hook}()"):
        return call.named(*first_samples(work.task.call(hook), count + size, hook, call.module.forward))


def _ranges(declared: Mapping[str, Range], call: Call) -> dict[str, tuple[int, int]]:
    """Declared ranges by input; every name, type and bound checked against the example, and forward() run on them."""
    from layerline.export.example_call import check_range
    from layerline.parity.early_checks import refuse_ranges

    for name, r in declared.items():
        check_range(call, name, r.low, r.high)
    found = {name: (r.low, r.high) for name, r in declared.items()}
    refuse_ranges(call, found)
    return found


def _rule(tolerance: Literal["auto"] | Tolerance) -> Within | None:
    from layerline.parity.value_verdicts import Within

    return None if tolerance == "auto" else Within(rtol=tolerance.rtol, atol=tolerance.atol)


def _as_users_do(work: Work, probes: Sequence[Probe], result: Parity) -> Shipped:
    """The file in a default onnxruntime session, on the probes that the graph runs on as it is written."""
    from layerline.graph.io import onnx_files
    from layerline.parity import default_session

    pairs = [(p.feed, given) for p, given in zip(probes, result.outputs, strict=True) if given is not None]
    outputs = {name for _, given in pairs for name in given}
    return default_session.check(
        work.out / onnx_files.FILE,
        [feed for feed, _ in pairs],
        expected=[given for _, given in pairs],
        allowed=default_session.limits(result.floors, outputs),
        random=result.random,
    )


def _golden(work: Work, call: Call, draw: str = "", *, fast: bool = False) -> list[Gate]:
    """Whether the module, as loaded here, still gives what the ema stage recorded.

    Args:
        draw: a random operator, for the hint.
        fast: whether torch's fast path was open when it was recorded.
    """
    from layerline.compare.arrays import array
    from layerline.compare.tensor_distance import diff_arrays
    from layerline.export import eval_fastpath
    from layerline.training.state import safetensors_io

    path = work.inputs["weights"] / "golden.safetensors"
    stored = {k: array(v) for k, v in safetensors_io.load(path)[0].items()} if path.is_file() else {}
    if not stored:
        return []
    recorded = [k.removeprefix("inputs/") for k in stored if k.startswith("inputs/")]
    if set(recorded) != call.feed.keys():
        other = f"recorded for the inputs {', '.join(recorded)}; forward() takes {', '.join(call.feed)}"
        return [Gate("golden outputs", False, other, "the same inputs", "was model() or the example changed?")]
    feed = {n: stored[f"inputs/{n}"] for n in call.feed}
    same = all((feed[n].shape, feed[n].tobytes()) == (a.shape, a.tobytes()) for n, a in call.feed.items())
    fast = fast and eval_fastpath.taken(call.module)
    with eval_fastpath.switched(on=fast):
        outputs = call.results if same and not fast else call.run(feed)
    keys = {n: f"outputs/{_recorded(n, call, stored)}" for n in outputs}
    missing = [n for n, key in keys.items() if key not in stored]
    errors = {n: diff_arrays(stored[keys[n]], a).rel_l2 for n, a in outputs.items() if n not in missing}
    seen, limit = {n: f"relative L2 {e:.1e}" for n, e in errors.items()}, f"at most {GOLDEN:.0e}"
    again = outputs if all(e <= GOLDEN for e in errors.values()) else call.run(feed)
    random = {n for n, a in outputs.items() if again[n].tobytes() != a.tobytes()}
    told = f"non-deterministic op{f' {draw}' if draw else ''}: the model differs from itself on the same input"
    hint = dict.fromkeys(random, f"{told}; take it out, or give what it draws as an input")
    return [
        *(
            Gate(f"golden {n}", e <= GOLDEN, seen[n], limit, hint.get(n, "was model() changed?"))
            for n, e in errors.items()
        ),
        *(Gate(f"golden {n}", False, "no answer was recorded for it", limit, "was model() changed?") for n in missing),
    ]


def _recorded(output: str, call: Call, stored: Mapping[str, Any]) -> str:
    """The name under which an output was recorded: one that is called like an input has `_out` behind it here."""
    plain = output.removesuffix("_out")
    return plain if f"outputs/{output}" not in stored and plain in call.feed else output


def _report(stage: Export, prober: Prober, result: Parity, gates: list[Gate]) -> Report:
    from layerline.compare.noise_floor import LEAST, MULTIPLE
    from layerline.compare.threshold_flips import blamed
    from layerline.export.signature import bounds
    from layerline.graph.analysis.rounding_noise import unjudged

    sizes = bounds(prober.dims) if prober.axes.names else {"batch": f"fixed at {_batch(prober.call)}"}
    auto = stage.tolerance == "auto"
    judged = "a value passes where every element is within rtol and atol of torch float32"
    if auto:
        own = f"torch's own float32 error against float64 (at least {LEAST:.0e})"
        judged = f"a value passes within {MULTIPLE:g} times its floor, {own}"
    model = prober.traced.model
    rows = blamed(result.rows, model.graph)
    return Report(
        stage=stage.name,
        reference="torch float64" if auto else "torch float32",
        candidate="onnx on onnxruntime",
        records=rows,
        gates=(*gates, *result.gates),
        notes=(
            judged,
            *_first_off(rows),
            *_flipped(rows),
            *_no_tensors(prober.call),
            *_by_batch(prober.call.module),
            *_fixed(prober),
            *prober.notes,
            *result.notes,
        ),
        metrics={
            **unjudged(model.graph, {r.name: str(op) for r in rows if (op := r.extra.get("nondeterministic"))}),
            "nodes": len(model.graph.node),
            "values_compared": sum("nondeterministic" not in r.extra for r in rows),
            **sizes,
            "opset": stage.opset,
        },
    )


def _fixed(prober: Prober) -> list[str]:
    """That no size can change, which nobody may have meant."""
    name = next((n for n, a in prober.call.feed.items() if a.ndim), None)
    if prober.axes.names or name is None:
        return []
    size = _batch(prober.call)
    return [
        f"no axis is dynamic: the batch is fixed at {size}, the example's; `dynamic: {{{name}: {{0: batch}}}}` frees it"
    ]


def _batch(call: Call) -> int:
    return next((len(a) for a in call.feed.values() if a.ndim), 1)


def _no_tensors(call: Call) -> list[str]:
    """What of the arguments and results the ONNX has not, or has in another form."""
    fixed = [f"input {n} is no tensor: its value {v!r} is part of the graph" for n, v in call.fixed.items()]
    left = [
        f"output {n} is no tensor ({v!r} for the example): the ONNX does not give it" for n, v in call.left_out.items()
    ]
    pairs = [f"input {n} is complex: the ONNX takes (real, imaginary) on a last axis" for n in call.complex_inputs]
    return [*fixed, *left, *pairs]


def _by_batch(module: nn.Module) -> list[str]:
    """Normalisations by the batch at hand, which may be meant, and mostly is not."""
    from torch.nn.modules.batchnorm import _BatchNorm

    found = {n: m for n, m in module.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is None}
    return [
        f"module {path} ({type(m).__name__}) keeps no running statistics (track_running_stats=False): it normalises by "
        "the batch, so that what a sample gives depends on the others in its batch, and differs between batch sizes"
        for path, m in found.items()
    ]


def _flipped(rows: Sequence[LayerDiff]) -> list[str]:
    return [
        f"{r.extra['flips']} elements of {r.where} lie on the other side of a threshold than in torch: what they are "
        "made of lies within its own noise of it"
        for r in rows
        if r.extra.get("flips")
    ]


def _first_off(rows: Sequence[LayerDiff]) -> list[str]:
    """Where the difference starts, in a sentence, and what jumped on the way there."""
    first = next((r for r in rows if not r.passed), None)
    if first is None:
        return []
    where = ", ".join(filter(None, (first.module, str(first.extra.get("source") or ""))))
    why = first.extra.get("mismatch") or (f"{first.one_sided} one-sided NaN or Inf" if first.one_sided else None)
    allowance = "its floor" if first.judged == "rel_l2" else "what rtol and atol allow"
    why = why or f"relative L2 {first.rel_l2:.1e} is {first.extra['ratio']:.1f} times {allowance}"
    told = f"it starts at {first.name} ({where}): {why}; `pipe debug export` writes the smallest model that shows it"
    return [told, *filter(None, [str(first.extra.get("cause") or "")])]
