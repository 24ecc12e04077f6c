"""What the safetensors library refuses is refused, with its reason; what is loaded owns its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerline.pipeline.errors import StageError
from layerline.training.state import safetensors_io

_SOUND = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _file(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ({"a": _SOUND, "b": _SOUND}, 8, "invalid offset for tensor"),
        ({"a": _SOUND, "b": {**_SOUND, "data_offsets": [16, 24]}}, 24, "invalid offset for tensor"),
        ({"a": {**_SOUND, "data_offsets": [-8, 0]}}, 8, "integer `-8`, expected usize"),
        ({"a": {**_SOUND, "shape": [-1]}}, 8, "integer `-1`, expected usize"),
        ({"a": {**_SOUND, "shape": [64, 64], "data_offsets": [0, 0]}}, 0, "invalid shape, data type, or offset"),
        ({"a": {**_SOUND, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, 0, "overflow"),
        ({"a": {**_SOUND, "shape": [2**70]}}, 8, "expected usize"),
        ({"a": {**_SOUND, "shape": "2"}}, 8, "expected a sequence"),
        ({"a": {**_SOUND, "dtype": ["F32"]}}, 8, "expected string or map"),
        ({"a": {**_SOUND, "dtype": "F31"}}, 8, "unknown variant `F31`"),
        ({"a": _SOUND}, 7, "file not fully covered"),
        ({"a": _SOUND}, 9, "file not fully covered"),
        (b'{"a":' * 100_000 + b"}" * 100_000, 0, "recursion limit"),
        (b"[" * 100_000 + b"]" * 100_000, 0, "invalid type: sequence"),
        (b"no json", 0, "invalid JSON in header"),
        ({"__metadata__": {"x": 5}, "a": _SOUND}, 8, "integer `5`, expected a string"),
        ({"__metadata__": {"layerline": "[" * 100_000}, "a": _SOUND}, 8, "does not match its checksum"),
        ({"__metadata__": {"layerline": "[1]"}, "a": _SOUND}, 8, "does not match its checksum"),
    ],
)
def test_what_the_library_refuses_is_refused(tmp_path: Path, header: Any, size: int, reason: str) -> None:
    path = _file(tmp_path / "w.safetensors", header, bytes(size))
    with pytest.raises(StageError) as caught:
        safetensors_io.load(path)
    assert reason in str(caught.value) and str(caught.value).startswith("w.safetensors: ")


@pytest.mark.parametrize("content", [b"", b"\xff" * 400])
def test_files_that_are_nothing_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(StageError, match=r"w\.safetensors: not a readable safetensors file"):
        safetensors_io.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StageError, match="cannot read: a folder"):
        safetensors_io.load(path)


def test_a_loaded_tensor_holds_its_own_bytes_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors_io.save(
        path, {"large": torch.randn(1000, 100), "odd": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5)}
    )
    tensors, _ = safetensors_io.load(path)
    for tensor in tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % tensor.element_size() == 0
    assert torch.equal(tensors["b"], torch.ones(5))


def test_tensors_that_share_memory_are_each_written(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    safetensors_io.save(
        tmp_path / "a.safetensors", {"whole": whole, "part": whole[2:4], "turned": whole.view(2, 3).t()}
    )
    back, _ = safetensors_io.load(tmp_path / "a.safetensors")
    assert back["part"].tolist() == [2, 3] and back["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128 cannot be stored"),
    ],
)
def test_what_the_format_has_not_is_named(tmp_path: Path, tensor: Tensor, reason: str) -> None:
    with pytest.raises(StageError, match=reason) as caught:
        safetensors_io.save(tmp_path / "a.safetensors", {"layer.weight": tensor})
    assert caught.value.where == "layer.weight" and not list(tmp_path.iterdir())
