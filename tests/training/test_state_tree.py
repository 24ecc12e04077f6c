"""Any state as JSON and tensors, and back: types, orders of memory, classes; nothing runs that a file names."""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import StageError
from layerline.training.model import tensor_forms
from layerline.training.model.state_tree import Tensors, pack, unpack
from layerline.training.state import checkpoint, safetensors_io


class Kind(IntEnum):
    ONE = 1


Pair = namedtuple("Pair", "a b")


def _through(tree: Any, path: Path) -> Any:
    """Written to a file and read back."""
    tensors: Tensors = {}
    packed = pack(tree, "t", tensors)
    stored, notes = tensor_forms.to_file(tensors)
    safetensors_io.save(path, stored, {"tree": packed, tensor_forms.ENTRY: notes})
    read, meta = safetensors_io.load(path)
    return unpack(meta["tree"], "t", tensor_forms.from_file(read, meta))


@pytest.mark.parametrize(
    "value",
    [
        {0.9: 1, 0.99: 2}, {(0, 1): "x", (2,): "y"}, {True: 1, 2: 2, "2": 3, None: 4}, {"$": 1}, {b"k": b"\x00\xff"},
        {1, 2}, frozenset({"a"}), deque([1, (2.5,)], maxlen=3), OrderedDict(b=1, a=2), defaultdict(list, a=[1]),
        Counter({"b": 2, 5: 0}),
        torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), 1 + 2j, complex("nan+infj"), -0.0, 2**80,
        np.float64(0.1), np.int64(3), np.bool_(True), np.float32(1e-45), Kind.ONE, Pair(1, [2]), None, True,
    ],
    ids=repr,
)  # fmt: skip
def test_values_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    back = _through(value, tmp_path / "a")
    assert type(back) is type(value) and repr(back) == repr(value)
    if isinstance(value, dict):
        assert [type(k) for k in back] == [type(k) for k in value] and list(back) == list(value)


@pytest.mark.parametrize(
    "dtype",
    [torch.complex128, torch.complex64, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.uint16, torch.uint64,
     torch.bool, torch.bfloat16],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    value = torch.rand(shape).mul(9).to(dtype)
    back = _through([value], tmp_path / "a")[0]
    assert back.dtype is dtype and back.shape == value.shape
    assert safetensors_io.raw_bytes(back) == safetensors_io.raw_bytes(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4).t(), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2),
        torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last), torch.randn(2, 1, 3).transpose(0, 1),
        torch.randn(4, 6, dtype=torch.complex128).t(), torch.empty(0, 3, 2).permute(2, 1, 0),
    ],
    ids=lambda t: str(tuple(t.stride())),
)  # fmt: skip
def test_strides_come_back(value: Tensor, tmp_path: Path) -> None:
    back = _through(value, tmp_path / "a")
    assert back.stride() == value.stride() and torch.equal(back, value)


def test_what_has_gaps_or_shares_memory_comes_back_in_its_own_memory(tmp_path: Path) -> None:
    base = torch.randn(4, 10)
    for value in (
        base[:, ::2],
        base.t()[1:3],
        torch.ones(3, 1).expand(3, 5),
        torch.randn(2, 2, dtype=torch.cfloat).conj(),
    ):
        back = _through(value, tmp_path / "a")
        assert torch.equal(back, value) and back.untyped_storage().nbytes() <= base.nbytes


def test_a_tensor_that_is_held_twice_is_one_tensor(tmp_path: Path) -> None:
    one = torch.ones(3)
    back = _through({"a": one, "b": [one.detach()], "c": one.clone()}, tmp_path / "a")
    back["a"] += 1
    assert back["b"][0] is back["a"] and back["c"].tolist() == [1, 1, 1]


def test_views_of_one_buffer_stay_views_of_one_buffer(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tree = {"rows": flat[2:8].view(2, 3).t(), "flat": flat, "apart": [flat.clone()[:3]], "again": flat[2:8]}
    back = _through(tree, tmp_path / "a")
    assert all(torch.equal(back[n], tree[n]) for n in ("rows", "flat", "again")) and back["apart"][0].tolist() == [
        0,
        1,
        2,
    ]
    back["flat"].zero_()
    assert not back["rows"].any() and not back["again"].any() and back["apart"][0].any()
    halves = _through({"a": flat[:6], "b": flat[6:]}, tmp_path / "a")
    assert halves["a"].untyped_storage().nbytes() == halves["b"].untyped_storage().nbytes() == 24


def test_keys_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    tree = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, 1: torch.full((2,), 2.0), "i1": torch.full((2,), 3.0)}
    back = _through(tree, tmp_path / "a")
    assert [back["a/b"][0], back["a"]["b"][0], back[1][0], back["i1"][0]] == [0, 1, 2, 3]


