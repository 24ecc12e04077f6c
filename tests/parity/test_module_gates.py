"""What forward() keeps between calls is found, whatever it is kept in, and judged by whether it matters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerline.export import kept_state
from layerline.export.example_call import call
from layerline.export.probe_files import Probe
from layerline.parity import module_gates

X = torch.ones(2, 5)


class Keeps(nn.Module):
    """Gives what it counts, in an attribute of any kind; None counts nothing."""

    def __init__(self, kept: Any, bump: Any, matters: bool = True) -> None:
        super().__init__()
        self.linear, self.kept, self.bump, self.matters = nn.Linear(5, 5), kept, bump, matters

    def forward(self, x: Tensor) -> Tensor:
        seen = self.bump(self)
        out: Tensor = self.linear(x) * (1 + seen if self.matters else 1.0)
        return out


def _number(m: Any) -> float:
    m.kept += 1
    return float(m.kept)


def _list(m: Any) -> float:
    m.kept.append(0)
    return float(len(m.kept))


def _dict(m: Any) -> float:
    m.kept["n"] = m.kept.get("n", 0) + 1
    return float(m.kept["n"])


def _nested(m: Any) -> float:
    m.kept["a"][0].append(0)
    return float(len(m.kept["a"][0]))


def _tensor(m: Any) -> float:
    m.kept = m.kept + 1
    return float(m.kept.sum())


def _in_place(m: Any) -> float:
    m.kept += 1
    return float(m.kept.sum())


def _object(m: Any) -> float:
    m.kept.n += 1
    return float(m.kept.n)


def _set(m: Any) -> float:
    m.kept.add(len(m.kept))
    return float(len(m.kept))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "number": (lambda: 0, _number),
    "list": (list, _list),
    "dict": (dict, _dict),
    "nested": (lambda: {"a": ([],)}, _nested),
    "tensor": (lambda: torch.zeros(2), _tensor),
    "tensor in place": (lambda: torch.zeros(2), _in_place),
    "numpy": (lambda: np.zeros(2), _in_place),
    "object": (lambda: SimpleNamespace(n=0), _object),
    "set": (set, _set),
}


def _gate(module: nn.Module, *sizes: int) -> tuple[list[Any], list[str]]:
    found = call(module.eval(), (X,), {})
    (name,) = found.feed
    feeds = [{name: np.ones((2, s), np.float32)} for s in (5, *sizes)]
    probes = [Probe(label=str(f[name].shape), feed=f, outputs=found.run(f)) for f in feeds]
    return module_gates.state_gate(found, probes, Path.cwd())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_and_matters_fails_by_name(kind: str) -> None:
    make, bump = KINDS[kind]
    (gate,), _ = _gate(nn.Sequential(Keeps(make(), bump)))
    assert not gate.passed and "'0.kept' (module 0)" in gate.seen and "output differs in a later call" in gate.seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_and_does_not_matter_is_a_note(kind: str) -> None:
    make, bump = KINDS[kind]
    gates, (note,) = _gate(nn.Sequential(Keeps(make(), bump, matters=False)))
    assert not gates and "'0.kept'" in note


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.s is None:
            self.s = x.shape[1]
        return x * self.s


def test_a_size_that_is_kept_shows_at_other_sizes_with_its_line() -> None:
    net = First()
    (gate,), _ = _gate(net, 7)
    assert re.search(r"'s' \(model, .*test_module_gates.py:\d+\)", gate.seen) and "(2, 7)" in gate.seen
    found = call(First(), (X,), {})
    assert (found.run({"x": np.ones((2, 7), np.float32)})["output"] == 7).all()  # a first call, not a later one


def test_a_later_call_that_raises_is_told() -> None:
    class Hidden(nn.Module):
        h: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.h = x if self.h is None else self.h + x
            return torch.add(x, self.h)

    (gate,), _ = _gate(Hidden(), 7)
    assert not gate.passed and "'h'" in gate.seen


def test_modules_that_keep_nothing_run_as_they_are() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    for net in (nn.Linear(5, 5), nn.LSTM(5, 4, batch_first=True), normed, nn.utils.weight_norm(nn.Linear(5, 5))):
        found = call(net.eval(), (X[None],), {})
        assert not found.keeps and not isinstance(found.first, str) and found.pristine() is net


def test_a_copy_shares_the_weights_and_what_can_t_be_copied_is_noted() -> None:
    net = Keeps(0, _number)
    copy = kept_state.untouched(net)
    assert isinstance(copy, nn.Module) and copy.get_parameter("linear.weight") is net.linear.weight
    gates, (note,) = _gate(Keeps((i for i in range(9)), lambda m: 0.0))
    assert not gates and "generator" in note
