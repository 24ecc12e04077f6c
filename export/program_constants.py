"""What an exported program stores, by the names that its nodes read it under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind


def stored(program: ExportedProgram) -> dict[str, Any]:
    """Parameters, buffers and constants of a program by the name of their placeholder."""
    values: dict[str, Any] = {}
    tables: tuple[Mapping[str, Any], ...] = (program.state_dict, program.constants)
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            values[spec.arg.name] = spec.arg.value
        elif spec.kind is not InputKind.USER_INPUT:
            values[spec.arg.name] = next(t[spec.target] for t in tables if spec.target in t)
    return values
