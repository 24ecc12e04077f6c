"""A model whose weights lie in files of other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from layerline.graph.io import onnx_files
from layerline.pipeline.errors import StageError


def renamed(path: Path, names: Mapping[str, str]) -> bytes:
    """An ONNX file with other places for its external data; all else stays.

    Args:
        path: the file; its external data is not read.
        names: the new place for each that the file stores, both relative to its folder.

    Raises:
        StageError: not an ONNX file.
    """
    try:
        model = onnx.load_model(str(path), format="protobuf", load_external_data=False)
    except Exception as error:
        raise StageError(f"not a readable ONNX file ({error})", where=path.name) from error
    for tensor in onnx_files.tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names.get(Path(entry.value).as_posix(), entry.value)
    content: bytes = model.SerializeToString()
    return content
