"""Which parameters get weight decay: each parameter in exactly one group, with the reason it is there."""

from __future__ import annotations

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
        share: what the configured rate is multiplied by; an explicit `lr` of the rule is not.
        rule: the rule that holds for it.
    """

    name: str
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

    Raises:
        ConfigError: nothing requires a gradient, an embedding gives sparse gradients, or a pattern matches nothing.
    """
    patterns = [p for p in no_decay if p != "embeddings"]
    trained = {n: p for n, p in model.params.items() if p.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient", where="model")
    names = {n: [n] for n in trained}
    for alias, kept in model.aliases.items():
        if kept in names:
            names[kept].append(alias)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for tied in names.values() for name in tied):
            raise ConfigError(f"{pattern!r} matches no parameter", where="optimizer.no_decay")
    out = []
    for name, param in trained.items():
        # A tied parameter is spared where any of its names is.
        reasons = []
        for known in names[name]:
            owner = model.owners[known]
            if getattr(owner, "sparse", False):
                raise ConfigError("sparse gradients are not supported", where=known, hint="use Embedding(sparse=False)")
            reasons.append(_spared(known, param, owner, patterns, embeddings="embeddings" in no_decay))
        reason = next(filter(None, reasons), "")
        out.append(Member(name, param, not reason, reason or "weight"))
    return tuple(out)


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
    return next((f"no_decay {p}" for p in patterns if fnmatchcase(name, p)), "")


def _length(last: str, owner: nn.Module) -> bool:
    """Whether it is the length that weight normalisation keeps apart from the direction (Salimans & Kingma 2016)."""
    if isinstance(owner, ParametrizationList):
        return last == "original0" and isinstance(owner[0], _WeightNorm)
    return last.endswith("_g") and hasattr(owner, f"{last.removesuffix('_g')}_v")
