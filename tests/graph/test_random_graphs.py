"""Whatever small graph is drawn, it computes the same before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.forms import proto
from tests.graph.fusing import normal, prove, statistics

SIZE = 6


@dataclass
class Draft:
    """A graph while it is drawn: values by name with their channels, all of shape (N, channels, H, W)."""

    draw: Any
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    values: list[tuple[str, int]] = field(default_factory=lambda: [("x", 4)])

    def pick(self) -> tuple[str, int]:
        # The newest value more often than the others, so that chains grow.
        return self.values[-1] if self.draw(st.booleans()) else self.draw(st.sampled_from(self.values))

    def node(self, op: str, inputs: list[str], channels: int, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        self.values.append((name, channels))
        return name

    def inner(self, op: str, inputs: list[str], channels: int, **attributes: Any) -> str:
        """A node whose value has another shape and is for the next node alone."""
        name = self.node(op, inputs, channels, **attributes)
        self.values.pop()
        return name

    def tensor(self, array: Any, shared: str = "") -> str:
        name = shared or f"t{len(self.tensors)}"
        self.tensors.setdefault(name, array)
        return name


def conv(d: Draft) -> None:
    x, channels = d.pick()
    groups = d.draw(st.sampled_from([g for g in (1, 2, 4) if channels % g == 0]))
    out = d.draw(st.sampled_from([4, 8]))
    transposed = d.draw(st.booleans())
    kernel = d.draw(st.sampled_from([1, 3]))
    shape = (channels, out // groups) if transposed else (out, channels // groups)
    # Same shape, same tensor: weights are shared between nodes.
    name = "x".join(map(str, ("w", transposed, groups, *shape, kernel)))
    weight = d.tensor(normal(*shape, kernel, kernel, seed=kernel + out) * np.float32(0.3), name)
    bias = [d.tensor(normal(out, seed=out), f"b{out}")] if d.draw(st.booleans()) else []
    pads = [kernel // 2] * 4
    op = "ConvTranspose" if transposed else "Conv"
    d.node(op, [x, weight, *bias], out, group=groups, pads=pads, kernel_shape=[kernel] * 2)


def batchnorm(d: Draft) -> None:
    x, channels = d.pick()
    given = [d.tensor(v, f"{k}{channels}") for k, v in statistics(channels).items()]
    d.node("BatchNormalization", [x, *given], channels, epsilon=d.draw(st.sampled_from([1e-5, 1e-2])))


def activation(d: Draft) -> None:
    x, channels = d.pick()
    op = d.draw(st.sampled_from(["Relu", "Sigmoid", "Tanh", "Identity", "HardSwish"]))
    d.node(op, [x], channels)


def padded_pool(d: Draft) -> None:
    x, channels = d.pick()
    pads = d.tensor(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")
    value = d.tensor(np.float32(d.draw(st.sampled_from([0.0, -np.inf]))))
    if d.draw(st.booleans()):
        padded = d.inner("Pad", [x, pads], channels)
        weight = d.tensor(normal(4, channels, 3, 3, seed=9) * np.float32(0.3), f"p{channels}")
        d.node("Conv", [padded, weight], 4)
    else:
        padded = d.inner("Pad", [x, pads, value], channels)
        op = d.draw(st.sampled_from(["MaxPool", "AveragePool"])) if d.tensors[value] == 0 else "MaxPool"
        d.node(op, [padded], channels, kernel_shape=[3, 3])


def arithmetic(d: Draft) -> None:
    x, channels = d.pick()
    op = d.draw(st.sampled_from(["Add", "Mul", "Sub", "Div"]))
    others = [v for v, c in d.values if c == channels]
    if d.draw(st.booleans()) and op != "Div":
        d.node(op, [x, d.draw(st.sampled_from(others))], channels)
        return
    shape = d.draw(st.sampled_from([(), (1,), (channels, 1, 1), (1, channels, 1, 1), (1, SIZE, 1), (SIZE,)]))
    number = d.draw(st.sampled_from([0.0, 1.0, 0.5])) if op != "Div" else 2.0
    array = np.float32(number) + normal(*shape, seed=3) * np.float32(d.draw(st.booleans()) and op != "Div")
    pair = [x, d.tensor(array)]
    d.node(op, pair[::-1] if op != "Div" and d.draw(st.booleans()) else pair, channels)


def turned(d: Draft) -> None:
    """There and back, with something between or not; or a Reshape that joins and splits."""
    x, channels = d.pick()
    if d.draw(st.booleans()):
        perm = d.draw(st.permutations([0, 1, 2, 3]))
        out = d.inner("Transpose", [x], channels, perm=perm)
        if d.draw(st.booleans()):
            out = d.inner(d.draw(st.sampled_from(["Relu", "Neg", "Abs"])), [out], channels)
        d.node("Transpose", [out], channels, perm=np.argsort(perm).tolist())
        return
    out = d.inner("Reshape", [x, d.tensor(np.array([0, channels, -1]))], channels)
    d.node("Reshape", [out, d.tensor(np.array([0, channels, SIZE, SIZE]))], channels)


def computed(d: Draft) -> None:
    """Shapes worked out by the graph itself: a Reshape there and back, or an Expand to the shape of another value."""
    x, channels = d.pick()
    shape = d.inner("Shape", [x], 0)
    if d.draw(st.booleans()):
        small = d.tensor(normal(*d.draw(st.sampled_from([(1,), (channels, 1, 1), (1, 1, SIZE, 1)])), seed=6))
        wide = d.inner("Expand", [small, shape], channels)
        d.node(d.draw(st.sampled_from(["Add", "Mul"])), [x, wide], channels)
        return
    first = d.inner("Gather", [shape, d.tensor(np.array([0]))], 0)
    rest = d.tensor(np.array(d.draw(st.sampled_from([[channels, -1], [-1], [channels * SIZE, SIZE]]))))
    target = d.inner("Concat", [first, rest], 0, axis=0)
    flat = d.inner("Reshape", [x, target], channels)
    if d.draw(st.booleans()):
        flat = d.inner("Neg", [flat], channels)
    d.node("Reshape", [flat, shape], channels)


def halves(d: Draft) -> None:
    """The two halves of the channels, in any order, one after the other."""
    x, channels = d.pick()
    axis, cuts = d.tensor(np.array([1]), "one"), (0, channels // 2, channels)
    parts = [
        d.inner("Slice", [x, d.tensor(np.array([a])), d.tensor(np.array([b])), axis], channels // 2)
        for a, b in pairwise(cuts)
    ]
    d.node("Concat", parts[:: d.draw(st.sampled_from([1, -1]))], channels, axis=1)


def dense(d: Draft) -> None:
    """A matrix over the last axis, with a bias that may be 0, between Casts that do nothing."""
    x, channels = d.pick()
    cast = d.node("Cast", [x], channels, to=TensorProto.FLOAT)
    product = d.inner("MatMul", [cast, d.tensor(normal(SIZE, SIZE, seed=7) * np.float32(0.4), "dense")], channels)
    bias = normal(SIZE, seed=8) * np.float32(d.draw(st.sampled_from([0.0, 1.0])))
    d.node("Add", [product, d.tensor(bias)], channels)


STEPS = [
    computed,
    halves,
    dense,
    conv,
    conv,
    batchnorm,
    batchnorm,
    activation,
    padded_pool,
    arithmetic,
    arithmetic,
    turned,
]


@st.composite
def graphs(draw: Any) -> onnx.ModelProto:
    d = Draft(draw)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=9)):
        step(d)
    made = [v for v in d.values if v[0] != "x"]
    extra = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    outputs = dict.fromkeys([made[-1], *extra])
    shapes = {name: ["N", channels, SIZE, SIZE] for name, channels in d.values}
    graph = helper.make_graph(
        d.nodes,
        "drawn",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shapes["x"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name, _ in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in d.tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_the_same_before_and_after(model: onnx.ModelProto) -> None:
    done = prove(model, {"x": normal(2, 4, SIZE, SIZE)}, {"x": normal(3, 4, SIZE, SIZE, seed=1)})
    assert len(proto(done.model).graph.node) <= len(model.graph.node)
