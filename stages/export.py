"""export: the weights as ONNX, every value compared with torch at the example size and at every other size it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from layerline.pipeline.config.field_types import Axis, Fields, Range
from layerline.pipeline.errors import StageError, TaskError
from layerline.pipeline.inspection import Inspection
from layerline.pipeline.report import Gate, LayerDiff, Report
from layerline.pipeline.stage import Stage, Work
from layerline.pipeline.task import EXAMPLE_HOOKS, Task
from layerline.pipeline.wording import quantity

if TYPE_CHECKING:
    from torch import nn

    from layerline.backends.base import Array, Feed
    from layerline.export.dynamic_axes import Axes
    from layerline.export.example_call import Call
    from layerline.export.probe_files import Probe
    from layerline.parity.parity import Parity
    from layerline.parity.probe_inputs import Prober
    from layerline.training.run.shipping import Example


class Tolerance(Fields):
    """|onnx - torch| <= atol + rtol |torch|, for every element of every value."""

    rtol: float = Field(default=1e-3, ge=0)
    atol: float = Field(default=1e-5, ge=0)


class Export(Stage):
    """Exports through torch.export and proves the result on probes, which later stages reuse."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 5
    takes: ClassVar[Mapping[str, str]] = {"weights": "weights"}
    gives: ClassVar[str] = "onnx"
    uses: ClassVar[tuple[str, ...]] = ("model", *EXAMPLE_HOOKS)
    first_of: ClassVar[tuple[tuple[str, ...], ...]] = (EXAMPLE_HOOKS, ("eval_data", "train_data"))
    env: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnxscript", "onnxruntime")

    opset: int = Field(default=20, ge=18)
    """Version of ONNX's operators."""
    dynamic: dict[str, dict[int, Axis]] = Field(default_factory=dict)
    """Axes that change size, by input and axis: `{x: {0: batch}}`."""
    ranges: dict[str, Range] = Field(default_factory=dict)
    """What integer inputs may hold, by input: `{ids: [0, 30521]}`. Masks of 0 and 1 are also padded on the
    right and the left, unless their range has one value (`{attention_mask: [1, 1]}`, whatever the example
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
        from layerline.export.signature import signature
        from layerline.graph.io import onnx_files
        from layerline.parity import default_session
        from layerline.parity.export_report import report

        prober, probes, gates, result = self._compare(work)
        model = prober.traced.model
        # The exporter may declare sizes of outputs and inner values that do not hold at every size.
        settle(model, prober.axes, [(probe.feed, probe.outputs) for probe in probes])
        declared_shapes.correct(model, result.shapes)
        onnx_files.save(model, work.out)
        probe_files.save(work.out, [probe.feed for probe in probes])
        noise_floor.save(work.out, result.floors)
        signature(model, prober.dims, prober.integers).save(work.out)
        # A default session, as users open it, on the probes that it runs on unoptimised; the others fail a gate.
        ran = [(p.feed, outputs) for p, outputs in zip(probes, result.outputs, strict=True) if outputs is not None]
        expected = [outputs for _, outputs in ran]
        allowed = default_session.limits(model, result.floors, expected[0] if expected else ())
        session_gates, session_notes = default_session.check(
            work.out / onnx_files.FILE, [feed for feed, _ in ran], expected=expected, allowed=allowed
        )
        prober.notes += session_notes
        return report(self.name, self.opset, prober, result, [*gates, *session_gates], auto=self.tolerance == "auto")

    def debug(self, work: Work, folder: Path) -> LayerDiff | None:
        """Writes the smallest ONNX that shows the first bad value, with inputs, to `folder`; None if there is none.

        Raises:
            StageError: every value passes, and a gate fails: no part of the ONNX is at fault.
        """
        from layerline.parity.repro import reproduce

        prober, probes, gates, result = self._compare(work)
        bad = reproduce(prober.traced, probes, result.rows, folder)
        failed = [gate for gate in (*gates, *result.gates) if not gate.passed]
        if bad is None and failed:
            gates_seen = "; ".join(f"{gate.name}: {gate.seen}, expected {gate.expected}" for gate in failed)
            hints = dict.fromkeys(gate.hint for gate in failed if gate.hint)
            raise StageError(
                f"every inner value passes, so there is no smaller model to show; these gates fail: {gates_seen}",
                where="export",
                hint="; ".join(hints) or "see: pipe diff export",
            )
        return bad

    def _compare(self, work: Work) -> tuple[Prober, list[Probe], list[Gate], Parity]:
        """Exports the module and compares the ONNX with it, without torch's eval fast path."""
        from layerline.parity import module_gates

        with module_gates.fastpath_switched(on=False) as was_on:
            prober, probes, result = self._prove(work)
            notes, gates = self._check_module(work, prober, probes, fast=was_on)
            prober.notes += notes
            return prober, probes, gates, result

    def _prove(self, work: Work) -> tuple[Prober, list[Probe], Parity]:
        """Compares every value on all probes; adds probes while they tell more."""
        from layerline.export.torch_export import trace
        from layerline.parity.parity import parity
        from layerline.parity.probe_inputs import Prober
        from layerline.parity.value_verdicts import Within

        root = work.task.path.parent
        call, axes = self._call(_module(work), work.task)
        integers = _ranges(self.ranges, call)  # before the trace, which may take minutes
        work.log.say(f"exporting {type(call.module).__name__} at opset {self.opset}")
        traced = trace(call, axes, self.opset, root)
        prober = Prober(call, axes, traced, integers)
        probes = prober.probes(_samples(work, call, self.probes), self.probes)
        nodes, values = len(traced.model.graph), len(traced.nodes)
        work.log.say(
            f"{quantity(nodes, 'node')}; comparing {quantity(values, 'value')} on {quantity(len(probes), 'feed')}"
        )
        rule = None
        if self.tolerance != "auto":
            # Absolute bounds in place of the measured noise floor.
            rule = Within(rtol=self.tolerance.rtol, atol=self.tolerance.atol)
        result = parity(traced, probes, rule)
        # A failure with several axes at once does not say which of them is at fault.
        failed = {gate.name for gate in result.gates if not gate.passed}
        more = prober.narrower([probe for probe in probes if probe.gate in failed])
        # Behind a branch that gives the same, forward() may branch again.
        if not failed and all(row.passed for row in result.rows):
            more = prober.guards.deeper(probes, root)
        if more:
            probes = [*probes, *more]
            result = parity(traced, probes, rule)
        # Where the example fails as well, no branch on sizes is the cause.
        if any(gate.passed for gate in result.gates):
            result = replace(result, gates=prober.guards.explained(result.gates, probes))
        return prober, probes, result

    def _check_module(
        self, work: Work, prober: Prober, probes: Sequence[Probe], *, fast: bool
    ) -> tuple[list[str], list[Gate]]:
        """Notes and gates about the module itself: does it keep state, and give what the ema stage recorded?"""
        from layerline.compare.arrays import array
        from layerline.export import program_queries
        from layerline.graph.io import module_identity
        from layerline.parity import module_gates
        from layerline.training.state import safetensors_io

        call, traced = prober.call, prober.traced
        state_gates, notes = module_gates.state_gate(call, probes, work.task.path.parent)
        if fast:
            notes = [*notes, *module_gates.fastpath_notes(call, probes)]
        random_op = program_queries.first_drawn(traced.program, traced.nodes, module_identity.sources(traced.model))
        golden: dict[str, Array] = {}  # inputs and outputs that came with the weights
        path = work.inputs["weights"] / "golden.safetensors"
        if path.is_file():
            golden = {key: array(tensor) for key, tensor in safetensors_io.load(path)[0].items()}
        golden_gates = module_gates.golden_gates(golden, call, random_op, fast=fast)
        return notes, [*golden_gates, *state_gates]

    def check(self, look: Inspection) -> None:
        from layerline.export.example_call import refuse_training
        from layerline.export.torch_export import refuse_opset
        from layerline.parity import early_checks

        with look.item("export.opset"):
            refuse_opset(self.opset)
        with look.item("export.dynamic"):
            module, example = look.need("network"), look.need("example")
            refuse_training(module)
            # With the untrained module: its graph is the same as that of the trained one.
            call, axes = self._call(module, look.task, example)
            early_checks.refuse_sizes(call, axes)
            places = [f"{name} axis {axis} is {axis_name}" for (name, axis), axis_name in axes.names.items()]
            look.ok("export.dynamic", ", ".join(places) or "no axis changes its size")
            with look.item("export.ranges"):
                _ranges(self.ranges, call)
            with look.item("export"):
                signature, names, ops = early_checks.traced(call, axes, self.opset, look.root)
                look.shared["signature"], look.shared["names"], look.shared["ops"] = signature, names, ops
                # Made on demand: it takes another pass over the program.
                look.shared["all names"] = early_checks.all_names(call, axes, self.opset, look.root)
                look.shared["run"] = lambda feed: [*call.run(feed).values()]
                look.ok("export", f"forward() can be traced; outputs {', '.join(call.outputs)}")

    def _call(self, module: nn.Module, task: Task, example: Example | None = None) -> tuple[Call, Axes]:
        """The module, called on an example with at least two steps along every dynamic axis, as tracing needs."""
        from layerline.export.dynamic_axes import declare
        from layerline.export.example_call import call
        from layerline.training.data.batches import example_inputs

        if example is None:
            example = example_inputs(task, forward=module.forward)
        first = call(module, *example)
        axes = declare(first.feed, self.dynamic)
        grown = axes.grown(first.feed)
        # Nothing had to grow.
        if all(grown[name] is array for name, array in first.feed.items()):
            return first, axes
        try:
            # A module that keeps state must see the larger example first.
            return call(first.pristine(), *first.arguments(grown)), axes
        except TaskError as error:
            sizes = ", ".join(f"{name}={axes.size(grown, name)}" for name in axes.bounds)
            raise TaskError(
                f"a size of one can't be traced as dynamic, and at {sizes} {error.what}",
                where="example_inputs",
                hint="give an example of at least 2 there, or tie the other inputs' axes by the same name in `dynamic`",
            ) from error


