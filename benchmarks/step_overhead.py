"""What a step costs beyond a hand-written loop: Layerline with its monitors on, Accelerate, Lightning Fabric.

    python benchmarks/step_overhead.py

Every contender trains the same model on the same batch with the same torch optimizer (AdamW, fused, two groups: weights
that decay and the rest that does not), once plainly and once with gradients clipped at norm 1. Layerline also watches,
in both (gradient norm, finite check, a CSV row every 10 steps), and once more averages the weights.

Where a model's tensors happen to lie in memory moves its step by more than what is measured here, so every contender is
built many times over; rounds are interleaved in changing order, one thread. A figure is the median over builds and
rounds of the CPU time of a step less that of the hand-written loop in the same round. A second hand-written loop takes
part as well: what it "adds" is the measure's own error.

Then the costly cases, as ratios of CPU time to the hand-written loop, which only clears its gradients and steps: a log
row at every step, 600 small tensors, 10 M parameters, and NAdam, Lion and Muon from outside of the table. Beside each
ratio stands that of the same loop with one `torch._foreach_norm` over its gradients, which is the least that a finite
check costs.
Ends in one JSON line.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layerline import ModelOptimizer

BUILDS, ROUNDS, STEPS, WARM = 25, 8, 10, 20
# Of the costly cases: builds, rounds of each build, and seconds of one timing. The warm-up takes a loop past the steps
# in which a model is checked more often than later.
PAIR_BUILDS, PAIRS, SECONDS, PAIR_WARM = 6, 6, 0.1, 70
Step = Callable[[], object]


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(32, 16)


def cnn() -> tuple[nn.Module, Tensor]:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    body = [*block(3, 8), *block(8, 16), *block(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(*body), torch.randn(8, 3, 16, 16)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    weights, rest = ([p for p in model.parameters() if (p.ndim > 1) is w] for w in (True, False))
    return torch.optim.AdamW([{"params": weights}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, fused=True)


def by_hand(model: nn.Module, x: Tensor, y: Tensor, *, clip: bool) -> Step:
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor, *, clip: bool, ema: bool = False) -> Step:
    training = {"grad_clip_norm": 1.0 if clip else None, "ema_decay": 0.999 if ema else None}
    mo = ModelOptimizer(model, {"optimizer": {"name": "adamw"}, "training": training})

    def step() -> None:
        with mo.autocast():
            loss = F.cross_entropy(model(x), y)
        mo.step(loss)

    return step


def accelerate(model: nn.Module, x: Tensor, y: Tensor, *, clip: bool) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step() -> None:
        with accelerator.accumulate(model), accelerator.autocast():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return step


def fabric(model: nn.Module, x: Tensor, y: Tensor, *, clip: bool) -> Step:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(model, adamw(model))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(module, optimizer, max_norm=1.0)
        optimizer.step()

    return step


def contenders(make: Callable[[], tuple[nn.Module, Tensor]], *, clip: bool) -> dict[str, Step]:
    def build(how: Callable[..., Step], **options: Any) -> Step:
        torch.manual_seed(0)
        model, x = make()
        return how(model, x, torch.randint(0, 4, (len(x),)), clip=clip, **options)

    steps = {
        "hand": build(by_hand),
        "hand_again": build(by_hand),
        "layerline": build(ours),
        "layerline_ema": build(ours, ema=True),
    }
    peers = {"accelerate": ("accelerate", accelerate), "fabric": ("lightning_fabric", fabric)}
    return steps | {name: build(how) for name, (package, how) in peers.items() if find_spec(package)}


def measure(make: Callable[[], dict[str, Step]]) -> dict[str, float]:
    """Microseconds a step: of the hand-written loop, and what each contender adds to it."""
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(BUILDS):
        steps = list(make().items())
        for _, step in steps:
            timed(step, WARM)
        for _ in range(ROUNDS):
            random.shuffle(steps)
            for name, step in steps:
                times[name].append(timed(step, STEPS))
    hand = times.pop("hand")
    added = {n: statistics.median(t - h for t, h in zip(times[n], hand, strict=True)) for n in sorted(times)}
    return {"hand_us": round(statistics.median(hand), 1)} | {f"{n}_added_us": round(v, 1) for n, v in added.items()}


def stack(width: int, depth: int, batch: int = 32) -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(batch, width)


def muon(model: nn.Module) -> Any:
    from pytorch_optimizer import Muon

    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is m], "use_muon": m} for m in (True, False)]
    return Muon(groups, lr=1e-4)


def lion(model: nn.Module) -> Any:
    from pytorch_optimizer import Lion

    return Lion(model.parameters(), lr=1e-5)


def nadam(model: nn.Module) -> Any:
    return torch.optim.NAdam(model.parameters(), lr=1e-5)


def pair(
    make: Callable[[], tuple[nn.Module, Tensor]], own: Callable[[nn.Module], Any] | None, interval: int
) -> tuple[float, float]:
    """CPU time of our step, and of a plain one with a norm, over that of the plain one, in turns: median ratios."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for _ in range(PAIR_BUILDS):
        steps: dict[str, Step] = {}
        for name in ("hand", "norm", "ours"):
            torch.manual_seed(0)
            model, x = make()
            y = torch.randint(0, 4, (len(x),))
            optimizer = None if own is None else own(model)
            if name == "ours":
                steps[name] = watched(model, x, y, optimizer, interval)
            else:
                steps[name] = plainly(model, x, y, optimizer, norm=name == "norm")
        warm = [timed(step, PAIR_WARM) for step in steps.values()]
        count = max(1, round(SECONDS / (warm[0] / 1e6)))
        names = list(steps)
        for _ in range(PAIRS):
            random.shuffle(names)
            times = {name: timed(steps[name], count) for name in names}
            for name in ("norm", "ours"):
                ratios[name].append(times[name] / times["hand"])
    return round(statistics.median(ratios["ours"]), 3), round(statistics.median(ratios["norm"]), 3)


