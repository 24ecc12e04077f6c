"""Which parameters get weight decay: each parameter in exactly one group, with the reason it is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from layerline.pipeline.errors import ConfigError
from layerline.training.config.sections import GroupRule
from layerline.training.model.canonical_names import Named

_NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One parameter's place: whether it decays, and why; and what `optimizer.groups` say of it.

    Attributes:
        names: all names of the parameter; a tied one has several.
        share: what the configured rate is multiplied by; an explicit `lr` of the rule is not.
        rule: the rule that holds for it.
    """

    name: str
    names: tuple[str, ...]
    param: nn.Parameter
    decay: bool
    reason: str
    share: float = 1.0
    rule: GroupRule | None = None


def members(model: Named, no_decay: Iterable[str] = ()) -> tuple[Member, ...]:
    """Every parameter that is trained, once, with its group.

    These never decay: biases, parameters of normalisation layers, the lengths of weight normalisation, anything of at
    most one dimension (fake-quantisation scales among them), embeddings where `no_decay` says "embeddings", and names
    that match one of its glob patterns.
    """
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
    last = name.rpartition(".")[2]
    if last == "bias" or last.startswith(("bias_", "in_proj_bias")):
        return "bias"
    if isinstance(owner, _NORMS) or type(owner).__name__.lower().endswith("norm") or _length(last, owner):
        return "norm"
    if param.ndim <= 1:
        return "1-D"
    if embeddings and isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    for pattern in patterns:
        if fnmatchcase(name, pattern):
            return f"no_decay {pattern}"
    return ""


def _length(last: str, owner: nn.Module) -> bool:
    """Whether it is the length that weight normalisation keeps apart from the direction (Salimans & Kingma 2016)."""
    if isinstance(owner, ParametrizationList):
        return last == "original0" and isinstance(owner[0], _WeightNorm)
    return last.endswith("_g") and hasattr(owner, f"{last.removesuffix('_g')}_v")
