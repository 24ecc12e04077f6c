"""What has to be put straight before any rule looks at a foreign model; each change is told in a note."""

from __future__ import annotations

import onnx
import onnx.inliner

from layerline.graph import io
from layerline.pipeline.errors import StageError


def prepare(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """A copy whose operators all lie in the graph itself, with constants that are constants, and what was done.

    - The two spellings of ONNX's own domain become one.
    - Initializers that are also inputs become constants: they are the weights of old files, not inputs anyone feeds.
    - Model-local functions are inlined where the versions they ask for allow it.

    Raises:
        StageError: a sparse initializer, which neither the runtime's optimiser nor TensorRT reads.
    """
    out, notes = onnx.ModelProto(), []
    out.CopyFrom(model)
    # Before version 4 of the format every initializer had to be an input.
    out.ir_version = max(out.ir_version, 4)
    for graph in io.graphs(out):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise StageError("sparse initializers are not supported", where=name, hint="store the tensor densely")
        stored = {t.name for t in graph.initializer}
        if doubled := [i.name for i in graph.input if i.name in stored]:
            kept = [i for i in graph.input if i.name not in stored]
            del graph.input[:]
            graph.input.extend(kept)
            notes.append(f"{len(doubled)} initializers were also inputs ({doubled[0]}, …); they are constants now")
    _one_domain(out)
    if out.functions:
        out, note = _inline(out)
        notes.append(note)
    return out, notes


def _one_domain(model: onnx.ModelProto) -> None:
    nodes = [n for g in io.graphs(model) for n in g.node] + [n for f in model.functions for n in f.node]
    for item in (*nodes, *model.opset_import, *(o for f in model.functions for o in f.opset_import)):
        if item.domain == "ai.onnx":
            item.domain = ""


def _inline(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    names = ", ".join(sorted({f.name for f in model.functions}))
    try:
        inlined = onnx.inliner.inline_local_functions(model, convert_version=True)
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        return model, f"functions {names} are left as they are: onnx can't inline them ({error})"
    left = ", ".join(sorted({f.name for f in inlined.functions}))
    return inlined, f"inlined the model's functions: {names}" + (f"; left as they are: {left}" if left else "")
