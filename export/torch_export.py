"""Runs torch.onnx.export; keeps names and declared axes, and explains errors."""

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
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from layerline.backends.light import WIDTHS
from layerline.compare.arrays import NOT_IN_NUMPY
from layerline.export import dynamic_axes as axis_names
from layerline.export.dynamic_axes import Axes
from layerline.export.example_call import Call, place_of
from layerline.export.export_errors import blame, dropped, unrolled
from layerline.export.fake_quant import store_weights, traceable
from layerline.export.masked_attention import hide_rows
from layerline.export.torch_private import any_names, forget_decompositions
from layerline.export.trace_guards import Guard, Symbols, guards, noting, symbols
from layerline.graph.analysis.ir_queries import RANDOM, names, values_by_name
from layerline.graph.io import module_identity
from layerline.graph.io.opset import opset_of
from layerline.pipeline.errors import ConfigError, StageError


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An exported model beside the program it was made from.

    Attributes:
        program: after decomposition; its nodes have the names of the ONNX values.
        model: the ONNX model. Inputs, outputs and axes have their declared names, nodes their module and source line.
        nodes: program node of each ONNX value that is one, by value name.
        owners: program node that each ONNX value is, or lies inside of.
        ranges: least and greatest size that the program holds for, by axis name; None where there is no upper end.
        symbols: the axis that each of torch's symbols stands for.
        guards: conditions on sizes under which the program computes what the module does.
    """

    program: ExportedProgram
    model: ir.Model
    nodes: Mapping[str, str]
    owners: Mapping[str, str]
    ranges: Mapping[str, tuple[int, int | None]]
    symbols: Symbols = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()

    def taps(self) -> list[str]:
        """Every value of the program that numpy has a type for."""
        dtypes = {node.name: getattr(node.meta.get("val"), "dtype", None) for node in self.program.graph.nodes}
        return [value for value, node in self.nodes.items() if dtypes[node] not in NOT_IN_NUMPY]


def trace(call: Call, axes: Axes, opset: int, root: Path) -> Traced:
    """Exports a module in eval mode, whose example has at least two steps along every dynamic axis.

    The result has exactly these axes symbolic. Source lines are relative to the project's folder `root`. Raises
    StageError, which names module, line and construct: the exporter fails, an axis came out fixed, or the model
    changes its buffers.
    """
    # Before the trace, which may take minutes.
    refuse_opset(opset)
    from layerline.export import fake_quant_ops  # onnxscript is slow to import, and `pipe check` does without

    args, kwargs = call.arguments(call.feed)
    if args and isinstance(args[-1], dict) and not kwargs:
        # torch takes a dict in the last place for keyword arguments, unless another dict follows.
        args = (*args, {})
    shapes = call.shapes(axes.specs()) if axes.names else None
    # A second LSTM in this process would be exported with a fixed length.
    forget_decompositions()
    module = call.module
    try:
        with quiet(), any_names(), traceable(module), _frozen(module), call.tensors_alone(), noting(root) as taken:
            exported = torch.onnx.export(
                module, args, kwargs=kwargs, dynamic_shapes=shapes, dynamo=True,
                opset_version=opset, optimize=False, verbose=False, custom_translation_table=fake_quant_ops.table(),
            )  # fmt: skip
            assert exported is not None and exported.exported_program is not None
            _fold(exported.model, exported.exported_program)
        traced = _named(exported.exported_program, exported.model, call, axes, opset, root)
    except StageError as error:
        raise unrolled(error, module) from error
    except Exception as error:
        raise unrolled(blame(error, call, axes, root), module) from error
    meanings = symbols(taken, call, axes)
    return replace(traced, symbols=meanings, guards=guards(taken, meanings))


def refuse_opset(opset: int) -> None:
    """Refuses a version of the operators that the installed onnx lacks. Raises ConfigError if the version is newer."""
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ConfigError(f"the installed onnx knows opsets up to {newest}", where=f"opset {opset}")


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Inside, no parameter requires a gradient: if a mask does, torch's exporter lays attention out by its strides."""
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
    """Suppresses the exporter's warnings and prints; the error repeats what matters of them."""
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
    from onnxscript import optimizer

    # Names of parameters and buffers; the exporter keeps them.
    weights = set(program.state_dict)

    def should_fold(node: ir.Node) -> bool | None:
        # onnxscript's own list of random operators lacks some: a Bernoulli of a constant would become one draw.
        if node.op_type in RANDOM:
            return False
        # A transposed copy of a weight would store a tied one twice.
        if node.op_type == "Transpose" and not weights.isdisjoint(names(node.inputs)):
            return False
        return None  # the optimizer decides

    common.InlinePass()(model)
    hide_rows(model, program)
    # torch traces a recurrent layer through a loop that records the example's sequence length as a fixed size, in the
    # shapes of the layer and of all that follows it.
    doubted: set[ir.Value] = set()
    for node in model.graph:
        if node.op_type in {"LSTM", "GRU", "RNN"} or not doubted.isdisjoint(node.inputs):
            doubted.update(node.outputs)
    for value in doubted:
        value.shape = None
    optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=should_fold)
    store_weights(model, program)
    # Constants become initializers of the main graph, one for each content; then every name is made unique.
    optimizer.remove_unused_nodes(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _named(program: ExportedProgram, model: ir.Model, call: Call, axes: Axes, opset: int, root: Path) -> Traced:
    """Gives inputs, outputs, axes and nodes their names, and relates ONNX values to nodes of the program."""
    _refuse_state(program)
    error = dropped(program, root)
    if error is not None:
        raise error
    version = opset_of(model)
    if version != opset:
        raise StageError(f"the exporter can't write it: it left the model at opset {version}", where=f"opset {opset}")
    inputs = names(model.graph.inputs)
    outputs = names(model.graph.outputs)
    # An output that is a number or None has no value in the graph.
    user_outputs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    results = [spec.arg.name for spec in user_outputs if isinstance(spec.arg, TensorArgument)]
    if len(inputs) != len(call.feed) or not len(outputs) == len(results) == len(call.outputs):
        raise StageError(
            f"the exported model takes {inputs} and gives {outputs}; the module takes {[*call.feed]} and gives "
            f"{[*call.outputs]}",
            where="export",
        )
    # By the exporter's names, which are gone after the renaming.
    owners_before = module_identity.owners(model)
    renamed = _rename(model, dict(zip((*inputs, *outputs), (*call.feed, *call.outputs), strict=True)))
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in WIDTHS:
            # A copy: the module may be trained on.
            value.const_value = ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=value.name)
    axis_names.write(model, axes)
    module_identity.stamp(model, root)
    nodes = _program_nodes(program, model, renamed, dict(zip(call.outputs, results, strict=True)))
    owners = {renamed.get(value, value): owner for value, owner in owners_before.items()} | nodes
    ranges = _ranges(program, call, axes)
    return Traced(program=program, model=model, nodes=nodes, owners=owners, ranges=ranges)


