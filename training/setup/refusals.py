"""What ModelOptimizer refuses, why, and which configurations that concerns: a plan shows what one could run into."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from layerline.training.loop.step_engine import Lane
from layerline.training.model.split_tensors import is_split

Concerns = Callable[[Lane], bool]


def refused(lane: Lane) -> tuple[dict[str, str], dict[str, str]]:
    """The combinations that have a part of this configuration in them, and the others, each with why it is refused."""
    near: dict[str, str] = {}
    far: dict[str, str] = {}
    for what, (why, concerns) in REFUSED.items():
        (near if concerns(lane) else far)[what] = why
    return near, far


def _sharded(lane: Lane) -> bool:
    return is_split(lane.model)


def _whole_ranks(lane: Lane) -> bool:
    return lane.peers is not None and not is_split(lane.model)


def _custom(lane: Lane) -> bool:
    return lane.custom


def _optimizer(*names: str) -> Concerns:
    return lambda lane: not lane.custom and lane.config.optimizer.name in names


def _scheduler(*names: str) -> Concerns:
    return lambda lane: lane.config.scheduler.name in names


def _warms_up(lane: Lane) -> bool:
    return bool(lane.config.scheduler.warmup_ratio or lane.config.scheduler.warmup_steps)


def _embeds(lane: Lane) -> bool:
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in lane.model.modules())


# Each of these is an error where it is asked for; the reason is the one given here.
REFUSED: Mapping[str, tuple[str, Concerns]] = {
    "sophia with half parameters": (
        "its estimate of the curvature needs float32 parameters; use precision.amp", _optimizer("sophia")),
    "lamb, lion, adafactor and sophia on complex parameters": (
        "they are not defined there", _optimizer("lamb", "lion", "adafactor", "sophia")),
    "custom optimizer with master_weights": (
        "it holds the parameters themselves and cannot be made to step copies", _custom),
    "custom optimizer beside fields of the section optimizer": ("it has its own and would not read them", _custom),
    "a custom optimizer over parameters that are not the model's": (
        "nobody would divide and clip their gradients", _custom),
    "a closure with accumulation, fp16, half parameters or several ranks": (
        "the optimizer evaluates the loss as often as it likes", _custom),
    "parameters that join before a custom optimizer holds them": ("nobody would step them", _custom),
    "a step while the model holds its EMA weights": (
        "it would train the average; call switch_to_online() first", lambda lane: lane.ema is not None),
    "weighted and unweighted losses in one window": (
        "their gradients have no common divisor", lambda lane: lane.config.accumulate.steps > 1),
    "sparse gradients": (
        "norms, clipping and averaging are defined on dense ones; use Embedding(sparse=False)", _embeds),
    "cosine, polynomial, one_cycle and wsd without total_steps": (
        "they are functions of the length of the run", _scheduler("cosine", "polynomial", "one_cycle", "wsd")),
    "a warm-up as long as the run": ("the peak rate would never be reached", _warms_up),
    "one parameter in two models": (
        "its gradients would mix, and two optimizers would step it", lambda lane: lane.shared),
    "sharding with half parameters": ("float32 masters are not sharded; use precision.amp", _sharded),
    "sharding with triage": ("it replays a step on one rank, and a sharded layer needs all of them", _sharded),
    "sharding with adafactor": ("its row and column statistics need whole matrices", _sharded),
    "sharding with sophia": ("it needs second derivatives, which sharded layers have not", _sharded),
    "sharding of several models or with a custom optimizer": (
        "split them yourself with fully_shard first", _sharded),
    "parameters that join a sharded model": ("its units are split once; change the model before", _sharded),
    "DistributedDataParallel with static_graph": ("it allows no pass that is not reduced", _whole_ranks),
    "ranks with different masks or joining parameters": (
        "they would train different models", lambda lane: lane.peers is not None),
    "the saved state of another optimizer": (
        "it means something else there; layerline.training.state.checkpoint.load_weights takes weights alone",
        lambda _: True,
    ),
}  # fmt: skip
