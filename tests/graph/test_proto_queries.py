"""The order in which a graph that measures itself runs."""

from __future__ import annotations

from onnx import NodeProto, helper, parser

from layerline.graph.analysis.proto_queries import in_order, moving, reads


def _node(text: str) -> NodeProto:
    return helper.make_node(*text.split(":")[:1], text.split(":")[1].split(), text.split(":")[2].split())


def _names(nodes: list[NodeProto]) -> str:
    return " ".join(n.output[0] for n in nodes)


def test_each_measure_comes_right_after_what_it_needs() -> None:
    chain = [_node(f"Relu:{a}:{b}") for a, b in ("xa", "ab", "bc", "cd")]
    measures = [_node("Shape:a:ma"), _node("Sub:a c:mc")]
    assert _names(in_order(measures, chain)) == "a ma b c mc", "nothing needs d"
    assert _names(in_order(measures[:1], chain)) == "a ma"
    assert _names(in_order(chain[::-1], [])) == "a b c d", "what came in the wrong order is put right"


def test_a_circle_ends() -> None:
    assert len(in_order([_node("Relu:a:b"), _node("Relu:b:a")], [])) == 2


def test_what_moves_from_run_to_run() -> None:
    graph = parser.parse_graph("""g (float[2] x) => (float[2] y) <float[2] w = {1, 2}>
        { a = Neg (w) b = Add (a, w) c = Mul (b, x) r = RandomNormalLike (w) s = Abs (r) y = Add (c, s) }""")
    assert moving(graph) == {"x", "c", "r", "s", "y"}


def test_bodies_read_from_outside_only_what_they_do_not_make() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        g (bool c, float[2] x) => (float[2] y) {
          y = If (c) <then_branch = t () => (float[2] o) { inner = Relu (x) o = Add (inner, outer) },
                      else_branch = e () => (float[2] x) { unused = Identity (late) }>
        }""")
    assert set(reads(model.graph.node[0])) == {"c", "x", "outer", "late"}