def plainly(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any, *, norm: bool) -> Step:
    optimizer = adamw(model) if optimizer is None else optimizer
    params = list(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if norm:
            parts = torch._foreach_norm([p.grad for p in params])
            math.isfinite(math.hypot(*[part.item() for part in parts]))
        optimizer.step()

    return step


def watched(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any, interval: int) -> Step:
    mo = ModelOptimizer(model, optimizer=optimizer, log_interval=interval)
    return lambda: mo.step(F.cross_entropy(model(x), y))


def costly() -> dict[str, tuple[float, float]]:
    medium, large, many = partial(stack, 256, 4), partial(stack, 1024, 10, 8), partial(stack, 8, 300, 8)
    cases: dict[str, tuple[Any, Any, int]] = {
        "rows_never": (medium, None, 0),
        "row_every_step": (medium, None, 1),
        "row_every_step_10M": (large, None, 1),
        "small_600": (many, None, 10),
        "small_600_row_every_step": (many, None, 1),
        "nadam": (medium, nadam, 10),
        "nadam_10M": (large, nadam, 10),
    }
    if find_spec("pytorch_optimizer"):
        cases |= {"lion": (medium, lion, 10), "lion_10M": (large, lion, 10), "muon": (medium, muon, 10)}
    return {name: pair(*case) for name, case in cases.items()}


def timed(step: Step, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count * 1e6


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name, make in {"mlp": mlp, "cnn": cnn}.items():
        for clip in (False, True):
            case = f"{name}_clipped" if clip else name
            result[case] = measure(partial(contenders, make, clip=clip))
            print(case, result[case])
    result["ratios"] = costly()
    print("ratios", result["ratios"])
    print(json.dumps({"benchmark": "step_overhead", **result}))


if __name__ == "__main__":
    main()
