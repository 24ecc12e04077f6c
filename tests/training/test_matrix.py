"""Every two capabilities at once: each still does what it does alone, or the pair is refused with its reason.

`python -m tests.training.test_matrix` prints the table that docs/training-reference.md shows.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerline import ModelOptimizer
from layerline.training.loop.masks import magnitude
from layerline.training.model.split_tensors import whole
from tests.training.group import Died, good, split
from tests.training.group import ranks as run_ranks

Weights = dict[str, Tensor]
_STEPS, _DECAY = 8, 0.8


@dataclass
class Result:
    """What a run left behind."""

    online: Weights = field(default_factory=dict)
    shipped: Weights = field(default_factory=dict)
    history: list[Weights] = field(default_factory=list)
    rounded: bool = True
    dtypes: set[torch.dtype] = field(default_factory=set)
    kept: Weights = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Feature:
    """One capability.

    Attributes:
        config: what switches it on.
        holds: what must be true of a run with it, given the same run without it and the greatest rounding difference
            that the other features allow.
        rounding: how far it may move weights by rounding alone.
        ranks: how many processes it takes.
    """

    config: dict[str, Any]
    holds: Callable[[Result, Result, float], None]
    rounding: float = 0.0
    ranks: int = 1


def _equal(with_it: Result, without: Result, _: float) -> None:
    assert all(torch.equal(t, without.online[n]) for n, t in with_it.online.items())
    assert all(torch.equal(t, without.shipped[n]) for n, t in with_it.shipped.items())


def _close(with_it: Result, without: Result, rounding: float) -> None:
    assert all(torch.allclose(t, without.online[n], rtol=0, atol=rounding + 2e-6) for n, t in with_it.online.items())


def _averaged(with_it: Result, without: Result, rounding: float) -> None:
    _close(with_it, without, rounding)
    average = dict(with_it.history[0])
    for weights in with_it.history[1:]:
        average = {n: a + (1 - _DECAY) * (weights[n] - a) for n, a in average.items()}
    assert all(torch.allclose(t, average[n], atol=1e-5) for n, t in with_it.shipped.items())
    assert any(not torch.equal(t, with_it.online[n]) for n, t in with_it.shipped.items())


def _half_forward(dtype: torch.dtype) -> Callable[[Result, Result, float], None]:
    def holds(with_it: Result, without: Result, rounding: float) -> None:
        assert with_it.dtypes == {dtype}
        _close(with_it, without, rounding)

    return holds


def _masked(with_it: Result, without: Result, rounding: float) -> None:
    for name, kept in with_it.kept.items():
        for weights in (with_it.online, with_it.shipped, *with_it.history):
            assert not weights[name][~kept].any() and weights[name][kept].all()
    assert len(with_it.kept) == 3


def _mastered(with_it: Result, without: Result, rounding: float) -> None:
    assert with_it.rounded
    _close(with_it, without, rounding)


def _rejected(with_it: Result, without: Result, rounding: float) -> None:
    _close(with_it, without, rounding)
    assert any("it began" in s and "in the batch: input 0" in s and ", sample" in s for s in with_it.said)


FEATURES: dict[str, Feature] = {
    "EMA": Feature({"training": {"ema_decay": _DECAY}}, _averaged),
    "bf16": Feature({"training": {"mixed_precision": "bf16"}}, _half_forward(torch.bfloat16), 3e-2),
    "fp16": Feature({"training": {"mixed_precision": "fp16"}}, _half_forward(torch.float16), 3e-2),
    "half weights": Feature({"precision": {"master_weights": True}}, _mastered, 3e-2),
    "accumulation": Feature({"training": {"accumulate_steps": 2}}, _close, 2e-6),
    "masks": Feature({}, _masked),
    "recomputation": Feature({"gpu": {"checkpointing": True, "checkpoint_interval": 2}}, _equal),
    "triage": Feature({"nonfinite": {"triage": True}}, _rejected),
    "resume": Feature({}, _equal),
    "DDP": Feature({"distributed": {"backend": "gloo"}}, _close, 2e-6, ranks=2),
    "sharding": Feature({"distributed": {"backend": "gloo"}}, _close, 2e-6, ranks=2),
}
REFUSED: dict[frozenset[str], str] = {
    frozenset({"half weights", "sharding"}): "float32 masters are not split",
    frozenset({"triage", "sharding"}): "triage replays a step on one rank, and a split layer needs all of them",
}
# Two values of one field.
EITHER: tuple[frozenset[str], ...] = (frozenset({"bf16", "fp16"}), frozenset({"DDP", "sharding"}))
PAIRS = [frozenset(p) for p in itertools.combinations(FEATURES, 2) if frozenset(p) not in EITHER]


def _train(on: frozenset[str], rank: int = 0, size: int = 1) -> Result:
    """Eight steps; with what is on. What is random comes from the step's number alone."""
    # Ranks are forks of one process, so the folder is theirs together and nobody else's.
    result, folder = Result(), Path(tempfile.gettempdir()) / f"layerline-matrix-{os.getppid()}"
    _, mo, masks = _make(on, seed=3)
    result.kept = masks if "masks" in on else {}
    result.history.append(_held(mo))
    for step in range(_STEPS):
        if "triage" in on and step == 3:
            _step(on, mo, _batch(step, poisoned=True), result, rank, size)
        if "resume" in on and step == 5:
            path = mo.save_ckpt(folder / "half.safetensors")
            result.said += mo.warnings
            _, mo, _ = _make(on, seed=4)
            mo.load_ckpt(path)
        _step(on, mo, _batch(step), result, rank, size)
        result.history.append(_held(mo))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    lane = mo.lanes[""]
    assert (lane.steps, lane.skipped) == (_STEPS, "triage" in on), on
    result.online, result.shipped, result.said = _held(mo), mo.export(), result.said + mo.warnings
    held = zip(lane.params, lane.stepped, strict=True)
    result.rounded = all(torch.equal(whole(p), whole(s).to(p.dtype)) for p, s in held)
    return result


