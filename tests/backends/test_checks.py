"""What is refused before a build, by name (T27 to T31 and issue 4), and what looks like it and is let through."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from layerline.backends.base import SOURCE
from layerline.backends.tensorrt import checks
from layerline.backends.tensorrt.checks import examine, inferred, suspects
from layerline.graph.analysis.refusals import Refusal, refuse_training
from layerline.pipeline.errors import StageError
from tests.backends import models
from tests.backends.models import BOOL, I64, U8, WEIGHT, F, graph, model, node
from tests.forms import as_ir

F16, F64, I8, I32 = TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.INT32
LACKING = [getattr(TensorProto, n) for n in ("INT16", "UINT16", "UINT32", "UINT64", "STRING", "COMPLEX64")]


def refusals(proto: onnx.ModelProto) -> tuple[Refusal, ...]:
    """All refusals; `examine` raises about the first."""
    return checks._refusals(inferred(proto))


def only(proto: onnx.ModelProto) -> tuple[str, str]:
    """Tensor and text of the one refusal there is."""
    [found] = refusals(proto)
    return found.tensor, f"{found.where}: {found.what}; {found.hint}"


@pytest.mark.parametrize("proto", [models.conv(), models.quantised(), models.half(), models.two_inputs()])
def test_good_models_pass(proto) -> None:
    assert refusals(proto) == ()
    assert examine(proto) == ()


def test_the_error_names_tensor_node_and_module_and_counts_the_rest() -> None:
    with pytest.raises(StageError) as caught:
        examine(models.quantised(np.uint8(128)))
    told = caught.value
    assert told.where == "tensor x_q, QuantizeLinear node x_Q, module net.x_Q"
    assert "more, at tensor" in told.what and "int8" in told.hint


# Q and DQ


@pytest.mark.parametrize("point", [np.int8(1), np.int8(-128), np.int8(127)])
def test_t29_a_zero_point_other_than_zero_names_the_first_tensor(point) -> None:
    first, second = refusals(models.quantised(point))
    assert (first.tensor, second.tensor) == ("x_q", "p_q")
    assert f"zero point is {point}" in first.what


@pytest.mark.parametrize("point", [np.uint8(128), np.uint8(0), np.int16(0), np.uint16(0)])
def test_t29_other_types_are_refused_even_at_zero(point) -> None:
    """TensorRT reads uint8 with zero point 0 as int8, and clips the upper half away."""
    assert refusals(models.quantised(point))[0].tensor == "x_q"
    assert f"quantised to {point.dtype.name}" in refusals(models.quantised(point))[0].what


def test_t29_a_missing_zero_point_means_uint8() -> None:
    nodes = [node("QuantizeLinear", ["x", "s"], ["q"]), node("DequantizeLinear", ["q", "s"], ["y"])]
    tensor, told = only(model(nodes, [("x", F, [2, 3])], [("y", F, None)], {"s": np.float32(0.1)}))
    assert tensor == "q" and "uint8" in told


def test_t29_zero_points_are_found_behind_constant_nodes_and_in_branches() -> None:
    point = onnx.numpy_helper.from_array(np.array(3, np.int8))
    pair = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"])]
    then = graph([node("Constant", [], ["z"], value=point), *pair], ["d"])
    choice = node("If", ["c"], ["y"], then_branch=then, else_branch=graph([node("Relu", ["x"], ["e"])], ["e"]))
    proto = model([choice], [("x", F, [2, 3]), ("c", BOOL, [])], [("y", F, None)], {"s": np.float32(0.1)})
    assert only(proto)[0] == "q"


def test_t29_one_channel_off_zero_is_enough() -> None:
    points = np.array([0, 0, 5, 0], np.int8)
    proto = models.quantised()
    for stored in proto.graph.initializer:
        if stored.name == "w_z":
            stored.CopyFrom(onnx.numpy_helper.from_array(points, "w_z"))
    assert only(proto)[0] == "w_q" and "zero point is 5" in only(proto)[1]


def test_a_zero_point_that_is_computed_is_refused() -> None:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    proto = model(nodes, [("x", F, [2]), ("z", I8, [])], [("y", F, None)], {"s": np.float32(0.1)})
    assert only(proto)[0] == "z"


@pytest.mark.parametrize("scale", [0.0, -0.1, np.inf, np.nan])
def test_scales_must_be_finite_and_above_zero(scale) -> None:
    tensor, told = only(models.quantised(scale=scale))
    assert tensor == "s" and f"the scale is {np.float32(scale)}" in told


def test_an_int32_bias_behind_dequantizelinear_is_refused() -> None:
    nodes = [
        node("DequantizeLinear", ["b_q", "s"], ["b"], "bias_DQ"),
        node("Conv", ["x", "w", "b"], ["y"]),
    ]
    stored = {"b_q": np.arange(4, dtype=np.int32), "s": np.float32(0.01), "w": WEIGHT}
    tensor, told = only(model(nodes, [("x", F, [1, 3, 8, 8])], [("y", F, None)], stored))
    assert tensor == "b_q" and "int32 bias" in told and "leave biases in float32" in told


@pytest.mark.parametrize(("channels", "refused"), [(3, True), (1, False)])
def test_activations_take_one_scale(channels, refused) -> None:
    stored = {"s": np.full(channels, 0.1, np.float32), "z": np.zeros(channels, np.int8)}
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
    ]
    found = refusals(model(nodes, [("x", F, [1, channels, 8])], [("y", F, None)], stored))
    assert [r.tensor for r in found] == (["x", "q"] if refused else [])


def test_weights_may_be_quantised_in_the_graph_per_channel() -> None:
    """QAT leaves Q and DQ on a float weight, sometimes behind a Transpose."""
    nodes = [
        node("Transpose", ["w"], ["t"], perm=[1, 0]),
        node("QuantizeLinear", ["t", "s", "z"], ["q"], axis=0),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], axis=0),
        node("MatMul", ["x", "d"], ["y"]),
    ]
    stored = {"w": np.ones((4, 3), np.float32), "s": np.full(3, 0.1, np.float32), "z": np.zeros(3, np.int8)}
    assert refusals(model(nodes, [("x", F, [2, 3])], [("y", F, None)], stored)) == ()


# INT64


def slice_to(end: int, start: int = 1, step: int = 1) -> onnx.ModelProto:
    stored = {"a": [start], "b": [end], "axis": [1], "step": [step]}
    nodes = [node("Slice", ["x", "a", "b", "axis", "step"], ["y"])]
    return model(nodes, [("x", F, [2, 8])], [("y", F, None)], stored)


@pytest.mark.parametrize("proto", [slice_to(2**63 - 1), slice_to(2**31), slice_to(-(2**63), -1, -1)])
def test_t30_far_slice_ends_are_harmless(proto) -> None:
    assert refusals(proto) == ()


def test_t30_wide_arithmetic_is_computed_in_int64() -> None:
    nodes = [node("Add", ["x", "c"], ["y"])]
    assert refusals(model(nodes, [("x", I64, [2])], [("y", I64, None)], {"c": np.array([2**40])})) == ()


@pytest.mark.parametrize("op", ["Gather", "GatherElements"])
@pytest.mark.parametrize(
    ("index", "size", "harmful"),
    [
        (2**31 + 5, 8, True),
        (2**31 + 5, "n", True),
        (-(2**31) - 1, "n", True),
        (8, 8, True),
        (-9, 8, True),
        (7, 8, False),
        (-8, 8, False),
        (100, "n", False),
    ],
)
def test_t30_indices_past_the_end_name_the_node(op, index, size, harmful) -> None:
    stored = {"i": np.array([0, index]) if op == "Gather" else np.array([[0], [index]])}
    proto = model([node(op, ["x", "i"], ["y"], "look_up", axis=0)], [("x", F, [size, 1])], [("y", F, None)], stored)
    found = refusals(proto)
    assert bool(found) is harmful
    if harmful:
        assert found[0].tensor == "i" and "look_up" in found[0].where and str(index) in found[0].what


# UINT8 and other element types


def cast(source: int, target: int, between: str = "") -> onnx.ModelProto:
    nodes = [node("Cast", ["m" if between else "x"], ["d"], to=target), node("Relu", ["d"], ["y"])]
    if between:
        nodes.insert(0, node(between, ["x"], ["m"], "between"))
    return model(nodes, [("x", source, [2, 3])], [("y", target, None)])


@pytest.mark.parametrize("target", [F, F16, I32])
def test_t31_a_uint8_input_may_go_into_a_cast(target) -> None:
    assert refusals(cast(U8, target)) == ()


@pytest.mark.parametrize("op", ["Transpose", "Identity"])
def test_t31_a_uint8_input_may_go_nowhere_else(op) -> None:
    found = refusals(cast(U8, F, between=op))
    assert [r.tensor for r in found] == ["x", "m"] and "between" in found[0].where


def test_t31_uint8_in_the_middle_is_refused_by_name() -> None:
    nodes = [node("Cast", ["x"], ["small"], "narrow", to=U8), node("Cast", ["small"], ["y"], to=F)]
    tensor, told = only(model(nodes, [("x", F, [2, 3])], [("y", F, None)]))
    assert tensor == "small" and "narrow" in told and "uint8 inside the network" in told


def test_t31_uint8_may_leave_but_not_be_read_again() -> None:
    nodes = [node("Relu", ["x"], ["r"]), node("Cast", ["r"], ["y"], to=U8)]
    assert refusals(model(nodes, [("x", F, [2])], [("y", U8, None)])) == ()
    nodes.append(node("Cast", ["y"], ["again"], to=F))
    assert only(model(nodes, [("x", F, [2])], [("y", U8, None), ("again", F, None)]))[0] == "y"


@pytest.mark.parametrize("dtype", LACKING)
def test_types_that_tensorrt_lacks_are_named_at_the_edges(dtype) -> None:
    found = refusals(model([node("Identity", ["x"], ["y"])], [("x", dtype, [2])], [("y", dtype, [2])]))
    assert [r.where for r in found] == ["input x", "output y"]


@pytest.mark.parametrize("dtype", [F, F16, TensorProto.BFLOAT16, I32, I64, BOOL, I8])
def test_types_that_tensorrt_has_pass(dtype) -> None:
    assert refusals(model([node("Identity", ["x"], ["y"])], [("x", dtype, [2])], [("y", dtype, [2])])) == ()


def test_float64_is_let_through_and_named() -> None:
    """TensorRT builds it in float32; the stage's report names these values."""
    nodes = [node("Cast", ["x"], ["d"], to=F64), node("Mul", ["d", "c"], ["y"])]
    proto = model(nodes, [("x", F, [2])], [("y", F64, None)], {"c": np.array([0.1])})
    assert examine(proto) == ("d", "y")
    assert examine(model([node("Relu", ["x"], ["y"])], [("x", F64, [2])], [("y", F64, [2])])) == ("x", "y")


