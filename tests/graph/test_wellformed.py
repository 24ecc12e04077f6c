"""Files that no runtime takes are refused by node, and files that only onnx's checker dislikes are not."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from layerline.backends.light import split
from layerline.graph.wellformed import refuse_broken
from layerline.pipeline.errors import StageError


def model(*nodes: onnx.NodeProto, output: str = "y", domains: tuple[str, ...] = ("",)) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", output)]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(d, 20) for d in domains])


def branch(name: str, reads: str) -> onnx.GraphProto:
    inner = [helper.make_node("Relu", [reads], [name], name=f"relu_{name}")]
    return helper.make_graph(inner, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])])


def forked(reads: str) -> onnx.ModelProto:
    both = {"then_branch": branch("a", "x"), "else_branch": branch("b", reads)}
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
    ],
)
def test_refused(broken: onnx.ModelProto, where: str, said: str) -> None:
    with pytest.raises(StageError) as caught:
        refuse_broken(split(broken))
    assert caught.value.where == where and said in caught.value.what and "not valid ONNX" in caught.value.what


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
