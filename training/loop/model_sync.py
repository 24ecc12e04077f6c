"""Changes to a model after ModelOptimizer was made: they are followed, taken in by join(), or refused by name. Without
this a replaced parameter would be saved untrained, and one that moved to another device would lose its average.
The model is searched for changes when a gradient is missing, now and then, and before weights are saved, switched or
exported."""

from __future__ import annotations

from layerline.pipeline.errors import ConfigError
from layerline.training.loop.ema import statistics
from layerline.training.loop.lane_state import LaneState
from layerline.training.loop.running_stats_guard import RunningStatsGuard, guarded
from layerline.training.model.canonical_names import Slots, named
from layerline.training.model.precision import masters
from layerline.training.optimizers import custom, param_groups, registry
from layerline.training.optimizers.param_groups import Member

_ANEW = "change, move or load the model first (load_state_dict without assign=True), then make ModelOptimizer"


def refresh(lane: LaneState, *, warn: bool = True) -> None:
    """Searches the model for changes and follows them: buffers that are new tensors, other names, layers without
    statistics, half weights that were written to. Warns of parameters that require a gradient and are not trained."""
    if lane.peers is not None:
        lane.peers.release()  # a sharded unit that is whole at the moment holds other tensors
    lane.named = named(lane.model)
    present = {id(param): name for name, param in lane.named.params.items()}
    for name, param, kind in zip(lane.names, lane.params, lane.kinds, strict=True):
        if id(param) not in present:
            what = "is no longer in the model"
            # load_state_dict(assign=True) and a replaced layer put another tensor under the same name.
            if name in lane.named.params or name in lane.named.aliases:
                what = "is another tensor"
            raise ConfigError(f"this parameter {what} since ModelOptimizer was made", where=name, hint=_ANEW)
        if kind != (param.dtype, param.device):
            what = f"this parameter was {kind[0]} on {kind[1]} when ModelOptimizer was made"
            raise ConfigError(f"{what}, and is {param.dtype} on {param.device}", where=name, hint=_ANEW)
    names = [present[id(param)] for param in lane.params]
    if names != lane.names:
        renamed = dict(zip(lane.names, names, strict=True))
        lane.monitor.rename(renamed)
        for policy in lane.policies():
            policy.rename(renamed)
        lane.names[:] = names
    lane.find_frozen()
    if warn:
        # A user's optimizer may have gained a parameter that the model does not have.
        if lane.custom:
            custom.check_held(lane.optimizer, lane.params)
        trained = set(map(id, lane.params))
        new = [name for name, p in lane.named.params.items() if p.requires_grad and id(p) not in trained]
        if new:
            text = f"these require a gradient and are not trained: {', '.join(new[:3])}"
            if len(new) > 3:
                text += f" and {len(new) - 3} more"
            lane.monitor.warn("strangers", f"{text}; call join()")
    take_over(lane)


def join(lane: LaneState) -> list[str]:
    """Takes in trained parameters that the model has gained since; returns their names."""
    lane.refuse_averages("join")
    refresh(lane, warn=False)
    trained = set(map(id, lane.params))
    placed = param_groups.placed(lane.model, lane.named, lane.config.optimizer)
    fresh = [member for member in placed if id(member.param) not in trained]
    names = [member.name for member in fresh]
    late = [member.param for member in fresh]
    if lane.custom:
        idle = custom.idle(lane.optimizer, names, late)
        if idle:
            raise ConfigError("a custom optimizer must hold a parameter before it joins", where=idle[0],
                              hint="optimizer.add_param_group({'params': …}) first")  # fmt: skip
    if fresh and masters(lane.config, late, custom=lane.custom):
        raise ConfigError("a half parameter needs a master, and can only join at construction", where=names[0],
                          hint="make ModelOptimizer after changing the model")  # fmt: skip
    if lane.peers is not None:
        lane.peers.admit(fresh)
    for member in fresh:
        _admit(lane, member)
    lane.members += tuple(fresh)
    _in_order(lane)
    if lane.monitor.per_layer:
        lane.monitor.add_columns([f"grad_norm/{name}" for name in names])
    lane.take_stock()
    take_over(lane)
    return names


def take_over(lane: LaneState) -> None:
    """Points average, guard and masters to what the model holds now; not while it holds its averages."""
    if lane.ema is not None and lane.ema.swapped:
        return
    if lane.ema is not None:
        lane.ema.follow(dict(zip(lane.names, lane.stepped, strict=True)), Slots(lane.named, statistics(lane.named)))
    live = Slots(lane.named, guarded(lane.named))
    if not live.names:
        lane.guard = None
    elif lane.guard is None:
        lane.guard = RunningStatsGuard(live)
    else:
        lane.guard.follow(live)
    if lane.masters is not None:
        lane.masters.follow()


def _in_order(lane: LaneState) -> None:
    """Puts what joined where a run that starts with it has it: sums depend on the order in their last bits."""
    place = {id(param): index for index, param in enumerate(lane.named.params.values())}
    rows = list(zip(lane.params, lane.names, lane.members, lane.stepped, strict=True))
    rows.sort(key=lambda row: place[id(row[0])])
    params, names, members, stepped = zip(*rows, strict=True)
    lane.members = members
    # In place: monitor, average and step engine hold these lists.
    lane.names[:] = names
    lane.params[:] = params
    lane.stepped[:] = stepped


def _admit(lane: LaneState, member: Member) -> None:
    member.param.grad = None  # what passes before have left there is none of a window's
    lane.params.append(member.param)
    lane.names.append(member.name)
    if lane.stepped is not lane.params:
        lane.stepped.append(member.param)
    if lane.custom:
        return
    part = registry.part_for(lane.optimizer, lane.config.optimizer, member)
    part.add_param_group({"params": [member.param], **param_groups.options(lane.config.optimizer, member)})
    lane.rate.adopt(part.param_groups[-1])
