"""torch.onnx.export, with names that stay, axes that are what was declared, and errors that say what to change."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from layerline.backends.light import Light, Weight, rename
from layerline.compare.arrays import NOT_IN_NUMPY
from layerline.export import dynamic_axes as axis_names
from layerline.export import fake_quant_ops
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call
from layerline.export.export_errors import blame, dropped, unrolled
from layerline.export.fake_quant import store_weights, traceable
from layerline.export.masked_attention import hide_rows
from layerline.export.torch_private import any_names, forget_decompositions
from layerline.export.trace_guards import Guard, Symbols, guards, noting, symbols
from layerline.graph.analysis.ir_queries import RANDOM
from layerline.graph.io import module_identity
from layerline.graph.io.ir_convert import from_ir
from layerline.pipeline.errors import ConfigError, StageError


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An exported model beside the program it was made from.

    Attributes:
        program: after decomposition; its nodes have the names of the ONNX values.
        model: the ONNX model without its weights; inputs, outputs and axes carry their own names, nodes their module
            and source.
        weights: those, by name.
        nodes: program node of each ONNX value that is one, by value name.
        owners: program node that each ONNX value is, or lies inside of.
        ranges: sizes the program holds for, by axis name; None where there is no upper end.
        symbols: the axis that each of torch's symbols stands for.
        guards: conditions on sizes under which the program is what the module does.
    """

    program: ExportedProgram
    model: onnx.ModelProto
    weights: dict[str, Weight]
    nodes: Mapping[str, str]
    owners: Mapping[str, str]
    ranges: Mapping[str, tuple[int, int | None]]
    symbols: Symbols = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()

    @property
    def light(self) -> Light:
        """The model with its weights."""
        return Light(self.model, self.weights)

    def taps(self) -> list[str]:
        """Every value of the program that numpy has a type for."""
        meta = {n.name: n.meta.get("val") for n in self.program.graph.nodes}
        return [v for v, n in self.nodes.items() if getattr(meta[n], "dtype", None) not in NOT_IN_NUMPY]


def trace(call: Call, axes: Axes, opset: int, root: Path) -> Traced:
    """Exports a module in eval mode.

    Args:
        call: the module and its example, with at least two steps along every dynamic axis.
        axes: the dynamic axes; the result has exactly these symbolic.
        opset: version of ONNX's own operators.
        root: the project's folder, for source lines.

    Raises:
        StageError: the exporter can't; names module, source line and construct, and says what to change. Or an axis
            came out fixed, or the model keeps state between calls.
    """
    refuse_opset(opset)
    args, kwargs = call.arguments(call.feed)
    if args and isinstance(args[-1], dict) and not kwargs:
        # torch takes a dict in the last place for the keywords, unless there is another behind it.
        args = (*args, {})
    shapes = call.shapes(axes.specs())
    forget_decompositions()
    try:
        with (
            quiet(),
            any_names(),
            traceable(call.module),
            _frozen(call.module),
            call.tensors_alone(),
            noting(root) as taken,
        ):
            exported = torch.onnx.export(
                call.module, args, kwargs=kwargs, dynamic_shapes=shapes if axes.names else None, dynamo=True,
                opset_version=opset, optimize=False, verbose=False, custom_translation_table=fake_quant_ops.table(),
            )  # fmt: skip
            assert exported is not None and exported.exported_program is not None
            _fold(exported.model, exported.exported_program)
    except StageError:
        raise
    except Exception as error:
        raise unrolled(blame(error, call, axes, root), call.module) from error
    try:
        traced = _named(exported.exported_program, from_ir(exported.model), call, axes, opset, root)
    except StageError as error:
        raise unrolled(error, call.module) from error
    known = symbols(taken, call, axes)
    return replace(traced, symbols=known, guards=guards(taken, known))


def refuse_opset(opset: int) -> None:
    """Refuses a version of the operators that the installed onnx has not.

    Raises:
        ConfigError: it is newer.
    """
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ConfigError(f"the installed onnx knows opsets up to {newest}", where=f"opset {opset}")


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Inside, no parameter wants a gradient: torch's exporter lays attention out by strides where a mask has one."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the exporter's warnings and prints off the screen: what matters of them is in the error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _fold(model: ir.Model, program: ExportedProgram) -> None:
    """Folds shape arithmetic and other constants, in place; merging nodes is for fuse, which proves what it does."""
    weights = set(program.state_dict)

    def should_fold(node: ir.Node) -> bool | None:
        # onnxscript's own list of random operators lacks some: a Bernoulli of a constant would become one draw.
        # A transposed copy of a weight would store a tied one twice.
        copied = node.op_type == "Transpose" and any(v is not None and v.name in weights for v in node.inputs)
        return False if copied or node.op_type in RANDOM else None

    common.InlinePass()(model)
    hide_rows(model, program)
    _forget_recurrent_shapes(model)
    optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=should_fold)
    store_weights(model, program)
    optimizer.remove_unused_nodes(model)
    for tidy in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        tidy(model)