@pytest.mark.parametrize(("number", "harmful"), [(1e39, True), (-1e300, True), (1e38, False), (np.inf, False)])
def test_float64_constants_that_float32_can_not_hold_are_refused(number, harmful) -> None:
    nodes = [node("Cast", ["x"], ["d"], to=F64), node("Mul", ["d", "c"], ["e"]), node("Cast", ["e"], ["y"], to=F)]
    found = refusals(model(nodes, [("x", F, [2])], [("y", F, None)], {"c": np.array([0.5, number])}))
    assert [r.tensor for r in found] == (["c"] if harmful else [])


def test_a_float64_constant_that_is_cast_at_once_is_harmless() -> None:
    nodes = [node("Cast", ["c"], ["k"], to=F), node("Mul", ["x", "k"], ["y"])]
    assert examine(model(nodes, [("x", F, [2])], [("y", F, None)], {"c": np.array([0.1, 2**24 + 1])})) == ()


# Constructs


def test_batchnorm_and_dropout_in_training_mode() -> None:
    ones = {k: np.ones(3, np.float32) for k in "abcd"}
    norm = node("BatchNormalization", ["x", *"abcd"], ["y", "m", "v"], "norm", training_mode=1)
    tensor, told = only(model([norm], [("x", F, [2, 3])], [("y", F, None)], ones))
    assert tensor == "y" and "norm" in told and "BatchNormalization is in training mode" in told
    drop = node("Dropout", ["x", "r", "t"], ["y"], "drop")
    for mode in (True, False):
        stored = {"r": np.float32(0.5), "t": np.array(mode)}
        assert bool(refusals(model([drop], [("x", F, [2])], [("y", F, None)], stored))) is mode


