"""Files that no runtime takes are refused by node, and files that only onnx's checker dislikes are not."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from layerline.backends.light import split
from layerline.graph.io.wellformed import refuse_broken
from layerline.pipeline.errors import StageError


def model(*nodes: onnx.NodeProto, output: str = "y", domains: tuple[str, ...] = ("",)) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", output)]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(d, 20) for d in domains])


def branch(name: str, reads: str, output: str = "") -> onnx.GraphProto:
    inner = [helper.make_node("Relu", [reads], [name], name=f"relu_{name}")]
    return helper.make_graph(inner, name, [], [helper.make_tensor_value_info(output or name, TensorProto.FLOAT, [2])])


def forked(reads: str, output: str = "b") -> onnx.ModelProto:
    both = {"then_branch": branch("a", "x"), "else_branch": branch("b", reads, output)}
    return model(helper.make_node("Relu", ["x"], ["c"]), helper.make_node("If", ["c"], ["y"], name="if", **both))


@pytest.mark.parametrize(
    ("broken", "where", "said"),
    [
        (model(helper.make_node("Add", ["x", "nothere"], ["y"], name="add")), "node add", "'nothere'"),
        (model(helper.make_node("Relu", ["z"], ["y"])), "node Relu of y", "'z'"),
        (model(helper.make_node("MyOp", ["x"], ["y"], name="mine", domain="acme")), "node mine", "domain 'acme'"),
        (model(helper.make_node("Relu", ["x"], ["y"], name="r"), domains=("acme",)), "node r", "domain 'ai.onnx'"),
        (forked("lost"), "node relu_b", "'lost'"),
        (model(helper.make_node("Relu", ["x"], ["z"])), "output y", "nothing computes it"),
        (forked("c", "lost"), "output lost", "nothing computes it"),
    ],
)
def test_refused(broken: onnx.ModelProto, where: str, said: str) -> None:
    with pytest.raises(StageError) as caught:
        refuse_broken(split(broken))
    assert caught.value.where == where and said in caught.value.what and "not valid ONNX" in caught.value.what


def function(name: str, *nodes: onnx.NodeProto) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", name, ["a"], ["b"], list(nodes), opsets)


def calling(*functions: onnx.FunctionProto, name: str = "f0") -> onnx.ModelProto:
    made = model(helper.make_node(name, ["x"], ["y"], domain="mine"), domains=("", "mine"))
    made.functions.extend(functions)
    return made


def _call(name: str, *ends: str) -> onnx.NodeProto:
    return helper.make_node(name, [ends[0]], [ends[1]], domain="mine", name=f"{ends[1]}_node")


def with_input(twice: str) -> onnx.ModelProto:
    made = model(helper.make_node("Add", ["x", "x"], ["y"]))
    made.graph.input.append(helper.make_tensor_value_info(twice, TensorProto.FLOAT, [2]))
    return made


def with_attributes(*names: str) -> onnx.ModelProto:
    """A LeakyRelu with a number under each name, without a type where it is called beta."""
    made = model(helper.make_node("LeakyRelu", ["x"], ["y"], name="leak"))
    for name in names:
        made.graph.node[0].attribute.append(helper.make_attribute(name, 0.5))
        if name == "beta":
            made.graph.node[0].attribute[-1].ClearField("type")
    return made


def with_versions(*domains: str) -> onnx.ModelProto:
    made = model(helper.make_node("Relu", ["x"], ["y"]))
    del made.opset_import[:]
    pairs = zip(domains, (17, 13), strict=True)
    made.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in pairs)
    return made


def in_two_versions() -> onnx.ModelProto:
    """A function that imports two versions of ONNX's own operators."""
    made = calling(function("f0", helper.make_node("Relu", ["a"], ["b"])))
    made.functions[0].opset_import.append(helper.make_opsetid("ai.onnx", 6))
    return made


