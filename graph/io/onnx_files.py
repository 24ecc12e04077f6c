"""ONNX files in canonical form: the same graph gives the same bytes, whoever produced it and wherever it lies."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from layerline.backends.base import SOURCE, TRACED, Array
from layerline.backends.light import (
    LEAST_SIZES,
    WIDTHS,
    Light,
    Model,
    as_integers,
    declared_bytes,
    large,
    lazy,
    outside,
    set_place,
    split,
    travels,
)
from layerline.graph.io.ir_convert import as_ir
from layerline.graph.io.proto_queries import graphs, nodes, tensors
from layerline.pipeline.errors import StageError
from layerline.pipeline.untrusted import is_inside, is_number, printable

FILE = "model.onnx"
# Past this many bytes of tensors the weights go to a file beside the model: a message that holds them is in memory
# twice while it is written or read, and protobuf refuses those over 2 GiB.
EXTERNAL_OVER = 256 << 20
_MOST_AXES, _MOST_ELEMENTS = 64, 2**48


def load(path: Path) -> onnx.ModelProto:
    """Reads a model with its external data into one message. Raises StageError: as `read_model`."""
    return parts(path).whole()


def read_model(path: Path) -> ir.Model:
    """Reads a model with its external data; weights are read when they are first needed.

    Raises StageError: not an ONNX file, or its data file is missing; names the tensor and the location it stores.
    """
    return as_ir(parts(path))


def parts(path: Path) -> Light:
    """Reads a model's graph, and its weights when they are asked for. Raises StageError: as `read_model`."""
    light = read(path)
    external_files(light, path)
    for tensor in list(light.model.graph.initializer):
        if not uses_external_data(tensor):
            continue
        weight = _beside(tensor, path)
        if weight is not None:
            light.weights[tensor.name] = weight
            light.model.graph.initializer.remove(tensor)
    try:
        onnx.load_external_data_for_model(light.model, str(path.parent))
    except Exception as error:
        raise StageError(f"its external data can't be read ({error})", where=path.name) from error
    # What has come from beside the model is checked as what it stores itself.
    for tensor in tensors(light.model):
        _refuse_tensor(tensor, path)
    return light


def _beside(tensor: TensorProto, path: Path) -> ir.LazyTensor | None:
    """A weight in a file beside the model; None where the tensor has to stay in the graph."""
    location, offset, length = _place(tensor, path)
    if not is_inside(location, path.parent):
        raise StageError(f"tensor {tensor.name!r} stores its data at {location!r}, a link out of the model's folder",
                         where=path.name, hint="put the file itself there: runtimes follow no such link")  # fmt: skip
    size = declared_bytes(tensor)
    if not travels(tensor.data_type, size):
        return None
    if length not in (size, None):
        what = f"tensor {tensor.name!r} takes {size} bytes by its type and shape, and has {length}"
        raise StageError(what, where=path.name)
    dtype = ir.DataType(tensor.data_type).numpy()
    return lazy(tensor, partial(_from_file, path.parent / location, offset, dtype, math.prod(tensor.dims)))