def reduce(op: str, *before: onnx.NodeProto, opset: int = 18, **stored) -> onnx.ModelProto:
    inputs = [("x", F, [2, 3])] + ([] if before or stored else [("axes", I64, [1])])
    return model([*before, node(op, ["x", "axes"], ["y"], "total")], inputs, [("y", F, None)], stored, opset)


@pytest.mark.parametrize(("op", "opset"), [("ReduceSum", 13), ("ReduceMean", 18), ("ReduceMax", 18), ("ReduceL2", 18)])
def test_axes_of_a_reduction_must_be_there(op, opset) -> None:
    fold = reduce(op, node("Reshape", ["a", "one"], ["axes"]), a=np.array(1), one=[-1], opset=opset)
    assert only(fold)[0] == "axes" and "run fuse" in only(fold)[1] and "total" in only(fold)[1]
    given = reduce(op, opset=opset)
    assert only(given)[0] == "axes" and "make the axes constants" in only(given)[1]
    assert refusals(reduce(op, axes=[1], opset=opset)) == ()
    assert refusals(reduce(op, node("Constant", [], ["axes"], value_ints=[1]), opset=opset)) == ()
    assert refusals(reduce(op, node("Cast", ["a"], ["axes"], to=I64), a=np.array([1], np.int32), opset=opset)) == ()


RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(op: str, condition: str) -> onnx.ModelProto:
    gates = RECURRENT[op]
    then = graph([node(op, ["x", "w", "r"], ["", "h"], "cell", hidden_size=4)], ["h"])
    other = graph([node("ReduceSum", ["x", "axes"], ["e"])], ["e"])
    stored = {"w": np.ones((1, gates * 4, 4), np.float32), "r": np.ones((1, gates * 4, 4), np.float32), "axes": [0]}
    inputs = [("x", F, [3, 2, 4])]
    if condition == "constant":
        stored["c"] = np.array(True)
    else:
        inputs.append(("c", BOOL, []))
    choice = node("If", ["c"], ["y"], "choose", then_branch=then, else_branch=other)
    return model([choice], inputs, [("y", F, None)], stored)


@pytest.mark.parametrize("op", RECURRENT)
def test_a_recurrent_operator_in_a_branch_names_itself_and_the_if(op) -> None:
    tensor, told = only(recurrent(op, "input"))
    assert tensor == "h" and f"{op} lies in a branch of the If node choose" in told
    assert "depends on what c holds" in told and "values: {c: <number>}" in told
    assert refusals(recurrent(op, "constant")) == ()


def test_model_local_functions_are_looked_into() -> None:
    body = [node("Cast", ["p"], ["t"], to=U8), node("Cast", ["t"], ["q"], to=F)]
    opsets = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("own", "Widen", ["p"], ["q"], body, opsets)
    proto = model([node("Widen", ["x"], ["y"], domain="own")], [("x", F, [2])], [("y", F, [2])])
    proto.functions.append(function)
    proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    assert "uint8 inside the network" in only(proto)[1]