def with_axes(count: int) -> onnx.ModelProto:
    made = model(helper.make_node("Relu", ["x"], ["y"]))
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1] * count))
    return made


RELU, ABS = helper.make_node("Relu", ["x"], ["y"], name="r"), helper.make_node("Abs", ["x"], ["y"], name="s")
STORED = model(RELU)
STORED.graph.initializer.append(helper.make_tensor("y", TensorProto.FLOAT, [2], [0, 0]))
BODY = forked("x")
BODY.graph.node[1].attribute[0].g.node.append(helper.make_node("Abs", ["x"], ["b"], name="again"))
LONG = [function(f"f{i}", _call(f"f{i + 1}", "a", "c"), _call(f"f{i + 1}", "c", "b")) for i in range(40)]


@pytest.mark.parametrize(
    ("broken", "where", "said"),
    [
        (model(RELU, ABS), "graph g", "'y' is defined 2 times: node r, node s"),
        (STORED, "graph g", "'y' is defined 2 times: a stored tensor, node r"),
        (with_input("x"), "graph g", "'x' is defined 2 times: an input, an input"),
        (with_input("y"), "graph g", "'y' is defined 2 times: an input, node Add of y"),
        (BODY, "graph b", "'b' is defined 2 times: node relu_b, node again"),
        (
            calling(function("f0", helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Abs", ["a"], ["b"]))),
            "function f0",
            "'b' is defined 2 times",
        ),
        (calling(*[function("f0", helper.make_node("Relu", ["a"], ["b"]))] * 2), "function f0", "defined 2 times"),
        (
            calling(function("f0", helper.make_node("Relu", ["zz"], ["b"], name="r"))),
            "node r",
            "it reads 'zz'",
        ),
        (with_attributes("alpha", "alpha"), "node leak", "2 attributes of the name 'alpha'"),
        (with_attributes("beta"), "node leak", "attribute 'beta' has no type"),
        (
            calling(function("f0", helper.make_node("Relu", ["a"], ["c"]))),
            "output b",
            "nothing computes it",
        ),
        (in_two_versions(), "function f0", "versions 20 and 6 of 'ai.onnx'"),
        (with_versions("", "ai.onnx"), "opset_import", "versions 17 and 13 of 'ai.onnx'"),
        (with_versions("mine", "mine"), "opset_import", "versions 17 and 13 of 'mine'"),
        (with_input(""), "graph g", "an input of the model has no name"),
        (with_axes(65), "x", "the input has 65 axes; 64 is the most"),
        (calling(function("f0", _call("f0", "a", "b"))), "function f0", "it calls itself"),
        (
            calling(function("f0", _call("f1", "a", "b")), function("f1", _call("f0", "a", "b"))),
            "function f1",
            "it calls itself",
        ),
        (
            calling(*LONG, function("f40", helper.make_node("Relu", ["a"], ["b"]))),
            "function f0",
            f"it comes to {3 * 2**40 - 2} nodes",
        ),
    ],
)
def test_what_is_defined_twice_or_has_no_end_is_refused_by_name(broken: onnx.ModelProto, where: str, said: str) -> None:
    with pytest.raises(StageError) as caught:
        refuse_broken(split(broken))
    assert caught.value.where == where and said in caught.value.what


@pytest.mark.parametrize(
    "sound",
    [
        forked("c"),
        model(helper.make_node("MyOp", ["x", ""], ["y"], domain="acme"), domains=("ai.onnx", "acme")),
        model(helper.make_node("Relu", ["h"], ["y"]), helper.make_node("Abs", ["x"], ["h"])),  # out of order
    ],
)
def test_taken(sound: onnx.ModelProto) -> None:
    refuse_broken(split(sound))


def test_a_function_is_imported_by_being_there() -> None:
    sound = model(helper.make_node("Twice", ["x"], ["y"], domain="mine"))
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    sound.functions.append(helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 20)]))
    refuse_broken(split(sound))
