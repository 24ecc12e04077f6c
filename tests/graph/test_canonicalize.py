"""Names in bodies, and functions at other versions: what is put straight before any rule looks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.forms import proto
from tests.graph.fusing import Feed, fired, normal, ops, prove, run

node, value = helper.make_node, helper.make_tensor_value_info


def body(nodes: list[onnx.NodeProto], output: str, **stored: float) -> onnx.GraphProto:
    tensors = [numpy_helper.from_array(np.float32(v), k) for k, v in stored.items()]
    return helper.make_graph(nodes, "body", [], [value(output, 1, None)], tensors)


def model(nodes: list[onnx.NodeProto], inputs: dict[str, Any], opset: int = 20, **stored: Any) -> onnx.ModelProto:
    given = [value(n, 9 if n.startswith("c") else 1, s) for n, s in inputs.items()]
    tensors = [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in stored.items()]
    graph = helper.make_graph(nodes, "g", given, [value("y", 1, None)], tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def choices(*names: str) -> list[Feed]:
    every = itertools.product((True, False), repeat=len(names))
    return [{"x": normal(2)} | {n: np.array(v) for n, v in zip(names, each, strict=True)} for each in every]


def shadowed(inner: float, middle: float, outer: float) -> onnx.ModelProto:
    """w of the main graph, another w in a branch, and in a branch of that a k of its own."""
    first = body([node("Mul", ["x", "k"], ["a"])], "a", k=inner)
    second = body([node("Mul", ["x", "w"], ["b"])], "b")
    taken = body([node("If", ["c"], ["r1"], then_branch=first, else_branch=second)], "r1", w=middle)
    other = body([node("Neg", ["x"], ["n"])], "n")
    nodes = [node("If", ["c2"], ["r"], then_branch=taken, else_branch=other), node("Mul", ["r", "w"], ["y"])]
    return model(nodes, {"x": [2], "c": [], "c2": []}, w=outer)


@pytest.mark.parametrize(("inner", "middle", "outer"), [(2, 7, 2), (7, 7, 2), (2, 2, 2), (3, 5, 7)])
def test_what_a_body_calls_like_something_around_it_keeps_its_numbers(inner: int, middle: int, outer: int) -> None:
    given = shadowed(inner, middle, outer)
    done = prove(given, *choices("c", "c2"))
    assert "1 values in bodies were called like others around them (w, …)" in done.notes
    for feed in choices("c", "c2"):
        np.testing.assert_array_equal(run(done.model, feed)["y"], run(given, feed)["y"])
    assert len([f for f in done.firings if f.site.rule == "duplicate-initializers"]) == 3 - len({inner, middle, outer})


@pytest.mark.parametrize("through", ["Identity", "Cast"])
def test_a_value_removed_outside_is_not_taken_for_its_namesake_inside(through: str) -> None:
    """z is x; the body reads z, and has an x of its own."""
    then = body([node("Add", ["z", "x"], ["t"])], "t", x=5)
    other = body([node("Neg", ["z"], ["e"])], "e")
    attributes = {"to": 1} if through == "Cast" else {}
    nodes = [node(through, ["x"], ["z"], **attributes), node("If", ["c"], ["y"], then_branch=then, else_branch=other)]
    done = prove(model(nodes, {"x": [2], "c": []}), *choices("c"))
    assert ops(done.model) == ["If"]


def test_sibling_branches_may_share_names() -> None:
    branches = {
        k: body([node("Mul", ["x", "k"], ["o"])], "o", k=v) for k, v in (("then_branch", 2), ("else_branch", 3))
    }
    done = prove(model([node("If", ["c"], ["y"], **branches)], {"x": [2], "c": []}), *choices("c"))
    assert not done.notes


@pytest.mark.parametrize("taken", [True, False])
def test_branch_that_moves_out_brings_its_own_tensor(taken: bool) -> None:
    """Both branches store a k: renaming the one that moves must leave the unfused model, which proves it, as it was."""
    branches = {k: body([node("Mul", ["x", "k"], [k])], k, k=v) for k, v in (("then_branch", 2), ("else_branch", 3))}
    given = model([node("If", ["c"], ["r"], **branches), node("Add", ["r", "k"], ["y"])], {"x": [2]}, k=11)
    given.graph.initializer.append(numpy_helper.from_array(np.array(taken), "c"))
    done = prove(given, *choices())
    assert "If" not in ops(done.model)
    assert "constant-branch" in fired(done)
    np.testing.assert_allclose(run(done.model, {"x": np.ones(2, "f")})["y"], 13 if taken else 14)


def linear(opset: int) -> onnx.FunctionProto:
    two = numpy_helper.from_array(np.float32(2))
    nodes = [node("MatMul", ["a", "w"], ["m"]), node("Constant", [], ["k"], value=two), node("Mul", ["m", "k"], ["o"])]
    return helper.make_function("own", "Linear", ["a", "w"], ["o"], nodes, [helper.make_opsetid("", opset)])


def twice(opset: int) -> onnx.FunctionProto:
    nodes = [call("Linear", ["a", "w"], "q"), node("Relu", ["q"], ["o"])]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function("own", "Twice", ["a", "w"], ["o"], nodes, imports)


def call(name: str, inputs: list[str], output: str) -> onnx.NodeProto:
    return node(name, inputs, [output], domain="own")


STORED = numpy_helper.from_array(normal(3, 2))
CALLS: dict[str, list[onnx.NodeProto]] = {
    "stored weight": [call("Linear", ["x", "w"], "y")],
    "computed input": [node("Relu", ["x"], ["r"]), call("Linear", ["r", "w"], "z"), node("Neg", ["z"], ["y"])],
    "weight in a node": [node("Constant", [], ["v"], value=STORED), call("Linear", ["x", "v"], "y")],
    "function in a function": [node("Relu", ["x"], ["r"]), call("Twice", ["r", "w"], "y")],
    "in a branch": [
        node(
            "If",
            ["c"],
            ["y"],
            then_branch=body([call("Linear", ["x", "w"], "t")], "t"),
            else_branch=body([call("Linear", ["x", "w"], "e0"), node("Neg", ["e0"], ["e"])], "e"),
        )
    ],
}


@pytest.mark.parametrize("opset", [17, 20, 21])
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_another_version_are_inlined(name: str, opset: int) -> None:
    inputs: dict[str, Any] = {"x": ["N", 3]} | ({"c": []} if name == "in a branch" else {})
    given = model(CALLS[name], inputs, w=normal(3, 2))
    given.functions.extend([linear(opset), twice(opset)])
    extra = {"c": np.array(True)} if "c" in inputs else {}
    done = prove(given, {"x": normal(2, 3), **extra}, {"x": normal(5, 3), **extra})
    assert done.notes[0] == "inlined the model's functions: Linear, Twice"
    assert not done.model.functions
    assert {"Linear", "Twice"}.isdisjoint(ops(done.model))


def test_function_whose_operator_changed_its_meaning_stays() -> None:
    """Softmax of opset 11 flattens what is behind its axis; it is not that of 20 under the same name."""
    nodes = [call("Inner", ["a"], "q"), node("Relu", ["q"], ["o"])]
    imports = [helper.make_opsetid("", 11), helper.make_opsetid("own", 1)]
    soft = helper.make_function("own", "Inner", ["a"], ["o"], [node("Softmax", ["a"], ["o"], axis=1)], imports)
    outer = helper.make_function("own", "Outer", ["a"], ["o"], nodes, imports)
    from layerline.graph.io.canonicalize import prepare

    given = model([call("Outer", ["x"], "y")], {"x": [2, 3, 4]})
    given.functions.extend([soft, outer])
    prepared, notes = prepare(given)
    assert [n.op_type for n in proto(prepared).graph.node] == ["Outer"]
    assert "functions Inner, Outer are left as they are" in notes[0]


def test_function_that_returns_its_input_stays() -> None:
    """Written out, it would give the input of the graph another name."""
    from layerline.graph.io.canonicalize import prepare

    given = model([call("Same", ["x"], "a"), node("Relu", ["a"], ["y"])], {"x": [2]})
    given.functions.append(helper.make_function("own", "Same", ["p"], ["p"], [], [helper.make_opsetid("", 20)]))
    prepared, _ = prepare(given)
    assert [i.name for i in proto(prepared).graph.input] == ["x"]
