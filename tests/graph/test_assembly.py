"""The order in which a graph that measures itself runs."""

from __future__ import annotations

import onnx_ir as ir
from onnx import parser

from layerline.graph.analysis.assembly import Assembly, in_order
from layerline.graph.analysis.ir_queries import copied, first_output, moving, names, reads
from tests.forms import as_ir


def _add(graph: Assembly, text: str) -> ir.Node:
    op, inputs, output = text.split(":")
    return graph.node(op, inputs.split(), output)


def _names(nodes: list[ir.Node]) -> str:
    return " ".join(map(first_output, nodes))


def test_each_measure_comes_right_after_what_it_needs() -> None:
    graph = Assembly()
    chain = [_add(graph, f"Relu:{a}:{b}") for a, b in ("xa", "ab", "bc", "cd")]
    measures = [_add(graph, "Shape:a:ma"), _add(graph, "Sub:a c:mc")]
    assert _names(in_order(measures)) == "a ma b c mc", "nothing needs d"
    assert _names(in_order(measures[:1])) == "a ma"
    assert _names(in_order(chain[::-1])) == "a b c d", "what came in the wrong order is put right"


def test_a_circle_ends() -> None:
    graph = Assembly()
    assert len(in_order([_add(graph, "Relu:a:b"), _add(graph, "Relu:b:a")])) == 2


def test_what_moves_from_run_to_run() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[2] x) => (float[2] y) <float[2] w = {1, 2}>
        { a = Neg (w) b = Add (a, w) c = Mul (b, x) r = RandomNormalLike (w) s = Abs (r) y = Add (c, s) }""")
    assert moving(as_ir(model).graph) == {"x", "c", "r", "s", "y"}


BRANCHES = """<ir_version: 8, opset_import: ["" : 18]>
    g (bool c, float[2] x) => (float[2] y) {
      outer = Neg (x)
      late = Abs (x)
      y = If (c) <then_branch = t () => (float[2] o) { inner = Relu (x) o = Add (inner, outer) },
                  else_branch = e () => (float[2] p) { p = Identity (late) }>
    }"""


def test_bodies_read_from_outside_only_what_they_do_not_make() -> None:
    graph = as_ir(parser.parse_model(BRANCHES)).graph
    assert set(names(reads(graph[-1]))) == {"c", "x", "outer", "late"}


def test_a_copy_renames_what_its_bodies_write_and_reads_the_outside_by_its_new_names() -> None:
    graph = Assembly()
    source = as_ir(parser.parse_model(BRANCHES)).graph[-1]
    copy = graph.copy(source, lambda name: {"x": "x", "c": "c"}.get(name, f"p/{name}"), lambda name: f"p/{name}")
    assert names(copy.outputs) == ["p/y"] and set(names(reads(copy))) == {"c", "x", "p/outer", "p/late"}
    branch = copy.attributes["then_branch"].as_graph()
    assert [first_output(node) for node in branch] == ["p/inner", "p/o"] and names(branch.outputs) == ["p/o"]
    assert branch[0].outputs[0] is branch[1].inputs[0], "a value inside is one value"
    assert names(source.outputs) == ["y"], "the source is as it was"


def test_a_copy_may_be_given_other_types() -> None:
    model = as_ir(parser.parse_model(BRANCHES))
    copy = copied(model)
    for value in (copy.graph.inputs[1], copy.graph.outputs[0]):
        value.dtype = ir.DataType.FLOAT16
    assert [value.dtype for value in (*model.graph.inputs, *model.graph.outputs)] == [
        ir.DataType.BOOL,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT,
    ]
