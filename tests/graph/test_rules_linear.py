"""BatchNormalization, constant arithmetic and biases into Conv, ConvTranspose, Gemm and MatMul."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.forms import proto
from tests.graph.fusing import fired, normal, only, ops, parse, prove, reason, run, statistics

BN = "y = BatchNormalization {attributes}(c, gamma, beta, mean, var)"


def conv_bn(
    channels: int, groups: int, *, bias: bool = True, spatial: int = 2, attributes: str = ""
) -> onnx.ModelProto:
    dims, kernel = ", ".join(["?"] * spatial), (3,) * spatial
    sizes = {"w": normal(channels, 4 // groups, *kernel, seed=2)} | ({"b": normal(channels, seed=3)} if bias else {})
    body = f"c = Conv <group = {groups}>(x, w{', b' if bias else ''}) {BN.format(attributes=attributes)}"
    return parse(f"(float[N, 4, {dims}] x) => (float[N, {channels}, {dims}] y)", body, **sizes, **statistics(channels))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_conv_takes_in_batchnorm(groups: int, bias: bool, spatial: int) -> None:
    model = conv_bn(8, groups, bias=bias, spatial=spatial)
    done = prove(model, {"x": normal(2, 4, *(7,) * spatial)}, {"x": normal(5, 4, *(9,) * spatial)})
    assert ops(done.model) == ["Conv"]
    assert fired(done) == {"batchnorm"}
    [firing] = [f for f in done.firings if f.site.rule == "batchnorm"]
    assert firing.sources == ("c", "y")


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"), [(4, 4, 2), (4, 6, 2), (6, 3, 3), (4, 8, 4), (3, 5, 1), (8, 2, 2)]
)
def test_convtranspose_takes_in_batchnorm_by_groups(inputs: int, outputs: int, groups: int) -> None:
    """T05: the scale of group g belongs to the inputs of group g."""
    body = f"c = ConvTranspose <group = {groups}, pads = [1, 1, 1, 1]>(x, w) {BN.format(attributes='')}"
    model = parse(
        f"(float[N, {inputs}, H, W] x) => (float[N, {outputs}, ?, ?] y)",
        body,
        w=normal(inputs, outputs // groups, 3, 3, seed=2),
        **statistics(outputs),
    )
    done = prove(model, {"x": normal(2, inputs, 6, 5)})
    assert ops(done.model) == ["ConvTranspose"]
    a, b = run(model, {"x": normal(1, inputs, 6, 5)}), run(done.model, {"x": normal(1, inputs, 6, 5)})
    np.testing.assert_allclose(a["y"], b["y"], atol=1e-5)


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.0), (2.0, 0.0)])
def test_gemm_takes_in_batchnorm(trans_b: int, alpha: float, beta: float) -> None:
    weight = normal(5, 3, seed=2) if trans_b else normal(3, 5, seed=2)
    gemm = f"c = Gemm <transB = {trans_b}, alpha = {alpha}, beta = {beta}>(x, w, b)"
    model = parse(
        "(float[N, 3] x) => (float[N, 5] y)",
        f"{gemm} {BN.format(attributes='')}",
        w=weight,
        b=normal(1, 5, seed=3),
        **statistics(5),
    )
    assert ops(prove(model, {"x": normal(4, 3)}).model) == ["Gemm"]


def test_matmul_takes_in_batchnorm_and_becomes_gemm() -> None:
    body = f"c = MatMul(x, w) {BN.format(attributes='')}"
    model = parse("(float[N, 3] x) => (float[N, 5] y)", body, w=normal(3, 5, seed=2), **statistics(5))
    assert ops(prove(model, {"x": normal(4, 3)}).model) == ["Gemm"]


@pytest.mark.parametrize("epsilon", [1e-3, 1e-12, 0.1])
def test_epsilon_is_the_nodes_own(epsilon: float) -> None:
    """T06: with a variance of 1e-4 and eps 1e-3 a channel is scaled by 30.151; 1e-5 in its place gives 95.346."""
    tensors = {k: np.full(2, v, np.float32) for k, v in (("gamma", 1), ("beta", 0), ("mean", 0), ("var", 1e-4))}
    model = parse(
        "(float[1, 2, H, W] x) => (float[1, 2, H, W] y)",
        f"c = Conv(x, w) {BN.format(attributes=f'<epsilon = {epsilon}>')}",
        w=np.eye(2, dtype=np.float32).reshape(2, 2, 1, 1),
        **tensors,
    )
    done = prove(model, {"x": normal(1, 2, 3, 3)})
    weight = onnx.numpy_helper.to_array(proto(done.model).graph.initializer[0])
    np.testing.assert_allclose(weight.reshape(2, 2).diagonal(), 1 / np.sqrt(1e-4 + epsilon), rtol=1e-5)


def test_output_that_is_a_graph_output_stays() -> None:
    """T07."""
    model = conv_bn(4, 1)
    model.graph.output.append(onnx.helper.make_tensor_value_info("c", 1, ["N", 4, None, None]))
    done = prove(model, {"x": normal(2, 4, 6, 6)})
    assert ops(done.model) == ["Conv", "BatchNormalization"]
    assert reason(done, "batchnorm") == "Conv output c is a graph output"


def test_output_with_a_second_consumer_stays() -> None:
    """T07."""
    body = f"c = Conv(x, w) z = {BN.format(attributes='')[4:]} y = Add(z, c)"
    tensors = {"w": normal(4, 4, 3, 3)} | statistics(4)
    model = parse("(float[N, 4, H, W] x) => (float[N, 4, ?, ?] y)", body, **tensors)
    done = prove(model, {"x": normal(2, 4, 6, 6)})
    assert ops(done.model) == ["Conv", "BatchNormalization", "Add"]
    assert reason(done, "batchnorm") == "Conv output c has a second consumer y"


def test_batchnorm_in_training_mode_stays() -> None:
    """T07."""
    body = "c = Conv(x, w) y, m, v = BatchNormalization <training_mode = 1>(c, gamma, beta, mean, var)"
    tensors = {"w": normal(4, 4, 3, 3)} | statistics(4)
    model = parse("(float[N, 4, H, W] x) => (float[N, 4, ?, ?] y, float[4] m, float[4] v)", body, **tensors)
    done = prove(model, {"x": normal(2, 4, 6, 6)})
    assert "BatchNormalization" in ops(done.model)
    assert "training mode" in reason(done, "batchnorm")


def test_computed_statistics_stay() -> None:
    tensors = {k: v for k, v in statistics(4).items() if k != "var"}
    body = f"c = Conv(x, w) {BN.format(attributes='')}"
    signature = "(float[N, 4, H, W] x, float[4] var) => (float[N, 4, ?, ?] y)"
    done = prove(
        parse(signature, body, w=normal(4, 4, 3, 3), **tensors), {"x": normal(2, 4, 6, 6), "var": np.ones(4, "f")}
    )
    assert reason(done, "batchnorm") == "var of BatchNormalization y is computed"


def test_matmul_of_rank_3_keeps_batchnorm_over_another_axis() -> None:
    body = f"c = MatMul(x, w) {BN.format(attributes='')}"
    model = parse("(float[N, 4, 3] x) => (float[N, 4, 4] y)", body, w=normal(3, 4, seed=2), **statistics(4))
    done = prove(model, {"x": normal(2, 4, 3)})
    assert ops(done.model) == ["MatMul", "BatchNormalization"]
    assert "the channels of c lie on axis 2" in reason(done, "batchnorm")


def test_shared_weights_are_scaled_for_one_reader_only() -> None:
    body = f"c = Conv(x, w) z = {BN.format(attributes='')[4:]} r = Relu(x) d = Conv(r, w) y = Sub(z, d)"
    model = parse("(float[N, 4, H, W] x) => (float[N, 4, ?, ?] y)", body, w=normal(4, 4, 3, 3), **statistics(4))
    assert ops(prove(model, {"x": normal(2, 4, 6, 6)}).model) == ["Conv", "Relu", "Conv", "Sub"]


def test_branches_that_share_a_weight_go_on_sharing_it_with_a_bias() -> None:
    body = """s = ReduceSum <keepdims = 0>(x) c = Greater(s, zero) y = If (c) <
      then_branch: graph = t () => (float[] ty) { tm = MatMul(x, w) ty = Add(tm, one) },
      else_branch: graph = e () => (float[] ey) { em = MatMul(x, w) ey = Add(em, two) }>"""
    model = parse("(float[N, 3] x) => (float[N, 4] y)", body, w=normal(3, 4), zero=np.float32(0), one=normal(4),
                  two=normal(4, seed=1))  # fmt: skip
    done = prove(model, {"x": normal(2, 3)}, {"x": -normal(2, 3)}).model
    stored = [value.shape for graph in done.graphs() for value in graph.initializers.values()]
    assert ops(done)[-1] == "If" and stored.count(ir.Shape([3, 4])) == 1
    assert [node.op_type for graph in done.graph.subgraphs() for node in graph] == ["Gemm", "Gemm"]


@pytest.mark.parametrize("where", ["constant", "identity", "cast"])
def test_weights_are_found_wherever_they_are(where: str) -> None:
    """T22: in a Constant node, behind Identity, behind a Cast from float16; with folding off as with it on."""
    weight = normal(2, 1, 1, 1, dtype=np.float16)
    text = ", ".join(str(float(x)) for x in weight.ravel())
    made = {
        "constant": f"w = Constant <value = float[2, 1, 1, 1] {{{text}}}>()",
        "identity": "w = Identity(v)",
        "cast": "w = Cast <to = 1>(h)",
    }[where]
    given = {"identity": {"v": weight.astype(np.float32)}, "cast": {"h": weight}}.get(where, {})
    model = parse(
        "(float[N, 1, H, W] x) => (float[N, 2, H, W] y)",
        f"{made} c = Conv(x, w) {BN.format(attributes='')}",
        **given,
        **statistics(2),
    )
    for rules in (only("batchnorm"), tuple(r for r in only("batchnorm") if r.name == "batchnorm")):
        done = prove(model, {"x": normal(2, 1, 3, 3)}, rules=rules)
        assert "BatchNormalization" not in ops(done.model)


def test_initializers_that_are_also_inputs_are_weights() -> None:
    model = conv_bn(4, 1)
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
    )
    model.ir_version = 3
    done = prove(model, {"x": normal(2, 4, 6, 6)})
    assert ops(done.model) == ["Conv"]
    assert [i.name for i in proto(done.model).graph.input] == ["x"]
    assert "were also inputs" in done.notes[0]


def test_fused_node_says_what_it_replaces() -> None:
    model = conv_bn(4, 1)
    for node, module in zip(model.graph.node, ("layer1.conv", "layer1.bn"), strict=True):
        node.name = f"node_{node.op_type}"
        node.metadata_props.add(key="layerline.module", value=module)
    done = prove(model, {"x": normal(2, 4, 6, 6)})
    [node] = proto(done.model).graph.node
    told = {p.key: p.value for p in node.metadata_props}
    assert node.output == ["y"]
    assert told["layerline.module"] == "layer1.conv, layer1.bn"
    assert told["layerline.rule"] == "batchnorm"
    assert told["layerline.sources"] == '["c", "y"]'


PER_CHANNEL = [("Mul", (4, 1, 1)), ("Add", (1, 4, 1, 1)), ("Sub", ()), ("Mul", (1, 1, 1, 1)), ("Add", (4, 1, 1))]


@pytest.mark.parametrize(
    ("op", "shape", "swapped"),
    [("Div", (1,), False), ("Div", (4, 1, 1), False), *((o, s, w) for o, s in PER_CHANNEL for w in (False, True))],
)
def test_conv_takes_in_constants_per_channel(op: str, shape: tuple[int, ...], swapped: bool) -> None:
    model = parse(
        "(float[N, 3, H, W] x) => (float[N, 4, ?, ?] y)",
        f"c = Conv(x, w, b) y = {op}({'a, c' if swapped else 'c, a'})",
        w=normal(4, 3, 3, 3),
        b=normal(4, seed=1),
        a=np.float32(1.5) + normal(*shape, seed=2) ** 2,
    )
    done = prove(model, {"x": normal(2, 3, 6, 6)})
    assert ops(done.model) == ["Conv"]


@pytest.mark.parametrize(
    ("expression", "shape", "why"),
    [
        ("Div(a, c)", (1,), "divides a constant"),
        ("Div(c, a)", (), "divides by zero"),
        ("Add(c, a)", (1, 1, 4, 4), "not one number per channel"),
        ("Mul(c, a)", (4,), "not one number per channel"),
        ("Add(c, a)", (1, 1, 4, 1, 1), "not one number per channel"),
        ("Add(c, a)", (2, 1, 1, 1), "not one number per channel"),
    ],
)
def test_other_constants_stay(expression: str, shape: tuple[int, ...], why: str) -> None:
    model = parse(
        "(float[2, 3, 6, 6] x) => (float[] y)",
        f"c = Conv(x, w) y = {expression}",
        w=normal(4, 3, 3, 3),
        a=np.zeros(shape, np.float32) if "zero" in why else normal(*shape, seed=2),
    )
    done = prove(model, {"x": normal(2, 3, 6, 6)})
    assert len(ops(done.model)) == 2
    assert why in reason(done, "affine")


def test_a_number_reaches_the_linear_op_through_reshape_and_transpose() -> None:
    body = "m = MatMul(x, w) a = Add(m, b) r = Reshape(a, s) t = Transpose <perm = [0, 2, 1, 3]>(r) y = Mul(t, k)"
    model = parse(
        "(float[N, 5, 6] x) => (float[N, 2, 5, 4] y)",
        body,
        w=normal(6, 8),
        b=normal(8, seed=1),
        s=np.array([0, 0, 2, 4]),
        k=np.float32(0.25),
    )
    done = prove(model, {"x": normal(3, 5, 6)})
    # The MatMul has no bias of its own: the Add between is a near miss.
    assert ops(done.model) == ["MatMul", "Add", "Reshape", "Transpose", "Mul"]
    model.graph.node.remove(model.graph.node[1])
    model.graph.node[1].input[0] = "m"
    assert ops(prove(model, {"x": normal(3, 5, 6)}).model) == ["MatMul", "Reshape", "Transpose"]


def test_weights_that_would_overflow_stay() -> None:
    model = parse(
        "(float16[N, 2] x) => (float16[N, 2] y)",
        "c = Gemm(x, w) y = Mul(c, k)",
        w=np.full((2, 2), 60000, np.float16),
        k=np.float16(100),
    )
    done = prove(model, {"x": np.full((1, 2), 1e-6, np.float16)})
    assert ops(done.model) == ["Gemm", "Mul"]
    assert "would overflow float16" in reason(done, "affine")


def test_bias_that_widens_the_product_is_no_gemm() -> None:
    """T09: (3x3) x (3x1) + [[0, 1, 2, 3]] has shape (3, 4) and rows 3, 4, 5, 6."""
    model = parse(
        "(float[3, 3] x) => (float[3, 4] y)",
        "m = MatMul(x, w) y = Add(m, b)",
        w=np.ones((3, 1), np.float32),
        b=np.array([[0, 1, 2, 3]], np.float32),
    )
    done = prove(model, {"x": np.ones((3, 3), np.float32)})
    np.testing.assert_array_equal(run(done.model, {"x": np.ones((3, 3), np.float32)})["y"], [[3, 4, 5, 6]] * 3)
    assert "not one number per channel" in reason(done, "affine")


@pytest.mark.parametrize("bias", [(4,), (1, 4), (1, 1), ()])
def test_bias_that_broadcasts_one_way_makes_a_gemm(bias: tuple[int, ...]) -> None:
    model = parse(
        "(float[3, 5] x) => (float[3, 4] y)", "m = MatMul(x, w) y = Add(m, b)", w=normal(5, 4), b=normal(*bias, seed=1)
    )
    assert ops(prove(model, {"x": normal(3, 5)}).model) == ["Gemm"]


@pytest.mark.parametrize(
    ("x", "bias"),
    [((2, 3, 5), (4,)), ((3, 5), (1, 3, 4)), ((3, 5), (1, 1, 1, 1, 4)), ((2, 3, 5), (3, 4)), ((5,), (4,))],
)
def test_other_ranks_make_no_gemm(x: tuple[int, ...], bias: tuple[int, ...]) -> None:
    """T09."""
    given = f"(float[{', '.join(map(str, x))}] x, float[{', '.join(map(str, bias))}] b)"
    model = parse(f"{given} => (float[] y)", "m = MatMul(x, w) y = Add(m, b)", w=normal(5, 4))
    done = prove(model, {"x": normal(*x), "b": normal(*bias, seed=1)})
    assert ops(done.model) == ["MatMul", "Add"]


def test_gemm_keeps_a_constant_of_a_higher_rank_apart() -> None:
    """T09: Gemm with a bias of N, plus a constant of (1, M, N)."""
    model = parse(
        "(float[3, 5] x) => (float[1, 3, 4] y)",
        "m = Gemm(x, w, b) y = Add(m, c)",
        w=normal(5, 4),
        b=normal(4, seed=1),
        c=normal(1, 3, 4, seed=2),
    )
    assert ops(prove(model, {"x": normal(3, 5)}).model) == ["Gemm", "Add"]


@pytest.mark.parametrize("shape", [(2, 3), (5, 3)])
def test_product_added_to_itself_stays(shape: tuple[int, int]) -> None:
    """Gemm would need the product beside it."""
    done = prove(parse("(float[N, 3] x) => (float[N, 3] y)", "m = MatMul(x, w) y = Add(m, m)", w=normal(3, 3)),
                 {"x": normal(*shape)})  # fmt: skip
    assert ops(done.model) == ["MatMul", "Add"]


@pytest.mark.parametrize("stray", [np.nan, np.inf])
def test_bias_that_beta_leaves_out_must_be_finite(stray: float) -> None:
    bias = normal(5)
    bias[2] = stray
    body = "c = Gemm <beta = 0.0>(x, w, b) y = Mul(c, k)"
    done = prove(parse("(float[N, 4] x) => (float[N, 5] y)", body, w=normal(4, 5), b=bias, k=normal(5)),
                 {"x": normal(3, 4)})  # fmt: skip
    assert ops(done.model) == ["Gemm", "Mul"]
    assert "is not finite, and beta = 0 leaves it out" in reason(done, "affine")


@pytest.mark.parametrize("move", ["Squeeze(m)", "Reshape(m, none)"])
@pytest.mark.parametrize(("shape", "expected"), [((), 2), ((1,), 3)])
def test_constant_with_an_axis_behind_a_scalar_stays(move: str, shape: tuple[int, ...], expected: int) -> None:
    """Rank 0 times (1,) has rank 1."""
    model = parse("(float[1, 3] x) => (float[] y)", f"m = MatMul(x, w) r = {move} y = Mul(r, k)", w=normal(3, 1),
                  k=np.full(shape, 2, np.float32), none=np.array([], np.int64))  # fmt: skip
    done = prove(model, {"x": normal(1, 3)})
    assert len(ops(done.model)) == expected


@pytest.mark.parametrize(("scale", "why"), [(1e-4, "too small for float16"), (1e4, "overflow float16")])
def test_weights_that_leave_their_type_stay(scale: float, why: str) -> None:
    half, scale = np.float16, np.float16(scale)
    factor = 1e-3 if scale < 1 else 60
    model = parse("(float16[N, 4] x) => (float16[N, 3] y)", "c = MatMul(x, w) y = Mul(c, k)",
                  w=(normal(4, 3) * factor).astype(half), k=scale)  # fmt: skip
    done = prove(model, {"x": (normal(2, 4) / (1 if scale < 1 else 1e4)).astype(half)})
    assert ops(done.model) == ["MatMul", "Mul"]
    assert why in reason(done, "affine")


@pytest.mark.parametrize("var", [0.0, -1.0])
def test_batchnorm_without_a_variance_stays(var: float) -> None:
    tensors = statistics(3) | {"var": np.array([1, var, 1], np.float32)}
    body = "c = Conv(x, w) y = BatchNormalization <epsilon = 0.0>(c, gamma, beta, mean, var)"
    model = parse("(float[N, 4, 6] x) => (float[N, 3, 4] y)", body, w=normal(3, 4, 3), **tensors)
    done = prove(model, {"x": normal(2, 4, 6)})
    assert ops(done.model) == ["Conv", "BatchNormalization"]
    assert "a variance that is not above 0" in reason(done, "batchnorm")
