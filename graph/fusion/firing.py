"""The record of rewriting: where a rule fired or declined, and what has to be proved of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir


class Declined(Exception):
    """A rule that matched but must not fire here; the message names the value it is about."""


@dataclass(frozen=True)
class Site:
    """Where a rule fires: the value it replaces, and the nodes whose bodies lead to it (empty in the main graph)."""

    rule: str
    value: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class After:
    """What computes a replaced value now, cut where values of the unfused model begin.

    Attributes:
        result: the name that holds the new value inside `nodes`, or an initializer's, or another value of the unfused
            model.
        nodes: the new nodes, in order; empty when the value was replaced by one that was there.
        tensors: initializers that the unfused model doesn't have, by name.
    """

    result: str
    nodes: tuple[onnx.NodeProto, ...] = ()
    tensors: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)


@dataclass(frozen=True)
class Firing:
    """One application of a rule.

    Attributes:
        site: rule and place.
        result: what holds the place's value now: the same name, or the value that was there already.
        sources: values that are gone, in topological order.
        modules: module paths of the nodes that computed them; the first is the main one.
        after: what to prove, by the unfused model's value: the replaced one, or, where a body was rewritten, the
            outputs of the main graph's node around it. Empty where the bytes are the same by construction.
    """

    site: Site
    result: str
    sources: tuple[str, ...]
    modules: tuple[str, ...]
    after: Mapping[str, After]


@dataclass(frozen=True)
class Decline:
    """A rule that matched and did not fire, and why."""

    site: Site
    reason: str