def _place(tensor: TensorProto, path: Path) -> tuple[str, int, int | None]:
    """File, offset and length, where one is given, of a tensor outside of a model that was read from `path`."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset = entries.get("offset", "0")
    length = entries.get("length")
    if not (is_number(offset) and (length is None or is_number(length))):
        place = f"{printable(offset, 40)!r}, {printable(length or 'no', 40)!r} bytes"
        raise StageError(f"tensor {tensor.name!r} lies at {place}, which are no numbers", where=path.name)
    location = entries.get("location", "")
    return location, int(offset), None if length is None else int(length)


def read(path: Path) -> Light:
    """Reads what a file says itself: tensors that lie outside of it stay in the graph, with their place.

    Weights that lie inside of it are copied out of the message, which is let go.

    Raises StageError: not an ONNX file, or a tensor in it that can't be one.
    """
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except OSError as error:
        raise StageError(f"cannot read: {error.strerror}", where=path.name) from error
    except Exception as error:
        raise StageError(f"not a readable ONNX file ({error})", where=path.name) from error
    if not model.HasField("graph"):
        raise StageError("not a readable ONNX file (it holds no graph)", where=path.name)
    # Such a name would fail in whatever place touches it first.
    text = _undecoded(model)
    if text is not None:
        raise StageError(f"not a readable ONNX file (a name or text in it is not UTF-8: {text!r:.80})", where=path.name)
    for tensor in tensors(model):
        _refuse_tensor(tensor, path)
    for name, count in Counter(tensor.name for tensor in model.graph.initializer).items():
        if count > 1:
            what = f"it stores {count} tensors of the name {name!r}"
            raise StageError(what, where=path.name, hint="give each tensor a name of its own")
    _store_constants(model.graph)
    light = split(model)
    # A lazy tensor holds the message, and a message with its weights is as large as the file.
    for name, weight in light.weights.items():
        light.weights[name] = ir.Tensor(weight.numpy(), weight.dtype, name=name)
    return light


def _undecoded(message: Any) -> bytes | None:
    """The first text of a message that is not UTF-8: protobuf gives such a one as bytes."""
    pending = [message]
    while pending:
        item = pending.pop()
        if isinstance(item, TensorProto):  # its numbers would be copied
            texts = [item.name, item.doc_string, *(t for e in item.external_data for t in (e.key, e.value))]
        else:
            texts = []
            for field, value in item.ListFields():
                if field.type == field.TYPE_STRING:
                    texts += [value] if isinstance(value, str | bytes) else list(value)
                elif field.message_type is not None:
                    pending += [value] if hasattr(value, "ListFields") else list(value)
        for text in texts:
            if isinstance(text, bytes):
                return text
    return None


def _store_constants(graph: onnx.GraphProto) -> None:
    """Makes large Constant nodes of the main graph stored tensors of the same name, in place: only those lie beside the
    graph, which must stay small enough for a message."""
    outputs = {output.name for output in graph.output}
    remaining: list[onnx.NodeProto] = []
    for node in graph.node:
        stored = [a.t for a in node.attribute if a.name == "value" and a.HasField("t")]
        sizes = [max(tensor.ByteSize(), declared_bytes(tensor)) for tensor in stored]
        if node.op_type != "Constant" or node.output[0] in outputs or max(sizes, default=0) <= LEAST_SIZES:
            remaining.append(node)
            continue
        graph.initializer.append(stored[0])
        graph.initializer[-1].name = node.output[0]
    if len(remaining) < len(graph.node):
        del graph.node[:]
        graph.node.extend(remaining)


def _refuse_tensor(tensor: TensorProto, path: Path) -> None:
    """Refuses what no runtime takes for a tensor, before anything of its size is made."""
    what = ""
    if tensor.HasField("segment"):
        what = "is a segment of a tensor, which no runtime reads"
    elif tensor.data_type == TensorProto.UNDEFINED:
        what = "has no element type"
    elif tensor.data_type not in TensorProto.DataType.values():
        what = f"is of element type {tensor.data_type}, which ONNX has not"
    elif len(tensor.dims) > _MOST_AXES:
        what = f"has {len(tensor.dims)} axes; {_MOST_AXES} is the most"
    elif any(d < 0 for d in tensor.dims):
        what = f"has a size of {min(tensor.dims)}"
    elif math.prod(tensor.dims) > _MOST_ELEMENTS:
        what = f"has {' x '.join(map(str, tensor.dims))} elements, more than fit into any memory"
    else:
        what = _misfit(tensor)
    if what:
        raise StageError(f"tensor {tensor.name!r} {what}", where=path.name)


def _misfit(tensor: TensorProto) -> str:
    """What is wrong between the numbers that a tensor stores in the file and its sizes; empty where they fit."""
    if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type not in WIDTHS:
        return ""  # the length of external data is checked where it is read; other types share bytes
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        expected = count * WIDTHS[tensor.data_type]
        if len(tensor.raw_data) != expected:
            return f"stores {len(tensor.raw_data)} bytes, and its type and sizes take {expected}"
        return ""
    stored = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
    return f"stores {stored} numbers, and its sizes take {count}" if stored != count else ""


def _from_file(path: Path, offset: int, dtype: np.dtype[Any], count: int) -> Array:
    """Numbers as they lie in a file from a place on."""
    size = dtype.itemsize * count
    try:
        if path.stat().st_size < offset + size:
            raise StageError(f"the file ends within {size} bytes from byte {offset} on", where=path.name)
        return np.fromfile(path, dtype, count, offset=offset)
    except OSError as error:
        raise StageError(f"can't be read: {error}", where=path.name) from error


def external_files(light: Light, path: Path) -> tuple[str, ...]:
    """Files that hold the external data of what `read` gave for `path`, relative to its folder, each once.

    Raises StageError, which names the tensor: a place outside of that folder, or nothing there.
    """
    files: dict[str, None] = {}
    for tensor in filter(uses_external_data, tensors(light.model)):
        location = _place(tensor, path)[0]
        if not is_inside(location):
            what = f"tensor {tensor.name!r} stores its data at {location!r}, outside the model's folder"
            raise StageError(what, where=path.name)
        if not (path.parent / location).is_file():
            what = f"tensor {tensor.name!r} stores its data in {location!r}, which is not beside the model"
            raise StageError(what, where=path.name, hint=f"copy {location} into the same folder")
        files[Path(location).as_posix()] = None
    return tuple(files)


def save(model: Model | Light, folder: Path, *, external_over: int = EXTERNAL_OVER) -> Path:
    """Writes `model.onnx` in canonical form into `folder`; weights of large models go to `model.onnx.data` beside it.

    Canonical: producer, version stamps, doc strings, source lines and torch's own notes are cleared, graphs have fixed
    names, opset imports that nothing reads go, those that stay and metadata are sorted, tensors are stored as raw
    bytes, by name, weights last. Node order and names stay: they are the identity everything is joined on. `model`
    itself is left as it was.
    """
    light = canonical(model)
    path = folder / FILE
    # The graph counts as well: Constants that had to stay in it may be large.
    if light.model.ByteSize() + sum(weight.nbytes for weight in light.weights.values()) > external_over:
        _move_out(light, folder / f"{FILE}.data")
    path.write_bytes(light.whole().SerializeToString())
    return path


def _move_out(light: Light, path: Path) -> None:
    """Writes the weights and what else is large to a file, if there is any; the model says where each lies then."""
    # Of bodies, of types that share a byte, and what Constant nodes hold.
    others = [tensor for tensor in tensors(light.model) if large(tensor.data_type, len(tensor.raw_data))]
    if not (others or light.weights):
        return
    with path.open("wb") as file:
        for tensor in others:
            raw = tensor.raw_data
            tensor.ClearField("raw_data")
            set_place(tensor, path.name, file.tell(), len(raw))
            file.write(raw)
        for name, weight in light.weights.items():
            light.model.graph.initializer.append(outside(weight, name, path.name, file.tell()))
            file.write(as_integers(weight).data)
    light.weights.clear()


def canonical(model: Model | Light) -> Light:
    """A copy without what does not change the result."""
    light = split(model).copy()
    out = light.model
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        out.ClearField(name)
    # The name means nothing, and exporters write their own into it.
    out.graph.name = "main"
    opsets = sorted(_read_opsets(out), key=lambda o: o.domain)
    del out.opset_import[:]
    out.opset_import.extend(opsets)
    for node in nodes(out):
        # The default may be written out or left out, as that of tensors below.
        if not node.domain:
            node.ClearField("domain")
        for attribute in node.attribute:
            if attribute.HasField("g"):
                attribute.g.name = attribute.name
    parts: list[Any] = [out, *out.functions, *nodes(out), *tensors(out)]
    for graph in graphs(out):
        # A tensor has its type and shape with it.
        stored = {tensor.name for tensor in graph.initializer}
        if graph is out.graph:
            stored |= light.weights.keys()
        values = [value for value in graph.value_info if value.name not in stored]
        del graph.value_info[:]
        graph.value_info.extend(values)
        parts += [graph, *graph.input, *graph.output, *graph.value_info]
    for part in parts:
        part.ClearField("doc_string")
        _clean_metadata(part)
    for tensor in tensors(out):
        # The default may be written out or left out, which makes other bytes.
        if tensor.data_location == TensorProto.DEFAULT:
            tensor.ClearField("data_location")
        if not tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), name))
    # The order in which tensors are stored means nothing, and differs from exporter to exporter.
    out.graph.initializer.sort(key=lambda t: t.name)
    # Tensors that have become raw bytes just now are weights like the others.
    late = split(out)
    return Light(late.model, dict(sorted((light.weights | late.weights).items())))


def _read_opsets(model: onnx.ModelProto) -> list[onnx.OperatorSetIdProto]:
    """Opset imports of the domains that a node belongs to, each once; ONNX's own stays in any case."""
    domains = {node.domain for node in nodes(model)} | {"", "ai.onnx"}
    by_domain: dict[str, onnx.OperatorSetIdProto] = {}
    # Of two imports of one domain the first counts.
    for item in reversed(model.opset_import):
        if item.domain in domains:
            by_domain[item.domain] = item
    return list(by_domain.values())


def _clean_metadata(item: Any) -> None:
    entries: list[onnx.StringStringEntryProto] = []
    for entry in item.metadata_props:
        # What torch's exporter notes down holds paths of the machine it ran on.
        if entry.key.startswith("pkg.torch.") or entry.key == "namespace":
            continue
        if entry.key == SOURCE:
            # A comment moves lines, and must not change the file.
            entry.key = TRACED
            entry.value = "torch"
        entries.append(entry)
    entries.sort(key=lambda entry: entry.key)
    del item.metadata_props[:]
    item.metadata_props.extend(entries)
