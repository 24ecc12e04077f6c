"""Which parameters get weight decay: each parameter in exactly one group, with the reason it is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import did_you_mean
from layerline.training.config.sections import GroupRule, OptimizerConfig
from layerline.training.model.canonical_names import NamedTensors, unwrap

_NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One parameter's place: whether it decays, and why; and what `optimizer.groups` say of it."""

    name: str
    names: tuple[str, ...]  # all names of the parameter; a tied one has several
    param: nn.Parameter
    decay: bool
    reason: str
    share: float = 1.0  # what the configured rate is multiplied by; an explicit `lr` of the rule is not
    rule: GroupRule | None = None  # the rule that holds for it


def members(model: NamedTensors, no_decay: Iterable[str] = ()) -> tuple[Member, ...]:
    """Every parameter that is trained, once, with its group; `_spared` has the reasons not to decay."""
    names = {name: [name] for name, param in model.params.items() if param.requires_grad}
    if not names:
        raise ConfigError("no parameter of the model requires a gradient", where="model")
    for alias, name in model.aliases.items():
        if name in names:
            names[name].append(alias)
    patterns = [pattern for pattern in no_decay if pattern != "embeddings"]
    for pattern in patterns:
        if not matches(itertools.chain(*names.values()), pattern):
            raise ConfigError(f"{pattern!r} matches no parameter", where="optimizer.no_decay")
    out = []
    for name, all_names in names.items():
        param = model.params[name]
        reason = ""  # a tied parameter is spared where any of its names is
        for one_name in all_names:
            owner = model.owners[one_name]
            if getattr(owner, "sparse", False):
                raise ConfigError("sparse gradients are not supported", where=one_name,
                                  hint="use Embedding(sparse=False)")  # fmt: skip
            if not reason:
                reason = _spared(one_name, param, owner, patterns, embeddings="embeddings" in no_decay)
        out.append(Member(name, tuple(all_names), param, not reason, reason or "weight"))
    return tuple(out)


def matches(names: Iterable[str], pattern: str) -> bool:
    """Whether one of the names matches a glob pattern, with upper and lower case apart on every system."""
    return any(fnmatchcase(name, pattern) for name in names)


def _spared(name: str, param: nn.Parameter, owner: nn.Module, patterns: list[str], *, embeddings: bool) -> str:
    """Why a parameter never decays; empty where it does."""
    last = name.rpartition(".")[2]
    if last == "bias" or last.startswith(("bias_", "in_proj_bias")):
        return "bias"
    # The length that weight normalisation keeps apart from the direction (Salimans & Kingma 2016).
    length = last.endswith("_g") and hasattr(owner, f"{last.removesuffix('_g')}_v")
    if isinstance(owner, ParametrizationList):
        length = last == "original0" and isinstance(owner[0], _WeightNorm)
    if isinstance(owner, _NORMS) or type(owner).__name__.lower().endswith("norm") or length:
        return "norm"
    if param.ndim <= 1:  # the scales of fake quantisation are among them
        return "1-D"
    if embeddings and isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    for pattern in patterns:
        if fnmatchcase(name, pattern):
            return f"no_decay {pattern}"
    return ""


# A second stack of blocks with more than this share of the first one's parameters is part of the network's depth: an
# encoder beside a decoder, two towers.
_SECOND_STACK = 0.5


def placed(model: nn.Module, named: NamedTensors, config: OptimizerConfig) -> tuple[Member, ...]:
    """Every trained parameter with its weight decay and its share of the rate. The first rule of `optimizer.groups`
    that matches one of a parameter's names decides."""
    out = members(named, config.no_decay)
    names = list(itertools.chain(*[member.names for member in out]))
    for index, rule in enumerate(config.groups):
        if not matches(names, rule.match):
            hint = did_you_mean(rule.match, names) or f"parameters are called {', '.join(names[:3])}, …"
            where = f"optimizer.groups.{index}.match"
            raise ConfigError(f"{rule.match!r} matches no parameter", where=where, hint=hint)
    shares = {}
    if config.layer_decay is not None:
        # Frozen parameters are counted: where all blocks are frozen, they still show what lies behind them.
        shares = layer_shares(model, list(named.params), config.layer_decay)
    result = []
    for member in out:
        share = shares.get(member.name, 1.0)
        applied = None
        for rule in config.groups:
            if matches(member.names, rule.match) and (rule.name != "muon" or member.param.ndim == 2):
                applied = rule
                break
        # An explicit `lr` of the rule holds alone; its `lr_scale` is multiplied by the share that layer_decay gives.
        if applied is not None and applied.lr_scale is not None:
            share *= applied.lr_scale
        result.append(replace(member, share=share, rule=applied))
    return tuple(result)


