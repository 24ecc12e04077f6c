"""Runs an exported program in float32 and in float64, node by node, and frees values that are not needed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from layerline.backends.base import Array, Feed
from layerline.compare import noise_floor
from layerline.compare.arrays import array, tensor
from layerline.export.fake_quant import PER_CHANNEL, TARGETS
from layerline.export.program_queries import stored
from layerline.export.torch_export import Traced
from layerline.graph.analysis.ir_queries import names
from layerline.pipeline.errors import StageError

_WIDE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64) | dict.fromkeys(
    (torch.complex64, torch.complex32), torch.complex128
)


Settle = Callable[[fx.Node, int, dict[fx.Node, Any], dict[fx.Node, Any]], None]


class Twins(NamedTuple):
    """A node's value on one feed: as the program gives it, and with all floating-point numbers twice as wide."""

    feed: int
    single: Any
    double: Any


class Twin:
    """Runs a program twice in step, over several feeds at once, so that each weight is widened once and let go.

    Args:
        settle: called with each computed node, the index of the feed and both tables of values, in which it may put
            others in place of the node's: everything behind it is computed from those.

    Attributes:
        notes: nodes that have no float64 form; there the float32 operator was run on the float64 inputs.
        refused: feeds the program can't run on, by index, with the node and the reason.
    """

    def __init__(self, program: ExportedProgram, settle: Settle | None = None) -> None:
        self.program = program
        self.settle = settle
        self.notes: dict[str, str] = {}
        self.refused: dict[int, StageError] = {}
        # The last reader of each node; its value is freed then.
        self._last = {n: user for user in program.graph.nodes for n in user.all_input_nodes}

    def values(self, feeds: Sequence[Feed]) -> Iterator[tuple[str, list[Twins]]]:
        """Every node that computes something, in order, with its value on every feed that got this far."""
        graph = self.program.graph_module
        # All feeds go through the program together, node by node: a weight is widened once and let go.
        runs = {i: (_Plain(graph), _Double(graph)) for i in range(len(feeds))}
        constants = stored(self.program)
        inputs = {i: iter(feed.values()) for i, feed in enumerate(feeds)}
        for node in self.program.graph.nodes:
            if node.op == "output":
                return
            if node.op == "placeholder":
                meta = node.meta.get("val")
                pairs = isinstance(meta, Tensor) and meta.is_complex()
                for i, (single, _) in runs.items():
                    if node.name in constants:
                        single.env[node] = constants[node.name]
                    else:
                        single.env[node] = tensor(next(inputs[i]), complex_pairs=pairs)
                continue
            self._widen(node, runs, constants)
            results = [self._run(node, i, runs) for i in list(runs)]
            yield node.name, [twins for twins in results if twins is not None]
            for operand in node.all_input_nodes:
                if self._last[operand] is node:
                    for single, double in runs.values():
                        # Without this, a deep model would hold all its activations in both precisions.
                        del single.env[operand], double.env[operand]

    def _widen(self, node: fx.Node, runs: Mapping[int, Any], constants: Mapping[str, Any]) -> None:
        """Adds float64 forms of the placeholders that the node is the first to read. All feeds share a weight's."""
        for operand in node.all_input_nodes:
            lacking = [(single, double) for single, double in runs.values() if operand not in double.env]
            if lacking and operand.name in constants:
                # A weight is widened once for all feeds.
                shared = _widened(constants[operand.name])
                for _, double in lacking:
                    double.env[operand] = shared
            else:
                for single, double in lacking:
                    double.env[operand] = _widened(single.env[operand])

    def _run(self, node: fx.Node, feed: int, runs: dict[int, Any]) -> Twins | None:
        single, double = runs[feed]
        try:
            single.env[node] = _run(single, node)
            double.env[node] = self._truth(single, double, node)
        except StageError as error:
            self.refused[feed] = error
            del runs[feed]
            return None
        if self.settle is not None:
            self.settle(node, feed, single.env, double.env)
        return Twins(feed, single.env[node], double.env[node])

    def _truth(self, single: fx.Interpreter, double: fx.Interpreter, node: fx.Node) -> Any:
        try:
            return _run(double, node)
        except StageError as error:
            # Some operators, such as quantised ones, have no float64 kernel.
            self.notes.setdefault(node.name, error.what)
            # The float32 operator on the float64 operands: its own rounding is the only one.
            narrow = _Plain(self.program.graph_module)
            for operand in node.all_input_nodes:
                narrow.env[operand] = pytree.tree_map(
                    lambda value, like: value.to(like.dtype) if isinstance(like, Tensor) else value,
                    double.env[operand],
                    single.env[operand],
                )
            return _widened(_run(narrow, node))


class _Plain(fx.Interpreter):
    """torch's interpreter without its additions to the text of every error."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False


class _Double(_Plain):
    """Asks for float64 wherever the program asks for another floating-point type."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda dtype: _WIDE.get(dtype, dtype), (args, dict(kwargs)))
        return super().call_function(target, args, kwargs)


