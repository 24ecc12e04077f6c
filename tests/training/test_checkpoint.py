"""One file with everything, no pickle; atomic, rotating, and a damaged one is skipped with a warning."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.pipeline.errors import ConfigError, StageError, Unavailable
from layerline.training.model.state_tree import Tensors, pack, unpack
from layerline.training.randomness import rng_state
from layerline.training.state import checkpoint, safetensors_io

CONFIG: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 0.01},
    "scheduler": {"name": "cosine", "total_steps": 40, "warmup_steps": 3},
    "training": {"ema_decay": 0.9, "ema_warmup": True, "accumulate_steps": 3, "grad_clip_norm": 0.5, "log_interval": 2},
}


def _make(amp: str = "fp32") -> tuple[nn.Module, ModelOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4, 1))
    return model, ModelOptimizer(model, {**CONFIG, "precision": {"amp": amp, "dynamic_loss_scale_window": 4}})


def _run(model: nn.Module, mo: ModelOptimizer, micro: int) -> None:
    for _ in range(micro):
        # python, numpy and torch draws, as augmentation makes them
        x = torch.randn(4, 1, 4) + random.random() + np.random.rand()
        with mo.autocast():
            loss = model(x).float().square().sum()
        mo.step(loss, weight=4)


@pytest.mark.parametrize("amp", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro", [6, 7, 8])
def test_resumed_at_any_micro_batch_it_goes_on_bit_for_bit(amp: str, micro: int, tmp_path: Path) -> None:
    model, mo = _make(amp)
    _run(model, mo, micro)
    middle = mo.save_ckpt(tmp_path / "middle.safetensors")
    _run(model, mo, 11)
    straight = checkpoint.save(mo, tmp_path / "straight.safetensors", timings=False)
    random.seed(99), np.random.seed(99)
    _, again = _make(amp)
    again.load_ckpt(middle)
    _run(again.lanes[""].model, again, 11)
    resumed = checkpoint.save(again, tmp_path / "resumed.safetensors", timings=False)
    assert straight.read_bytes() == resumed.read_bytes()


def test_saving_while_switched_saves_the_same(tmp_path: Path) -> None:
    model, mo = _make()
    _run(model, mo, 5)
    plain = mo.save_ckpt(tmp_path / "a.safetensors").read_bytes()
    with mo.ema():
        assert mo.save_ckpt(tmp_path / "b.safetensors").read_bytes() == plain
        held = model[0].weight.clone()
    assert not torch.equal(held, model[0].weight)


def test_any_reader_of_safetensors_reads_it(tmp_path: Path) -> None:
    model, mo = _make()
    _run(model, mo, 4)
    path = mo.save_ckpt(tmp_path / "a.safetensors")
    tensors = load_file(path)
    assert torch.equal(tensors["online/4.weight"], model[4].weight)
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["layerline"]
        json.loads(file.metadata()["layerline"])
    assert b"pickle" not in path.read_bytes()


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    model, mo = _make()
    for _ in range(5):
        _run(model, mo, 3)
        mo.save_ckpt(tmp_path)
    assert [p.name for p in checkpoint.rotation(tmp_path)] == [f"step-{n:08d}.safetensors" for n in (5, 4, 3)]


def test_save_interval_saves_by_itself(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    mo = ModelOptimizer(
        model, {"training": {"save_interval": 2, "save_dir": str(tmp_path / "c"), "accumulate_steps": 2}}
    )
    for _ in range(9):
        mo.step(model(torch.ones(1, 1)).sum())
    assert [p.name for p in checkpoint.rotation(tmp_path / "c")] == [
        "step-00000004.safetensors",
        "step-00000002.safetensors",
    ]


def _damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "cut":
        raw = raw[: len(raw) // 2]
    elif how == "empty":
        raw = bytearray()
    elif how == "data":
        raw[-5] ^= 1
    elif how == "header":
        raw[20] ^= 0xFF
    elif how == "length":
        raw[6] = 0xFF
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("how", ["cut", "empty", "data", "header", "length"])
def test_the_newest_damaged_one_is_skipped_with_a_warning(how: str, tmp_path: Path) -> None:
    model, mo = _make()
    for _ in range(2):
        _run(model, mo, 3)
        newest = mo.save_ckpt(tmp_path)
    _damage(newest, how)
    with pytest.raises(StageError):
        safetensors_io.load(newest)
    _, again = _make()
    with pytest.warns(UserWarning, match="step-00000002"):
        assert again.load_ckpt(tmp_path).name == "step-00000001.safetensors"
    assert again.global_step == 1


def test_a_folder_without_a_sound_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no sound checkpoint"):
        _make()[1].load_ckpt(tmp_path)
    with pytest.raises(StageError, match="cannot read"):
        _make()[1].load_ckpt(tmp_path / "none.safetensors")


def test_a_failed_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    safetensors_io.save(path, {"x": torch.ones(2)})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Unavailable, match="No space left"):
        safetensors_io.save(path, {"x": torch.zeros(2)})
    assert torch.equal(safetensors_io.load(path)[0]["x"], torch.ones(2)) and [p.name for p in tmp_path.iterdir()] == [
        path.name
    ]


def test_another_configuration_is_told(tmp_path: Path) -> None:
    path = _make()[1].save_ckpt(tmp_path / "a.safetensors")
    precision = {"dynamic_loss_scale_window": 4}
    other = ModelOptimizer(_make()[0], {**CONFIG, "precision": precision, "optimizer": {"name": "adamw", "lr": 0.02}})
    with pytest.warns(UserWarning, match=r"optimizer\.lr was 0\.01, is 0\.02"):
        other.load_ckpt(path)


def test_another_model_is_refused_with_all_names(tmp_path: Path) -> None:
    path = _make()[1].save_ckpt(tmp_path / "a.safetensors")
    other = ModelOptimizer(nn.Sequential(nn.Linear(2, 2)), _make()[1].config)
    with pytest.raises(
        StageError, match=r"missing 0\.bias|0\.weight is \(2, 1, 3\).*unknown 1\.weight|unknown 4\.weight"
    ):
        other.load_ckpt(path)


def test_registered_things_are_saved(tmp_path: Path) -> None:
    class Position:
        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    (_, one), (_, two) = _make(), _make()
    a, b = Position(), Position()
    one.register("data", a)
    two.register("data", b)
    a.at = 7
    two.load_ckpt(one.save_ckpt(tmp_path / "a.safetensors"))
    assert b.at == 7


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(TREES)
def test_state_survives_as_it_was(tree: Any) -> None:
    tensors: Tensors = {}
    packed = json.loads(json.dumps(pack(tree, "t", tensors)))
    assert repr(unpack(packed, "t", tensors)) == repr(tree)


def test_tensors_and_arrays_in_a_tree() -> None:
    tensors: Tensors = {}
    tree = {"a": torch.arange(3), 5: [np.array([1.5, math.nan]), (torch.tensor(2.0),)]}
    back = unpack(json.loads(json.dumps(pack(tree, "t", tensors))), "t", tensors)
    assert torch.equal(back["a"], tree["a"]) and isinstance(back[5][0], np.ndarray) and back[5][1][0] == 2.0
    with pytest.raises(StageError, match="t/x: a object cannot be saved"):
        pack({"x": object()}, "t", {})


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_files_hold_every_type_and_shape(tmp_path_factory: Any, specs: list[tuple[torch.dtype, list[int]]]) -> None:
    path = tmp_path_factory.mktemp("t") / "a.safetensors"
    tensors = {f"x{i}": (torch.rand(shape) * 100).to(dtype) for i, (dtype, shape) in enumerate(specs)}
    safetensors_io.save(path, tensors, {"k": 1})
    back, meta = safetensors_io.load(path)
    assert meta == {"k": 1} and back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert safetensors_io.raw_bytes(back[name]) == safetensors_io.raw_bytes(tensor)
    theirs = load_file(path)
    assert theirs.keys() == tensors.keys()


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Every bit of the header, and some of the content."""
    path = tmp_path / "a.safetensors"
    safetensors_io.save(path, {"a": torch.randn(1500), "b": torch.arange(5)}, {"lr": 0.001, "step": 12345})
    sound = path.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    for at in (*range(header), *range(header, len(sound), 997), len(sound) - 1):
        for bit in range(8):
            raw = bytearray(sound)
            raw[at] ^= 1 << bit
            path.write_bytes(raw)
            with pytest.raises(StageError):
                safetensors_io.load(path)