def test_suspects_are_the_constructs_that_fail_without_a_name() -> None:
    def choose(name: str, condition: str, then: onnx.NodeProto, other: onnx.NodeProto, output: str) -> onnx.NodeProto:
        then_branch, else_branch = (graph([n], [n.output[0]]) for n in (then, other))
        return node("If", [condition], [output], name, then_branch=then_branch, else_branch=else_branch)

    exp, neg, absolute = (node(op, ["x"], [op]) for op in ("Exp", "Neg", "Abs"))
    outer = choose("outer", "c", choose("inner", "d", exp, neg, "z"), absolute, "y")
    inputs = [("x", F, [2]), ("c", BOOL, []), ("d", BOOL, [])]
    [found] = suspects(model([outer], inputs, [("y", F, None)]))
    assert "If inside the branch of an If" in found and "inner" in found
    assert suspects(models.conv()) == ()
    double = choose("sizes", "c", node("Concat", ["x", "x"], ["twice"], axis=0), exp, "y")
    [found] = suspects(model([double], inputs[:2], [("y", F, None)]))
    assert "branches give outputs of different sizes" in found and "sizes" in found


def two_ranks(decides: list[onnx.NodeProto], shape: list[int | str | None], **stored: object) -> onnx.ModelProto:
    """An If on `c` that either takes axis 1 of x away or leaves it; the axes to take away lie outside of the branch."""
    then, other = graph([node("Squeeze", ["x", "axes"], ["t"])], ["t"]), graph([node("Identity", ["x"], ["e"])], ["e"])
    choice = node("If", ["c"], ["y"], "choose", then_branch=then, else_branch=other)
    inputs = [("x", F, shape), ("rate", I64, [])]
    return model([*decides, choice], inputs, [("y", F, None)], {"axes": [1], "one": 1, **stored})


SIZE_IS_ONE = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "one"], ["d"]), node("Equal", ["d", "one"], ["c"])]
INNER = [
    node("AveragePool", ["x"], ["p"], kernel_shape=[2], strides=[2]),
    *[node("Shape", ["p"], ["s"]), node("Gather", ["s", "two"], ["d"]), node("Equal", ["d", "one"], ["c"])],
]
BOTH = [node("Size", ["x"], ["d"]), node("Add", ["d", "rate"], ["e"]), node("Equal", ["e", "one"], ["c"])]