def _module(work: Work) -> nn.Module:
    """model() in eval mode with the artifact's weights."""
    from layerline.export.example_call import refuse_training
    from layerline.training.model import canonical_names
    from layerline.training.run.shipping import module_of
    from layerline.training.state import safetensors_io

    # float32 throughout: half precision is the quantize stage's decision, with a report of its cost.
    module = canonical_names.unwrap(module_of(work.task)).float().eval()
    weights, _ = safetensors_io.load(work.inputs["weights"] / "model.safetensors")
    canonical_names.load(module, weights)
    refuse_training(module)
    return module


def _samples(work: Work, call: Call, count: int) -> Feed:
    """The first samples of the data behind the example's own, by input name; empty if there is no data."""
    from layerline.parity.export_report import batch_size
    from layerline.training.data.batches import first_samples

    if count == 0:
        return {}
    # Samples as the model will meet them; training data may be augmented.
    for hook in ("eval_data", "train_data"):
        if work.task.has(hook):
            total = count + batch_size(call)
            with work.task.blaming(f"{hook}()"):
                return call.named(*first_samples(work.task.call(hook), total, hook, call.module.forward))
    return {}


def _ranges(declared: Mapping[str, Range], call: Call) -> dict[str, tuple[int, int]]:
    """Declared ranges by input; every name, type and bound checked against the example, and forward() run on them."""
    from layerline.export.example_call import check_range
    from layerline.parity.early_checks import refuse_ranges

    ranges = {name: (values.low, values.high) for name, values in declared.items()}
    for name, (low, high) in ranges.items():
        check_range(call, name, low, high)
    refuse_ranges(call, ranges)
    return ranges