def test_loaded_tensors_are_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors_io.save(path, {"a": torch.ones(3)})
    before = path.read_bytes()
    tensors, _ = safetensors_io.load(path)
    path.unlink()
    tensors["a"] += 1
    safetensors_io.save(path, {"a": torch.ones(3)})
    assert path.read_bytes() == before and torch.equal(tensors["a"], torch.full((3,), 2.0))


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, dtype=torch.uint8), "a": torch.randn(2, 2), "c": torch.randn(4).half()}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    back, meta = safetensors_io.load(tmp_path / "a.safetensors")
    assert meta == {} and all(torch.equal(back[n], t) for n, t in tensors.items())


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"b": torch.ones(3, 2).t(), "a": torch.zeros(2)}
    safetensors_io.save(tmp_path / "a", tensors, {"x": 1, "y": [2]})
    safetensors_io.save(tmp_path / "b", dict(reversed(tensors.items())), {"x": 1, "y": [2]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_random_states_of_all_three_come_back() -> None:
    def draws() -> tuple[float, float, float, float]:
        return random.random(), np.random.rand(), float(np.random.randn()), torch.rand(()).item()

    random.gauss(0, 1), np.random.randn()  # leaves a cached second normal behind
    state = rng_state.draws()
    first = draws()
    draws()
    tensors: Tensors = {}
    rng_state.redraw(rng_state.Draws(*unpack(json.loads(json.dumps(pack(tuple(state), "r", tensors))), "r", tensors)))
    assert draws() == first
    with rng_state.seeded(3):
        inside = draws()
    after = draws()
    rng_state.redraw(state)
    draws()
    assert draws() == after
    with rng_state.seeded(3):
        assert draws() == inside


def test_the_weights_of_one_of_several_models(tmp_path: Path) -> None:
    models = {n: nn.Linear(2, 1) for n in ("g", "d")}
    mo = ModelOptimizer(models, {"optimizer": {"lr": 1e-3}, "training": {"ema_decay": 0.5}})
    mo.step(models["g"].weight.sum(), only="g")
    path = mo.save_ckpt(tmp_path / "gan.safetensors")
    fresh = nn.Linear(2, 1)
    checkpoint.load_weights(fresh, path, ema=False, only="g")
    assert torch.equal(fresh.weight, models["g"].weight)
    checkpoint.load_weights(fresh, path, only="g")
    assert torch.equal(fresh.weight, mo.export()["g.weight"])
    with pytest.raises(StageError, match=r"holds several models; there are \['g', 'd'\]"):
        checkpoint.load_weights(fresh, path)
    with pytest.raises(StageError, match="holds no model 'x'"):
        checkpoint.load_weights(fresh, path, only="x")
    with pytest.raises(StageError, match="holds the models d, g; here: one model without a name"):
        ModelOptimizer(fresh, {}).load_ckpt(path)


@pytest.mark.parametrize(
    ("before", "now", "scale"),
    [
        ({"amp": "fp32"}, {"amp": "fp16"}, 65536.0),
        ({"amp": "bf16"}, {"amp": "fp16", "loss_scale": 256, "dynamic_loss_scale_window": 10}, 256.0),
        ({"amp": "fp16"}, {"amp": "fp16", "loss_scale": 128}, 128.0),
        ({"amp": "fp16", "loss_scale": 64}, {"amp": "fp16"}, 64.0),
    ],
)
@pytest.mark.filterwarnings("ignore:resuming with another configuration")
def test_the_loss_scale_after_a_run_in_another_number_format(
    before: dict[str, Any], now: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    ModelOptimizer(nn.Linear(1, 1), {"precision": before}).save_ckpt(tmp_path / "a.safetensors")
    mo = ModelOptimizer(nn.Linear(1, 1), {"precision": now})
    mo.load_ckpt(tmp_path / "a.safetensors")
    assert mo.loss_scale == scale


def test_a_copy_goes_on_after_a_layer_was_frozen_and_is_refused_where_memory_is_shared() -> None:
    def loss(mo: ModelOptimizer) -> Tensor:
        out: Tensor = mo.model(torch.ones(2, 3)).square().mean()
        return out

    mo = ModelOptimizer(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), {"optimizer": {"name": "adam"}})
    mo.step(loss(mo))
    mo.model[0].requires_grad_(False)
    twin = copy.deepcopy(mo)
    for each in (mo, twin):
        each.step(loss(each))
        each.model[0].requires_grad_(True)
        each.step(loss(each))
    assert all(torch.equal(a, b) for a, b in zip(mo.model.parameters(), twin.model.parameters(), strict=True))
    mo.model[1].weight.data = mo.model[0].weight.data[:1]
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight share memory"):
        copy.deepcopy(mo)


def test_a_copy_of_parameters_in_one_buffer_goes_on_and_of_one_with_gaps_is_refused() -> None:
    mo = ModelOptimizer(model := nn.Linear(4, 3), {})
    buffer = torch.cat([p.detach().flatten() for p in model.parameters()])
    model.weight.data, model.bias.data = buffer[:12].view(3, 4), buffer[12:]
    twin = copy.deepcopy(mo)
    for each in (mo, twin):
        each.step(each.model(torch.ones(2, 4)).square().mean())
    assert torch.equal(model.weight, twin.model.weight)
    sliced = nn.Linear(4, 3)
    sliced.weight = nn.Parameter(torch.randn(3, 8)[:, ::2])
    with pytest.raises(ConfigError, match="weight is a slice with gaps in its memory"):
        copy.deepcopy(ModelOptimizer(sliced, {}))


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_parameter_that_was_never_stepped_may_be_frozen_later(tmp_path, name) -> None:
    models = []
    for freezes in (False, True):
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        model[1].requires_grad_(not freezes)
        models.append((model, ModelOptimizer(model, {"optimizer": {"name": name, "lr": 0.1}})))
    for _ in range(3):
        models[0][1].step(models[0][0][0](torch.ones(3, 2)).mean())
    models[0][1].save_ckpt(tmp_path / "c.safetensors")
    models[1][1].load_ckpt(tmp_path / "c.safetensors")
    for model, mo in models:
        mo.step(model[0](torch.ones(3, 2)).mean())
    assert torch.equal(models[0][0][0].weight, models[1][0][0].weight)
    assert torch.equal(models[0][0][1].weight, models[1][0][1].weight)


def test_another_format_is_refused_and_its_weights_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mo = ModelOptimizer(layer, {"optimizer": {"name": "sgd"}})
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "FORMAT", checkpoint.FORMAT - 1)
        path = mo.save_ckpt(tmp_path / "old.safetensors")
    with pytest.raises(StageError, match=r"format 1, expected 2.*\n.*load_weights"):
        mo.load_ckpt(path)
    checkpoint.load_weights(other, path)
    assert torch.equal(other.weight, layer.weight)


def test_an_open_window_of_another_number_format_goes_on(tmp_path: Path) -> None:
    config = {"optimizer": {"name": "sgd", "lr": 1.0}, "training": {"accumulate_steps": 2}}
    narrow, wide = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(narrow.weight)
    mo = ModelOptimizer(narrow, config)
    mo.step(narrow(torch.full((1, 1), 2.0)).mean())
    mo.save_ckpt(tmp_path / "a.safetensors")
    again = ModelOptimizer(wide, config)
    again.load_ckpt(tmp_path / "a.safetensors")
    again.step(wide(torch.full((1, 1), 4.0, dtype=torch.float64)).mean())
    assert wide.weight.item() == -3.0  # the mean of both gradients
    assert wide.weight.dtype == torch.float64


def test_a_norm_of_zero_is_a_number_after_loading(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    mo, again = ModelOptimizer(model, {}), ModelOptimizer(nn.Linear(1, 1), {})
    mo.step(model(torch.zeros(1, 1)).mean() * 0)
    mo.save_ckpt(tmp_path / "a.safetensors")
    again.load_ckpt(tmp_path / "a.safetensors")
    assert again.grad_norm == mo.grad_norm == 0.0
