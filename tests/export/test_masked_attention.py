"""Rows of attention that a mask hides as a whole are 0 in the ONNX, as they are in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from layerline.backends.onnxruntime import OnnxRuntime
from layerline.export.torch_export import trace
from tests.export.nets import Forward, exported
from tests.forms import proto

Q = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(0))
SEEN = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
HIDDEN = SEEN.clone()
HIDDEN[0, 0, 2] = HIDDEN[1] = False


def _attend(q: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_hidden_rows_are_0_though_the_example_had_none(kind: str, opset: int) -> None:
    """Without that they are the mean of v for a bool mask, and NaN for one of -inf."""

    def given(mask: Any) -> Any:
        return mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    call, axes, _ = exported(Forward(_attend), (Q, given(SEEN)))
    traced = trace(call, axes, opset, Path(__file__).parent)
    session = OnnxRuntime().open(traced.model)
    for mask in (SEEN, HIDDEN):
        expected = _attend(Q, given(mask)).numpy()
        (found,) = session.run({"args_0": Q.numpy(), "args_1": given(mask).numpy()}).values()
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not found[1].any() and not found[0, :, 2].any() and found[0, :, 1].any()


def test_the_result_keeps_its_name_and_one_mask_is_looked_at_once() -> None:
    def twice(q: Any, mask: Any) -> Any:
        return _attend(_attend(q, mask), mask) + 1

    _, _, traced = exported(Forward(twice), (Q, SEEN))
    graph = proto(traced.model).graph
    assert [n.op_type for n in graph.node].count("ReduceMax") == 1
    makers = {o: n.op_type for n in graph.node for o in n.output}
    assert makers["scaled_dot_product_attention"] == makers["scaled_dot_product_attention_1"] == "Where"
    assert {"scaled_dot_product_attention", "scaled_dot_product_attention_1"} <= traced.nodes.keys()
