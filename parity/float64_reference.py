"""Runs an exported program in float32 and in float64, node by node, and frees values that are not needed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from layerline.backends.base import Feed
from layerline.compare.arrays import tensor
from layerline.export.program_queries import stored
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
        def wide(value: Any) -> Any:
            return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

        args, kwargs = pytree.tree_map(wide, (args, dict(kwargs)))
        return super().call_function(target, args, kwargs)


def _run(interpreter: fx.Interpreter, node: fx.Node) -> Any:
    with torch.no_grad():
        try:
            return interpreter.run_node(node)
        except Exception as error:
            raise StageError(f"the exported program can't run on this input: {error}", where=node.name) from error


def _widened(value: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.to(_WIDE.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(wide, value)