@pytest.mark.parametrize(
    ("decides", "shape", "told"),
    [
        (SIZE_IS_ONE, ["n", "chan", 3], ("the size chan", "import-onnx {dims: {chan: <size>}}")),
        (
            INNER,
            [2, "chan", "len"],
            ("the size chan and the size len", "import-onnx {dims: {chan: <size>, len: <size>}}"),
        ),
        (
            [node("Equal", ["rate", "one"], ["c"])],
            [2, 1, 3],
            ("what rate holds", "import-onnx {values: {rate: <number>}}"),
        ),
        (BOTH, ["n", 1, 3], ("the size n and what rate holds", "dims: {n: <size>}, values: {rate: <number>}")),
        (SIZE_IS_ONE, ["n", None, 3], ("the size n and the size x_dim1", "x_dim1: <size>}}")),
        (
            [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Cast", ["m"], ["c"], to=BOOL)],
            [2, 1, 3],
            ("what x holds", "give the branches outputs of the same form"),
        ),
    ],
)
def test_branches_of_two_ranks_name_the_size_to_fix(
    decides: list[onnx.NodeProto], shape: list[int | str | None], told: tuple[str, str]
) -> None:
    tensor, text = only(two_ranks(decides, shape, two=2))
    assert tensor == "y" and "If node choose" in text and "its branches have 2 and 3 axes" in text
    assert told[0] in text and told[1] in text


@pytest.mark.parametrize("shape", [["n", 1, 3], [2, 5, 3]])
def test_a_size_that_is_known_decides_the_branch(shape: list[int | str | None]) -> None:
    assert refusals(two_ranks(SIZE_IS_ONE, shape)) == ()


def test_branches_of_one_rank_are_no_trouble() -> None:
    same = two_ranks(SIZE_IS_ONE, ["n", "chan", 3])
    branch = next(a.g for n in same.graph.node for a in n.attribute if a.name == "then_branch")
    branch.node[0].CopyFrom(node("Relu", ["x"], ["t"]))
    assert refusals(same) == ()


PADDED = [
    node("Reshape", ["none", "all"], ["pads"]),
    node("Pad", ["x", "pads"], ["p"]),
    *[node("Shape", ["p"], ["s"]), node("Gather", ["s", "one"], ["d"]), node("Equal", ["d", "one"], ["c"])],
]
"""A size that follows from constants in a way that shape inference gives up on, as in a branch that can't be folded."""


@pytest.mark.parametrize(
    ("shape", "told", "hint"),
    [
        ([2, 5, 3], "depends on what rate holds", "import-onnx {values: {rate: <number>}}"),
        (["n", 5, 3], "depends on the size n and what rate holds", "dims: {n: <size>}, values: {rate: <number>}}"),
    ],
)
def test_an_if_in_a_branch_names_what_picks_the_branch(shape: list[int | str | None], told: str, hint: str) -> None:
    inner = two_ranks(PADDED, shape).graph
    outer = [
        node("Equal", ["rate", "one"], ["fast"]),
        node("If", ["fast"], ["y"], "outer", then_branch=graph([*inner.node], ["y"]),
             else_branch=graph([node("Identity", ["x"], ["e2"])], ["e2"])),
    ]  # fmt: skip
    stored = {"axes": [1], "one": 1, "none": [[0, 0, 0], [0, 0, 0]], "all": [-1]}
    proto = model(outer, [("x", F, shape), ("rate", I64, [])], [("y", F, None)], stored)
    found = next(r for r in refusals(proto) if "If node choose" in r.where)
    assert told in found.what and hint in found.hint and "dynamic" not in found.hint


def test_what_decides_is_never_left_blank() -> None:
    _, text = only(two_ranks(PADDED, [2, 5, 3], none=[[0, 0, 0], [0, 0, 0]], all=[-1]))
    assert "depends on constants alone" in text and "import-onnx" not in text


def test_a_model_of_the_project_is_told_about_export() -> None:
    proto = two_ranks(BOTH, ["n", 1, 3])
    proto.graph.node[0].metadata_props.add(key=SOURCE, value="task.py:3")
    _, text = only(proto)
    assert "leave n out of export's `dynamic`" in text and "give rate as a plain number" in text
    assert "import-onnx" not in text


def dropout(*, stored: bool | None) -> onnx.ModelProto:
    inputs = [("x", F, [2]), *([("t", BOOL, [])] if stored is None else [])]
    weights = {"r": np.float32(0.5), **({} if stored is None else {"t": np.array(stored)})}
    return model([node("Dropout", ["x", "r", "t"], ["y"], "drop")], inputs, [("y", F, None)], weights)


@pytest.mark.parametrize(
    ("stored", "told"), [(None, "import-onnx {values: {t: 0}}"), (True, "store false in t, its third input")]
)
def test_a_dropout_of_a_file_names_its_switch(stored: bool | None, told: str) -> None:
    with pytest.raises(StageError, match="Dropout is in training mode") as error:
        refuse_training(as_ir(dropout(stored=stored)))
    assert told in error.value.hint and "node drop" in error.value.where
    refuse_training(as_ir(dropout(stored=False)))
