"""The operators in torch against onnx's own test cases, and a graph's shapes and places."""

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnx.backend.test.case.node import collect_testcases

from layerline.qat.graph_module import GraphModule
from layerline.qat.operators import TABLE
from tests.forms import as_ir, proto

_KINDS = {TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.DOUBLE}
# Modes of training, which no model has here, and reductions of nothing.
_LEFT_OUT = ("training", "empty_set")


def fits(case):
    (node, *others) = proto(case.model).graph.node
    kinds = {v.type.tensor_type.elem_type for v in (*proto(case.model).graph.input, *proto(case.model).graph.output)}
    ours = node.op_type in TABLE and not node.domain and not others and case.model.opset_import[0].version >= 13
    named = any(word in case.name for word in _LEFT_OUT) or case.name.startswith("test_cast")
    return ours and kinds <= _KINDS and not named


@pytest.mark.slow
def test_every_case_of_onnx_gives_its_results():
    checked = set()
    for case in filter(fits, collect_testcases(None)):
        inputs, outputs = case.data_sets[0]
        module = GraphModule(as_ir(case.model))
        with torch.no_grad():
            results = module(*[torch.as_tensor(np.array(array)) for array in inputs])
        for result, expected in zip(results, outputs, strict=True):
            assert result.numpy().dtype == np.asarray(expected).dtype, case.name
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-3, atol=1e-4, err_msg=case.name)
        checked.add(proto(case.model).graph.node[0].op_type)
    # Few operators have no case of their own there.
    assert len(checked) > 0.9 * len(TABLE)