def _run(interpreter: fx.Interpreter, node: fx.Node) -> Any:
    with torch.no_grad():
        try:
            return interpreter.run_node(node)
        except Exception as error:
            raise StageError(f"the exported program can't run on this input: {error}", where=node.name) from error


def _widened(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(_WIDE.get(leaf.dtype, leaf.dtype)), value)


class Rounded:
    """The fake-quantised activations of one program: which of two steps one takes that lies half-way between them.

    torch multiplies by the inverse of the scale and ONNX divides by it, and what they round is off by rounding already.
    An element that lies within that noise of a tie may take either step. Everything behind it is then computed from the
    step that the ONNX took, in torch too, so that it is judged as strictly as in a model without quantisation.

    Attributes:
        steps: fx nodes that fake-quantise, with the value of the ONNX that holds the same.
        flips: how many elements took another step than in torch, by value of the ONNX.
    """

    def __init__(self, traced: Traced) -> None:
        values = {node: value for value, node in traced.nodes.items()}
        self._program = traced.program
        nodes = [node for node in traced.program.graph.nodes if node.target in TARGETS]
        self.steps: dict[fx.Node, str] = {node: values[node.name] for node in nodes if node.name in values}
        self.flips: dict[str, int] = {}
        self._outputs = {traced.nodes[name]: name for name in names(traced.model.graph.outputs) if name in traced.nodes}
        self._onnx_values: Sequence[Mapping[str, Array]] = ()
        # The program's outputs behind the settled steps, and how far these moved them, by feed and output.
        self._settled: dict[tuple[int, str], Tensor] = {}
        self._shift: dict[tuple[int, str], Array] = {}
        self._changed: set[int] = set()

    def begin(self, onnx_values: Sequence[Mapping[str, Array]]) -> None:
        """Takes the ONNX's values for each feed."""
        self._onnx_values = onnx_values

    @torch.no_grad()
    def settle(self, node: fx.Node, feed: int, single: dict[fx.Node, Any], double: dict[fx.Node, Any]) -> None:
        """Gives elements next to a tie the step that the ONNX took."""
        value = self.steps.get(node)
        if value is None or value not in self._onnx_values[feed]:
            return
        source, scale = node.args[:2]
        assert isinstance(source, fx.Node)
        exact = double[source].double()
        onnx = tensor(self._onnx_values[feed][value]).double()
        if onnx.shape != exact.shape or not exact.numel():
            return
        step: float | Tensor
        if isinstance(scale, float):
            step = scale
        else:
            step = single[scale].double()  # type: ignore[index]
        if node.target is PER_CHANNEL and isinstance(step, Tensor):
            shape = [1] * exact.ndim
            shape[int(node.args[3])] = -1  # type: ignore[arg-type]
            step = step.reshape(shape)
        # What is rounded may be off by as much as any value: a multiple of torch's own float32 error.
        noise = float((single[source].double() - exact).abs().nan_to_num(0.0).amax())
        greatest = float(exact.abs().nan_to_num(0.0, 0.0, 0.0).amax())
        off = noise_floor.MULTIPLE * max(noise, noise_floor.LEAST * greatest)
        loose = torch.round((exact - off) / step) != torch.round((exact + off) / step)
        # Both runs go on from the step that the ONNX took.
        for table in (single, double):
            torch_values = table[node].double()
            # Half a per cent of a step is far more than the product of step and scale rounds by.
            differs = loose & (onnx != torch_values) & ((onnx - torch_values).abs() <= 1.005 * step)
            if not differs.any():
                continue
            table[node] = torch.where(differs, onnx, torch_values).to(table[node].dtype)
            if table is single:
                self._changed.add(feed)
                self.flips[value] = self.flips.get(value, 0) + int(differs.sum())

    def keep(self, node: str, twins: Sequence[Twins]) -> None:
        """Notes the program's outputs as they come out behind the settled steps."""
        if self.steps and node in self._outputs:
            for twin in twins:
                self._settled[twin.feed, self._outputs[node]] = twin.single

    @torch.no_grad()
    def end(self, feeds: Sequence[Feed]) -> None:
        """Runs the program once more without settling, for the feeds on which that changed something."""
        changed = sorted(self._changed)
        if not changed:
            return
        for node, twins in Twin(self._program).values([feeds[index] for index in changed]):
            value = self._outputs.get(node, "")
            for twin in twins:
                settled = self._settled.get((changed[twin.feed], value))
                if settled is not None:
                    self._shift[changed[twin.feed], value] = array(settled.double() - twin.single.double())

    def moved(self, value: str, reference: Array, feed: int) -> Array:
        """An output of the module, moved by as much as the steps that the ONNX took move the program's."""
        # The module itself cannot be run behind settled steps: the program's shift is added to its output.
        shift = self._shift.get((feed, value))
        if shift is None or shift.shape != reference.shape:
            return reference
        return (reference + shift).astype(reference.dtype)
