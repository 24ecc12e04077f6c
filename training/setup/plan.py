"""The plan of a training: parameter groups, learning rates and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from layerline.training.config.sections import OptimizerConfig
from layerline.training.loop import batch_norm
from layerline.training.loop.step_engine import Lane
from layerline.training.optimizers import param_groups
from layerline.training.optimizers.custom import own_groups
from layerline.training.optimizers.param_groups import Member
from layerline.training.optimizers.strides import inner

LISTED = 60  # parameters that the printed plan lists
_HEAD = ("lr", "betas", "eps", "momentum", "nesterov", "alpha", "rho", "weight_decay", "fused", "foreach")


@dataclass(frozen=True)
class Plan:
    """The plan of one model; `str()` prints it."""

    optimizer: str
    # parameter name -> ("decay" or "no decay", why, elements); for a custom optimizer what its groups say
    groups: Mapping[str, tuple[str, str, int]]
    curve: tuple[tuple[int, float], ...]  # (step, learning rate) at eleven points of the run
    notes: tuple[str, ...]  # sentences on this configuration
    model: str = ""  # its name, where there are several
    others: tuple[Plan, ...] = ()  # the plans of the further models

    def __str__(self) -> str:
        title = f"{self.model}: {self.optimizer}".removeprefix(": ")
        lines = [title, "", "groups"]
        listed = list(self.groups.items())[:LISTED]  # a model may have thousands
        width = max(len(name) for name, _ in listed)
        for name, (group, why, size) in listed:
            lines.append(f"  {name:<{width}}  {group:<8}  {why:<10} {size:>12,}")
        if len(self.groups) > LISTED:
            lines.append(f"  and {len(self.groups) - LISTED} more: mo.plan().groups has all")
        lines += ["", "learning rate"]
        # A rate that stays is one line, from its first to its last point.
        for rate, points in groupby(self.curve, key=lambda point: f"{point[1]:.3e}"):
            steps = [step for step, _ in points]
            text = f"  step {steps[0]:>9,}"
            if len(steps) > 1:
                text += f" to {steps[-1]:,}"
            lines.append(f"{text}  {rate}")
        if self.notes:
            lines += ["", "notes", *[f"  {note}" for note in self.notes]]
        return "\n\n\n".join(["\n".join(lines), *map(str, self.others)])


def plan_all(lanes: Mapping[str, Lane]) -> Plan:
    """The plan of the first lane, with those of the others."""
    first, *others = (replace(plan(lane), model=name) for name, lane in lanes.items())
    return replace(first, others=tuple(others))


def plan(lane: Lane) -> Plan:
    """The plan of one lane, with what the first step has shown so far."""
    config = lane.config
    # Without a length, the shape of the curve at least.
    total = config.scheduler.total_steps or 1000
    points = sorted({round(i * (total - 1) / 10) for i in range(11)})
    return Plan(
        optimizer=_headline(lane),
        groups=_groups(lane),
        curve=tuple((s, lane.rate.at(s)) for s in points),
        notes=tuple(_notes(lane)),
    )


def _groups(lane: Lane) -> dict[str, tuple[str, str, int]]:
    if not lane.custom:
        return {m.name: (_group_name(lane.config.optimizer, m), m.reason, m.param.numel()) for m in lane.members}
    groups = own_groups(lane.optimizer)
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    out = {}
    for name, param in zip(lane.names, lane.params, strict=True):
        kind, why = "unknown", ""  # an optimizer without groups does not say
        if groups:
            kind = "not held"  # no group holds this parameter
        number = group_of.get(id(param))
        if number is not None:
            kinds = {None: "unknown", 0: "no decay"}
            kind, why = kinds.get(groups[number].get("weight_decay"), "decay"), f"group {number}"
        out[name] = (kind, why, param.numel())
    return out


def _group_name(config: OptimizerConfig, member: Member) -> str:
    """`decay` or `no decay`, with the rate where it is not the configured one."""
    fields = param_groups.options(config, member)
    name = "decay"
    if fields.get("weight_decay") == 0:
        name = "no decay"
    rule = param_groups.rule_name(config, member)
    if rule != config.name:
        name = f"{rule}, {name}"
    if fields["lr"] == config.base_lr:  # nothing to add: it is in the headline
        return name
    return f"{name}, lr {fields['lr']:.3g}"


def _headline(lane: Lane) -> str:
    name = type(lane.optimizer).__name__
    if lane.custom:
        fields = [_field_list(group) for group in own_groups(lane.optimizer)]
        return f"{name}({' | '.join(fields)}) (custom)" if any(fields) else f"{name} (custom)"
    rate = {"lr": lane.rate.base}  # of the first one: the present rate may be that of the warm-up
    parts: list[str] = []
    for part in inner(lane.optimizer):
        parts.append(f"{type(part).__name__}({_field_list(part.param_groups[0] | rate)})")
        rate = {}
    return " + ".join(parts)


def _field_list(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={group[name]}" for name in _HEAD if group.get(name) is not None)


def _notes(lane: Lane) -> Iterable[str]:
    config = lane.config
    warning = batch_norm.warning(lane.model, config.accumulate.steps)
    if warning:
        yield warning
    if config.precision.amp != "fp16" and "dynamic_loss_scale_window" in config.precision.model_fields_set:
        yield f"the loss scale serves fp16 alone; amp is {config.precision.amp}"
    if config.precision.master_weights and lane.masters is None:
        yield "master_weights: the parameters are float32 already and are their own masters"
    if lane.custom and not hasattr(lane.optimizer, "state_dict"):  # any object with step() and zero_grad() is taken
        yield f"{type(lane.optimizer).__name__} has no state_dict(): a checkpoint cannot hold its state"
    if len({float(g["lr"]) for g in own_groups(lane.optimizer) if "lr" in g}) > 1:
        yield "the curve is that of the optimizer's first group; the others keep their ratio to it"
    if lane.custom and not own_groups(lane.optimizer):
        yield f"{type(lane.optimizer).__name__} has no param_groups: what it decays, and at which rate, it does not say"
    if config.nonfinite.policy == "rollback" and not config.monitor.save_interval:
        yield "rollback needs a checkpoint to roll back to: monitor.save_interval, or mo.save_ckpt() in the loop"
    if config.monitor.valid_interval:
        yield f"every {config.monitor.valid_interval} steps it calls the metric of mo.validate_with(metric)"
    if config.scheduler.name == "plateau":
        yield "plateau moves with mo.validate(): without it the rate stays"
    if config.scheduler.total_steps is None:
        yield "the length of the run is not known; the curve shows 1,000 steps"
