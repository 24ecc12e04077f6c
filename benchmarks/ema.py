"""One EMA update: Layerline, a bare `torch._foreach_lerp_` over the same tensors, torch's AveragedModel.

    python benchmarks/ema.py

Models of 10, 100 and 600 tensors of 64x64 and 64. AveragedModel runs its foreach form (`get_ema_multi_avg_fn`). Rounds
are interleaved, one thread; a figure is the median over rounds of the mean update of a round. Ends in one JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from layerline.training.config.sections import EmaConfig
from layerline.training.loop.ema import EmaPolicy, averaged
from layerline.training.model.canonical_names import named

ROUNDS, UPDATES = 41, 20
DECAY = 0.999


def model(tensors: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(tensors // 2)))


def contenders(tensors: int) -> dict[str, Callable[[], object]]:
    net = model(tensors)
    sources = [p.detach() for p in net.parameters()]
    shadow = [s.clone() for s in sources]
    ema = EmaPolicy(averaged(named(net)), EmaConfig(decay=DECAY, warmup=True))
    step = iter(range(1, 10**9))
    peer = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    peer.update_parameters(net)  # its first call only copies
    return {
        "foreach_lerp": lambda: torch._foreach_lerp_(shadow, sources, 1 - DECAY),
        "layerline": lambda: ema.after_accepted(next(step)),
        "averaged_model": lambda: peer.update_parameters(net),
    }


def measure(updates: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(ROUNDS + 2):
        for name, update in updates.items():
            start = time.perf_counter()
            for _ in range(UPDATES):
                update()
            times[name].append((time.perf_counter() - start) / UPDATES * 1e6)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    result = {}
    for tensors in (10, 100, 600):
        micros = measure(contenders(tensors))
        result[str(tensors)] = {
            **{f"{n}_us": round(v, 1) for n, v in micros.items()},
            "ratio_to_lerp": round(micros["layerline"] / micros["foreach_lerp"], 3),
            "ratio_to_averaged_model": round(micros["layerline"] / micros["averaged_model"], 3),
        }
        print(tensors, result[str(tensors)])
    print(json.dumps({"benchmark": "ema", **result}))


if __name__ == "__main__":
    main()