def _forget_recurrent_shapes(model: ir.Model) -> None:
    # torch traces a recurrent layer through a loop that notes the example's sequence length down as a fixed size.
    doubted: set[ir.Value] = set()
    for node in model.graph:
        if node.op_type in {"LSTM", "GRU", "RNN"} or not doubted.isdisjoint(v for v in node.inputs if v is not None):
            doubted.update(node.outputs)
    for value in doubted:
        value.shape = None


def _named(program: ExportedProgram, light: Light, call: Call, axes: Axes, opset: int, root: Path) -> Traced:
    model = light.model
    _refuse_state(program)
    if error := dropped(program, root):
        raise error
    version = next(o.version for o in model.opset_import if o.domain in {"", "ai.onnx"})
    if version != opset:
        raise StageError(f"the exporter can't write it: it left the model at opset {version}", where=f"opset {opset}")
    inputs, outputs = [i.name for i in model.graph.input], [o.name for o in model.graph.output]
    results = [
        s.arg.name
        for s in program.graph_signature.output_specs
        if s.kind is OutputKind.USER_OUTPUT and isinstance(s.arg, TensorArgument)
    ]
    if len(inputs) != len(call.feed) or not len(outputs) == len(results) == len(call.outputs):
        raise StageError(
            f"the exported model takes {inputs} and gives {outputs}; the module takes {[*call.feed]} and gives "
            f"{[*call.outputs]}", where="export",
        )  # fmt: skip
    inside = module_identity.owners(model)
    renamed = _make_room(dict(zip((*inputs, *outputs), (*call.feed, *call.outputs), strict=True)), light)
    # As they are now: the module goes on living, and may change its tensors.
    weights = {renamed.get(n, n): w.apart() for n, w in light.weights.items()}
    back = {new: old for old, new in renamed.items()}
    rename(model.graph, renamed)
    axis_names.write(model, axes)
    module_identity.stamp(model, root)
    known = {
        n.name for n in program.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)
    }
    nodes = {v: back.get(v, v) for n in model.graph.node for v in n.output if back.get(v, v) in known}
    nodes |= {new: node for new, node in zip(call.outputs, results, strict=True) if node in known}
    owners = {renamed.get(v, v): node for v, node in inside.items()} | nodes
    ranges = _ranges(program, call, axes)
    return Traced(program=program, model=model, weights=weights, nodes=nodes, owners=owners, ranges=ranges)


def _make_room(renamed: dict[str, str], light: Light) -> dict[str, str]:
    """The renaming, with values that hold one of the new names moved out of the way."""
    held = light.stored.union(*(n.output for n in light.model.graph.node))
    moved = {v: f"{v}_inner" for v in set(renamed.values()) & held if v not in renamed}
    return {old: new for old, new in (renamed | moved).items() if old != new}


def _refuse_state(program: ExportedProgram) -> None:
    """A module that changes its own buffers gives another result on the next call; a graph can't."""
    changed = [s.target for s in program.graph_signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION]
    if changed:
        owner = str(changed[0]).rpartition(".")[0]
        raise StageError(
            f"forward() changes the buffer {changed[0]!r}, as a BatchNorm in training mode does",
            where=f"module {owner}" if owner else "model",
            hint="the exported model keeps no state: use stored statistics, or make the state an input and an output",
        )


def _ranges(program: ExportedProgram, call: Call, axes: Axes) -> dict[str, tuple[int, int | None]]:
    """What the program's own constraints allow each named axis."""
    found: dict[str, tuple[int, int | None]] = {}
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    users = [values[n] for n in program.graph_signature.user_inputs if isinstance(n, str)]
    shapes = dict(zip(call.feed, (v.shape for v in users if isinstance(v, torch.Tensor)), strict=True))
    for (given, axis), name in axes.names.items():
        size = getattr(shapes[given][axis], "node", None)
        ranges = program.range_constraints.get(size.expr) if size is not None else None
        if ranges is not None:
            low, high = found.get(name, (0, None))
            top = int(ranges.upper) if ranges.upper.is_Integer and ranges.upper < 2**31 else None
            found[name] = max(low, int(ranges.lower)), min((e for e in (high, top) if e is not None), default=None)
    return found