def _make(on: frozenset[str], seed: int) -> tuple[nn.Module, ModelOptimizer, Weights]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    masks = magnitude(model, 0.5)
    if "half weights" in on:
        model.to(torch.bfloat16 if "bf16" in on else torch.float16)  # layers refuse the two types at once
    config: dict[str, dict[str, Any]] = {"optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.9}}
    for name in on:
        for section, fields in FEATURES[name].config.items():
            config[section] = {**config.get(section, {}), **fields}
    trained: nn.Module = model
    if "sharding" in on:
        trained = split(model)
    mo = ModelOptimizer(trained, config)
    if "masks" in on:
        mo.apply_mask(masks)
    return model, mo, masks


def _batch(step: int, *, poisoned: bool = False) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=draws), torch.randn(8, 3, generator=draws)
    if poisoned:
        x[[2, 3, 6, 7], 0] = torch.nan  # some in every part that any split makes
    return x, y


def _step(
    on: frozenset[str], mo: ModelOptimizer, batch: tuple[Tensor, Tensor], result: Result, rank: int, size: int
) -> None:
    parts = 2 if "accumulation" in on else 1
    for x, y in zip(*(b.split(8 // parts) for b in batch), strict=True):
        x, y = x.to(mo.lanes[""].params[0].dtype)[rank::size], y[rank::size]
        with mo.autocast():
            out = mo.model(x)
        if (out.dtype != torch.float32 and "half weights" not in on) or mo.config.precision.amp != "fp32":
            result.dtypes.add(out.dtype)
        mo.step((out.float() - y).square().sum() / 30, weight=len(x))


def _held(mo: ModelOptimizer) -> Weights:
    """The weights that the optimizer steps, whole."""
    lane = mo.lanes[""]
    return {n: whole(p.detach()).float().clone() for n, p in zip(lane.names, lane.stepped, strict=True)}


@functools.cache
def _alone(on: frozenset[str]) -> Result:
    return _train(on)


def _rounding(on: frozenset[str]) -> float:
    return sum(FEATURES[n].rounding for n in on)


def _check(pair: frozenset[str], both: Result, other: Callable[[frozenset[str]], Result]) -> None:
    for name in pair:
        FEATURES[name].holds(both, other(pair - {name}), _rounding(pair))


def _needs_ranks(on: frozenset[str]) -> bool:
    return any(FEATURES[n].ranks > 1 for n in on)


def _named(pair: frozenset[str]) -> str:
    return " x ".join(n for n in FEATURES if n in pair)


HERE = [p for p in PAIRS if not _needs_ranks(p)]
TOGETHER = [p for p in PAIRS if _needs_ranks(p) and p not in REFUSED]


@pytest.mark.parametrize("name", [n for n in FEATURES if FEATURES[n].ranks == 1])
def test_each_alone(name: str) -> None:
    FEATURES[name].holds(_alone(frozenset({name})), _alone(frozenset()), _rounding(frozenset({name})))


@pytest.mark.parametrize("pair", HERE, ids=_named)
def test_each_pair(pair: frozenset[str]) -> None:
    _check(pair, _alone(pair), _alone)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_all_of_them_at_once(amp: str) -> None:
    everything = frozenset(n for n in FEATURES if FEATURES[n].ranks == 1) - {"bf16", "fp16"} | {amp}
    both = _alone(everything)
    for name in everything:
        FEATURES[name].holds(both, _alone(everything - {name}), _rounding(everything))


def _cells(rank: int, cells: list[frozenset[str]]) -> list[Result]:
    return [_train(cell, rank, 2) for cell in cells]


@pytest.fixture(scope="module")
def cells() -> dict[frozenset[str], Result]:
    """Every cell that takes two ranks, in one start of both."""
    everything = frozenset(FEATURES) - {"fp16", "sharding"}
    wanted = [*TOGETHER, *(frozenset({n}) for n in FEATURES if FEATURES[n].ranks > 1), everything]
    first, second = good(run_ranks(_cells, wanted, timeout=300))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(t, b.online[n]) for n, t in a.online.items())
    return dict(zip(wanted, first, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("pair", TOGETHER, ids=_named)
def test_each_pair_on_two_ranks(pair: frozenset[str], cells: dict[frozenset[str], Result]) -> None:
    _check(pair, cells[pair], lambda on: cells[on] if _needs_ranks(on) else _alone(on))


@pytest.mark.slow
def test_all_of_them_at_once_on_two_ranks(cells: dict[frozenset[str], Result]) -> None:
    everything = frozenset(FEATURES) - {"fp16", "sharding"}
    FEATURES["DDP"].holds(cells[everything], _alone(everything - {"DDP"}), _rounding(everything))


def _refused(_rank: int, pair: frozenset[str]) -> None:
    _make(pair, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("pair", REFUSED, ids=_named)
def test_each_refused_pair(pair: frozenset[str]) -> None:
    for result in run_ranks(_refused, pair):
        assert isinstance(result, Died) and result.kind == "ConfigError" and REFUSED[pair] in result.text


def table() -> str:
    """The pairs as Markdown: tested, one of two, or refused with a footnote."""
    names, notes = list(FEATURES), list(REFUSED.values())
    rows = [f"| | {' | '.join(names[1:])} |", "| --- |" + " --- |" * (len(names) - 1)]
    for i, a in enumerate(names[:-1]):
        cells = []
        for j, b in enumerate(names[1:], start=1):
            pair = frozenset({a, b})
            if j <= i:
                cells.append("")
            elif pair in EITHER:
                cells.append("either")
            else:
                cells.append(f"refused ({notes.index(REFUSED[pair]) + 1})" if pair in REFUSED else "tested")
        rows.append(f"| {a} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *(f"({i}) {note}." for i, note in enumerate(notes, start=1))])


def test_the_guide_shows_this_table() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "training-reference.md").read_text("utf-8")


if __name__ == "__main__":
    print(table())