def _rename(model: ir.Model, new_names: dict[str, str]) -> dict[str, str]:
    """Renames values, in place; returns the new name of each that changed its name, by the exporter's."""
    values = values_by_name(model.graph)
    # Values that already have one of the new names make room for it.
    for name in list(new_names.values()):
        if name in values and name not in new_names:
            new_names[name] = f"{name}_inner"
    renamed = {old: new for old, new in new_names.items() if old != new}
    # Looked up by the old names, so two values can swap theirs.
    for old, new in renamed.items():
        values[old].name = new
    return renamed


def _program_nodes(
    program: ExportedProgram, model: ir.Model, renamed: Mapping[str, str], results: Mapping[str, str]
) -> dict[str, str]:
    """The program node of each ONNX value that is one; `results` has those of the outputs."""
    tensor_nodes: set[str] = set()
    for program_node in program.graph.nodes:
        if program_node.op == "call_function" and isinstance(program_node.meta.get("val"), torch.Tensor):
            tensor_nodes.add(program_node.name)
    exporter_names = {new: old for old, new in renamed.items()}
    nodes: dict[str, str] = {}
    for node in model.graph:
        for name in names(node.outputs):
            # The exporter names values after the program's nodes.
            exporter_name = exporter_names.get(name, name)
            if exporter_name in tensor_nodes:
                nodes[name] = exporter_name
    # An output may be an input that is passed through, which no node computes.
    return nodes | {output: node for output, node in results.items() if node in tensor_nodes}


def _refuse_state(program: ExportedProgram) -> None:
    """A module that changes its own buffers gives another result on the next call; a graph can't."""
    changed = [s.target for s in program.graph_signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION]
    if changed:
        owner = str(changed[0]).rpartition(".")[0]
        what = f"forward() changes the buffer {changed[0]!r}, as a BatchNorm in training mode does"
        hint = "the exported model keeps no state: use stored statistics, or make the state an input and an output"
        raise StageError(what, where=place_of(owner), hint=hint)


def _ranges(program: ExportedProgram, call: Call, axes: Axes) -> dict[str, tuple[int, int | None]]:
    """The sizes that the program's own constraints allow each named axis."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    # A constant argument is no name, and a number has no shape.
    user_inputs = [values[name] for name in program.graph_signature.user_inputs if isinstance(name, str)]
    tensor_shapes = [value.shape for value in user_inputs if isinstance(value, torch.Tensor)]
    shapes = dict(zip(call.feed, tensor_shapes, strict=True))
    ranges: dict[str, tuple[int, int | None]] = {}
    for (input_name, axis), name in axes.names.items():
        # A plain number, without a node, is a size that torch specialised; writing the axes refuses those.
        size = getattr(shapes[input_name][axis], "node", None)
        if size is None or size.expr not in program.range_constraints:
            continue
        constraint = program.range_constraints[size.expr]
        low, high = ranges.get(name, (0, None))
        low = max(low, int(constraint.lower))
        # Greater ends are torch's way to write that there is none.
        if constraint.upper.is_Integer and constraint.upper < 2**31:
            upper = int(constraint.upper)
            if high is None or upper < high:
                high = upper
        ranges[name] = (low, high)
    return ranges
