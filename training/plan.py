"""What ModelOptimizer is going to do, before it does it: groups, rates, bytes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from layerline.training import norms
from layerline.training.lane import Lane
from layerline.training.optimizers import TABLE

# Each of these is an error where it is asked for; the reason is the one given here.
REFUSED: Mapping[str, str] = {
    "sophia with half parameters": "its estimate of the curvature needs float32 parameters; use precision.amp",
    "custom optimizer with master_weights": "it holds the parameters themselves and cannot be made to step copies",
    "a step while the model holds its EMA weights": "it would train the average; call switch_to_online() first",
    "weighted and unweighted losses in one window": "their gradients have no common divisor",
    "sparse gradients": "norms, clipping and averaging are defined on dense ones; use Embedding(sparse=False)",
    "cosine, polynomial and one_cycle without total_steps": "they are functions of the length of the run",
    "a warm-up as long as the run": "the peak rate would never be reached",
    "sharding with half parameters": "float32 masters are not sharded; use precision.amp",
    "sharding with triage": "it replays a step on one rank, and a sharded layer needs all of them",
    "sharding with adafactor": "its row and column statistics need whole matrices",
    "sharding with sophia": "it needs second derivatives, which sharded layers have not",
    "parameters that join a sharded model": "its units are split once; change the model before",
    "DistributedDataParallel with static_graph": "it allows no pass that is not reduced",
    "ranks with different masks or joining parameters": "they would train different models",
    "lamb, lion, adafactor and sophia on complex parameters": "they are not defined there",
    "an optimizer whose step() needs an argument (LBFGS)": "gradients are given to it, not computed by it",
    "a field that the optimizer or schedule does not read": "it would be ignored without a word",
    "sharding of several models or with a custom optimizer": "split them yourself with fully_shard first",
    "two fields that set the same thing to different values": "there is no telling which one is meant",
}


@dataclass(frozen=True)
class Plan:
    """The plan of one model; `str()` prints it.

    Attributes:
        groups: parameter name -> ("decay" or "no decay", why, elements).
        curve: (step, learning rate) at eleven points of the run.
        bytes: kind -> (planned, measured); measured is None before the first step.
        elements: trained parameters.
        notes: sentences on this configuration.
        refused: combination -> why.
    """

    optimizer: str
    groups: Mapping[str, tuple[str, str, int]]
    curve: tuple[tuple[int, float], ...]
    bytes: Mapping[str, tuple[int, int | None]]
    elements: int
    notes: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        width = max(len(n) for n in self.groups)
        lines = [self.optimizer, "", "groups"]
        lines += [f"  {n:<{width}}  {g:<8}  {why:<10} {size:>12,}" for n, (g, why, size) in self.groups.items()]
        lines += ["", "learning rate"] + [f"  step {step:>9,}  {rate:.3e}" for step, rate in self.curve]
        lines += ["", f"bytes per trained parameter ({self.elements:,} of them)"]
        for kind, (planned, measured) in self.bytes.items():
            seen = "not measured yet" if measured is None else f"measured {measured / self.elements:.2f}"
            lines.append(f"  {kind:<10}  planned {planned / self.elements:.2f}, {seen}")
        lines += ["", "notes"] + [f"  {n}" for n in self.notes] if self.notes else []
        lines += ["", "refused"] + [f"  {what}: {why}" for what, why in self.refused.items()]
        return "\n".join(lines)


def plan(lane: Lane) -> Plan:
    """The plan of one lane, with what the first step has shown so far."""
    config = lane.config
    total = config.scheduler.total_steps or 1000
    points = sorted({round(i * (total - 1) / 10) for i in range(11)})
    return Plan(
        optimizer=_headline(lane),
        groups={m.name: ("decay" if m.decay else "no decay", m.reason, m.param.numel()) for m in lane.members},
        curve=tuple((s, lane.rate.at(s)) for s in points),
        bytes=_bytes(lane),
        elements=sum(p.numel() for p in lane.params),
        notes=tuple(_notes(lane)),
        refused=REFUSED,
    )


def _headline(lane: Lane) -> str:
    if lane.custom:
        return f"{type(lane.optimizer).__name__} (custom)"
    first = {**lane.optimizer.param_groups[0], "lr": lane.rate.base}
    shown = ("lr", "betas", "eps", "momentum", "nesterov", "alpha", "rho", "weight_decay", "fused", "foreach")
    fields = ", ".join(f"{k}={first[k]}" for k in shown if first.get(k) is not None)
    return f"{type(lane.optimizer).__name__}({fields})"


def _bytes(lane: Lane) -> dict[str, tuple[int, int | None]]:
    started = lane.steps > 0
    weights, gradients = _size(lane.params), _size(lane.stepped)
    out: dict[str, tuple[int, int | None]] = {
        "parameters": (weights, _size(p for p in lane.named.params.values() if p.requires_grad)),
        "gradients": (gradients, lane.gradient_bytes if started else None),
    }
    if not lane.custom:
        out["states"] = _planned_states(lane), _measured_states(lane) if started else None
    if lane.masters is not None:
        out["masters"] = 2 * _size(lane.masters.half), _size(lane.masters.full)
    if lane.ema is not None:
        planned = sum(s.numel() * max(s.element_size(), 4) for s in lane.ema.sources)
        out["EMA"] = planned, _size(lane.ema.shadow)
    return out


def _planned_states(lane: Lane) -> int:
    config, rule = lane.config.optimizer, TABLE[lane.config.optimizer.name]
    if config.name == "adafactor":  # row and column means of matrices, whole vectors
        return sum(
            p.element_size() * (sum(p.numel() // p.shape[d] for d in (-1, -2)) if p.ndim > 1 else p.numel())
            for p in lane.stepped
        )
    count = rule.states
    if config.name == "sgd":
        count = 1 if config.momentum else 0
    elif config.name == "rmsprop":
        count = 2 if config.momentum else 1
    return count * _size(lane.stepped)


def _measured_states(lane: Lane) -> int:
    # One counter per parameter is no state of its size.
    return _size(t for s in lane.optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.ndim)


def _notes(lane: Lane) -> Iterable[str]:
    config = lane.config
    if warning := norms.warning(lane.model, config.accumulate.steps):
        yield warning
    if config.precision.amp != "fp16" and "dynamic_loss_scale_window" in config.precision.model_fields_set:
        yield f"the loss scale serves fp16 alone; amp is {config.precision.amp}"
    if config.precision.master_weights and lane.masters is None:
        yield "master_weights: the parameters are float32 already and are their own masters"
    if lane.custom and not hasattr(lane.optimizer, "state_dict"):
        yield f"{type(lane.optimizer).__name__} has no state_dict(): a checkpoint cannot hold its state"
    if config.scheduler.name == "plateau":
        yield "plateau moves with mo.validate(): without it the rate stays"
    if config.scheduler.total_steps is None:
        yield "the length of the run is not known; the curve shows 1,000 steps"


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