class Holds:
    """With something that is done at its end."""

    def __del__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("value", "said"),
    [(object(), "a object cannot"), (Holds(), "a Holds cannot"), (lambda: 1, "a function cannot"),
     ({torch.ones(1): 1}, "a key of type Tensor"), (defaultdict(lambda: 1), "a defaultdict of"),
     (np.array(["a"]), "an array of <U1"), (np.array([None]), "an array of object")],
    ids=["object", "end", "function", "key", "factory", "text", "objects"],
)  # fmt: skip
def test_what_is_no_data_is_refused_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(StageError, match=f"t/x.*: {said}"):
        pack({"x": value}, "t", {})


def test_what_holds_itself_or_has_no_numbers_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["x"] = loop
    with pytest.raises(StageError, match="t: it is nested too deeply, or holds itself"):
        pack(loop, "t", {})
    for value, said in ((torch.ones(2).to_sparse(), "sparse"), (torch.ones(2, device="meta"), "on the meta device")):
        with pytest.raises(StageError, match=f"x: it is .*{said}"):
            tensor_forms.to_file({"x": value})


@pytest.mark.parametrize(
    "node",
    [
        {"$": "object", "class": "subprocess:Popen", "attributes": {}},
        {"$": "object", "class": "layerline.training.loop.ema:Ema", "attributes": {}},
        {"$": "enum", "class": "os:system", "name": "x"}, {"$": "named", "class": "subprocess:Popen", "items": []},
        {"$": "subclass", "class": "antigravity:Tensor", "parts": {}, "context": None, "size": [], "strides": []},
        {"$": "subclass", "class": "torch:Tensor", "parts": {}, "context": None, "size": [], "strides": []},
        {"$": "dtype", "value": "load"}, {"$": "unknown"}, {"$": "set", "items": [{}]}, {"$": "bytes", "value": "zz"},
        {"$": "device", "value": "nowhere"}, {"$": "dict", "items": [3]},
    ],
    ids=lambda n: str(n.get("class", n["$"])),
)  # fmt: skip
def test_a_file_cannot_have_anything_made(node: Any) -> None:
    with pytest.raises(StageError):
        unpack({"x": node}, "t", {})
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "form", [{"strides": [0, 1]}, {"strides": [2**60, 1]}, {"strides": [1]}, {"strides": [-1, 1]}, {"strides": "x"},
             {"dtype": "load"}, {"dtype": "float64", "shape": [2**40]}, 3],
    ids=str,
)  # fmt: skip
def test_notes_that_do_not_fit_are_refused(form: Any) -> None:
    with pytest.raises(StageError, match="x: damaged"):
        tensor_forms.from_file({"x": torch.ones(3, 2)}, {"forms": {"x": form}})


def test_loaded_state_keeps_nothing_but_itself(tmp_path: Path) -> None:
    """50,000 numbers of a weight do not stay in memory for the eight of a bias."""
    model = nn.Linear(6250, 8)
    mo = ModelOptimizer(model, {}, optimizer=torch.optim.NAdam(model.parameters()))
    mo.step(model(torch.ones(1, 6250)).sum())
    mo.load_ckpt(mo.save_ckpt(tmp_path / "a.safetensors"))
    for param in model.parameters():
        for value in mo.lanes[""].optimizer.state[param].values():
            assert value.untyped_storage().nbytes() == value.nbytes and value.data_ptr() % value.element_size() == 0


def test_an_object_of_the_optimizers_own_package_is_taken_apart(tmp_path: Path) -> None:
    module = ModuleType("someones_rules")
    source = """
import torch
class Projector:
    def __init__(self): self.count, self.basis = 0, torch.eye(2).t()
class Rule(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].setdefault("projector", Projector())
                held.count += 1
                held.basis.mul_(1.5)
                p.data -= 0.01 * held.count * held.basis.sum() * p.grad
"""
    sys.modules["someones_rules"] = module
    try:
        exec(source, vars(module))

        def make() -> ModelOptimizer:
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
            return ModelOptimizer(model, {}, optimizer=module.Rule(model.parameters(), lr=1.0))

        def run(mo: ModelOptimizer) -> None:
            for _ in range(3):
                mo.step(mo.model(torch.ones(1, 2)).square().sum())

        mo, again = make(), make()
        run(mo)
        path = mo.save_ckpt(tmp_path / "a.safetensors")
        again.load_ckpt(path)
        run(mo)
        run(again)
        assert torch.equal(mo.model.weight, again.model.weight)
        assert json.dumps(safetensors_io.load(path)[1]).count('"someones_rules:Projector"') == 2
        assert torch.equal(checkpoint.weights(path)[0]["weight"], checkpoint.weights(path)[1]["weight"])
    finally:
        del sys.modules["someones_rules"]


def test_a_slice_with_gaps_keeps_its_strides_and_owns_its_memory() -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors: dict[str, Tensor] = {}
    node = pack({"columns": whole[1:, ::2].clone()[:, ::2], "row": whole[:, 1].expand(2, 4)}, "s", tensors)
    again = unpack(node, "s", {n: t.clone() for n, t in tensors.items()})
    assert again["columns"].tolist() == [[6.0, 10.0], [12.0, 16.0], [18.0, 22.0]]
    assert again["columns"].stride() == (3, 2) and again["row"].stride() == (0, 6)
    assert again["columns"].untyped_storage().nbytes() == 9 * 4