def rule_name(config: OptimizerConfig, member: Member) -> str:
    """The name of the update rule that steps a parameter."""
    if member.rule is None or member.rule.name is None:
        return config.name
    return member.rule.name


def options(config: OptimizerConfig, member: Member) -> dict[str, Any]:
    """The fields of the parameter group that a parameter belongs to: its rate, and what else is set for it."""
    fields: dict[str, Any] = {"lr": config.base_lr * member.share}
    weight_decay = config.weight_decay
    if member.rule is not None:
        fields |= member.rule.arguments
        if member.rule.lr is not None:
            fields["lr"] = member.rule.lr
        if member.rule.weight_decay is not None:
            weight_decay = member.rule.weight_decay
    if not member.decay:  # a rule's weight decay is not for biases and norms
        weight_decay = 0.0
    if weight_decay is not None:
        fields["weight_decay"] = weight_decay
    return fields


def layer_shares(model: nn.Module, names: Sequence[str], decay: float) -> dict[str, float]:
    """The share of the rate of each parameter, as layer-wise decay gives it (Clark et al. 2020, ELECTRA). The last of n
    blocks has the share `decay`, the first `decay ** n`, what comes before them `decay ** (n + 1)`, and what follows
    them 1."""
    path, count = _blocks(unwrap(model))
    prefix = f"{path}." if path else ""
    shares = {}
    depth = count + 1
    for name in names:  # in the order of the layers
        if name.startswith(prefix):
            depth = count - int(name.removeprefix(prefix).partition(".")[0])
        elif depth <= count:  # behind the blocks
            depth = 0
        shares[name] = decay**depth
    return shares


def _blocks(model: nn.Module) -> tuple[str, int]:
    """Path and number of the blocks: the children of the ModuleList or Sequential of equal modules that holds the most
    parameters."""
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        kinds = [type(child) for child in module.children()]
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) > 1 and len(set(kinds)) == 1:
            sizes[name] = sum(p.numel() for p in module.parameters())
            counts[name] = len(kinds)
    best = max(sizes, key=sizes.__getitem__, default="")
    reason = ""
    if not sizes:
        reason = "the model has no ModuleList or Sequential of equal blocks"
    for name, size in sizes.items():
        if size > _SECOND_STACK * sizes[best] and not _nested(name, best):
            reason = f"the model has two stacks of blocks, {best} and {name}, and layer_decay follows one"
    if reason:
        hint = "leave it out and write optimizer.groups with lr_scale"
        raise ConfigError(reason, where="optimizer.layer_decay", hint=hint)
    return best, counts[best]


def _nested(one: str, other: str) -> bool:
    """Whether one module is the other or lies inside of it; the whole model has the empty name."""
    inside = f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
    return inside or not (one and other)


def grouped(config: OptimizerConfig, members: Sequence[Member], stepped: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameter groups: one for each combination of rate and weight decay, those of the plain rate first."""
    groups: dict[tuple[tuple[str, float], ...], dict[str, Any]] = {}
    for member, param in zip(members, stepped, strict=True):
        fields = options(config, member)
        key = tuple(sorted(fields.items()))
        groups.setdefault(key, {"params": [], **fields})["params"].append(param)
    return sorted(groups.values(), key=lambda g: (g["lr"] != config.base_lr, g.get("weight_decay") == 0.0))
