"""Module paths and source lines: read from what torch's exporter leaves, kept as our own, free of machine paths."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from onnx import parser

from layerline.backends.base import MODULE, TRACED
from layerline.graph.io import module_identity, onnx_files
from tests.forms import as_ir

SITE = "/opt/venv/lib/python3.11/site-packages"


def model(scopes: str, trace: str) -> ir.Model:
    out = parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => (float[n] y) { y = Relu(x) }')
    node = out.graph.node[0]
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    node.metadata_props.add(key="namespace", value=": __main__.Net/relu")
    return as_ir(out)


@pytest.mark.parametrize(
    ("scopes", "path"),
    [
        ("['', 'layer1', 'layer1.0', 'relu']", "layer1.0"),
        ("['', 'blocks.3@1', 'relu']", "blocks.3"),  # the module's second call
        ("['', 'relu']", None),
        ("['_empty_nn_module_stack_from_metadata_hook', 'sym_size']", None),
    ],
)
def test_module_paths(tmp_path: Path, scopes: str, path: str | None) -> None:
    found = model(scopes, "")
    assert module_identity.owners(found)["y"] in {"relu", "sym_size"}
    module_identity.stamp(found, tmp_path)
    assert module_identity.modules(found).get("y") == path


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["{root}/task.py"], "task.py:1"),
        (["{root}/task.py", "{root}/nets/blocks.py"], "nets/blocks.py:2"),
        (["{root}/task.py", f"{SITE}/torch/nn/functional.py"], "task.py:1"),
        (["{root}/task.py", f"{SITE}/transformers/activations.py"], "transformers/activations.py:2"),
        (["/elsewhere/lib.py"], "lib.py:1"),
        (["torch/fx/passes/runtime_assert.py"], None),
        (["<string>"], None),
        ([], None),
    ],
)  # fmt: skip
def test_source_lines(tmp_path: Path, files: list[str], told: str | None) -> None:
    frames = [f'File "{f.format(root=tmp_path)}", line {i}, in forward\n    x' for i, f in enumerate(files, 1)]
    found = model("['', 'a', 'relu']", "\n  ".join(frames))
    module_identity.stamp(found, tmp_path)
    assert module_identity.sources(found).get("y") == told


def test_nothing_of_this_machine_is_saved(tmp_path: Path) -> None:
    found = model("['', 'a', 'relu']", f'File "{tmp_path}/task.py", line 3, in forward')
    found.metadata_props["pkg.torch.export.ExportedProgram.graph_signature"] = str(tmp_path)
    module_identity.stamp(found, tmp_path)
    onnx_files.save(found, tmp_path)
    assert str(tmp_path).encode() not in (tmp_path / onnx_files.FILE).read_bytes()
    saved = onnx_files.read_model(tmp_path / onnx_files.FILE)
    assert saved.graph[0].metadata_props.keys() == {MODULE, TRACED}
    assert module_identity.modules(saved) == {"y": "a"}
    # A comment moves lines, and must not change the file: the line is for reports alone.
    assert module_identity.sources(found) == {"y": "task.py:3"} and module_identity.sources(saved) == {}
