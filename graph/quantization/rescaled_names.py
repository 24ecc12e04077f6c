"""Gives values whose channels a repair scaled names of their own: a name stands for the same numbers everywhere.

Done last, so that choices by name (`quantize.skip`, `quantize.layers`) and the table of a search mean the float model's
values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import onnx_ir as ir

from layerline.calib.plan import Kept, QuantPlan, QuantValue
from layerline.graph.quantization.convert import Converted
from layerline.graph.quantization.qdq import DEQUANTIZED, QUANTIZED
from layerline.pipeline.report import RESCALED


def apply(converted: Converted) -> Converted:
    """The conversion with the new names in its graphs, which are changed in place, in its plan and in its ranges."""
    names = converted.scaled
    if not names:
        return converted
    models = [converted.reference, converted.model, converted.measured]
    if converted.trained is not None:
        models.append(converted.trained)
    # Several fields may hold one model, which is renamed once.
    for model in {id(model): model for model in models}.values():
        _rename(model.graph, names)
    values: list[QuantValue] = []
    for value in converted.plan.values:
        readers = tuple((_new(reader, names), index) for reader, index in value.readers)
        shared = tuple(_new(name, names) for name in value.shared)
        values.append(dataclasses.replace(value, name=_new(value.name, names), readers=readers, shared=shared))
    kept: list[Kept] = [dataclasses.replace(item, name=_new(item.name, names)) for item in converted.plan.kept]
    ranges = converted.ranges
    if ranges is not None:
        histograms = {_new(name, names): histogram for name, histogram in ranges.histograms.items()}
        ranges = dataclasses.replace(ranges, histograms=histograms)
    return dataclasses.replace(converted, plan=QuantPlan(values=tuple(values), kept=tuple(kept)), ranges=ranges)


def _new(name: str, names: Collection[str]) -> str:
    for suffix in ("", QUANTIZED, DEQUANTIZED):
        base = name.removesuffix(suffix)
        if base in names and base + suffix == name:
            return f"{base}{RESCALED}{suffix}"
    return name


def _rename(graph: ir.Graph, names: Collection[str]) -> None:
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name:
                value.name = _new(value.name, names)
