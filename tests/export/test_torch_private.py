"""The private parts of torch that the export relies on are there and still do what it takes them to do."""

from __future__ import annotations

import sympy
import torch
from torch import Tensor, nn

from layerline.export import torch_private

A, B = sympy.symbols("a b", integer=True, positive=True)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 7:
            return x * 2
        return x


def test_the_hook_sees_every_guard_in_the_stack_of_forward() -> None:
    stacks: list[list[str]] = []
    guards = []

    def hook(env: object, guard: object, frame: object) -> None:
        guards.append(str(guard))
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)  # type: ignore[attr-defined]
            frame = frame.f_back  # type: ignore[attr-defined]
        stacks.append(names)

    shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
    with torch_private.on_guard(hook):
        torch.export.export(Branches(), (torch.zeros(4, 3),), dynamic_shapes=shapes, strict=False)
    inequalities = [i for i, guard in enumerate(guards) if guard.startswith("Ne(") and guard.endswith(", 7)")]
    assert inequalities and "forward" in stacks[inequalities[0]]
    count = len(guards)
    torch.export.export(Branches(), (torch.zeros(4, 3),), dynamic_shapes=shapes, strict=False)
    assert len(guards) == count  # the hook is gone


def test_names_that_are_no_python() -> None:
    net = nn.Sequential()
    net.add_module("class", nn.Linear(3, 3))
    with torch_private.any_names():
        graph = torch.fx.symbolic_trace(net)
    assert "getattr(self, 'class')" in graph.code
    assert graph(torch.ones(1, 3)).equal(net(torch.ones(1, 3)))


def test_expressions_over_sizes() -> None:
    assert torch_private.evaluate(3 * A + B, {A: 2, B: 5}) == 11
    assert torch_private.is_constant(A <= 12, {A: (1, 12)}) and not torch_private.is_constant(A <= 11, {A: (1, 12)})
    assert torch_private.as_python(sympy.Ne(A, 7), {A: "t"}) == "t != 7"


def test_the_caches_of_recurrent_operators_can_be_cleared() -> None:
    torch.ops.aten.lstm.input._dispatch_cache["sentinel"] = None
    torch_private.forget_decompositions()
    assert not torch.ops.aten.lstm.input._dispatch_cache
