"""Which weights pruning masks: the smallest, two of four, or whole channels, at once or a growing share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from layerline.pipeline.errors import ConfigError
from layerline.pipeline.nearest import did_you_mean
from layerline.training.config.sections import Config
from layerline.training.model.canonical_names import first_paths, named
from layerline.training.model.split_tensors import whole

Scope = Literal["layer", "global"]
Method = Literal["layer", "global", "channels", "2:4"]
_TRANSPOSED = (nn.modules.conv._ConvTransposeNd,)


def magnitude(
    model: nn.Module, sparsity: float, *, scope: Scope = "layer", skip: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Masks that drop the smallest weights of the Linear and convolution layers: exactly round(sparsity · n) of them.
    Gives True where a weight stays, by canonical parameter name; `skip` holds glob patterns of names that stay whole.
    Of equal weights the first go. With `scope="global"` the share (0 to 1) holds over all layers."""
    _check_word("scope", scope, Scope)
    scores: dict[str, Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    for name, (_, param) in _layers(model, skip).items():
        scores[name] = whole(param.detach()).abs().float().flatten()
        shapes[name] = param.shape
    _check(sparsity, scores)
    if scope == "layer":
        return {name: _keep(s, round(sparsity * len(s))).view(shapes[name]) for name, s in scores.items()}
    # The largest weight of a layer always stays: a layer without weights is cut off from the rest for good.
    for score in scores.values():
        score[score.argmax()] = torch.inf
    joined = torch.cat(list(scores.values()))
    count = min(round(sparsity * len(joined)), len(joined) - len(scores))
    kept = torch.split(_keep(joined, count), [len(score) for score in scores.values()])
    return {name: k.view(shapes[name]) for name, k in zip(scores, kept, strict=True)}


def two_of_four(model: nn.Module, *, skip: Sequence[str] = ()) -> dict[str, Tensor]:
    """Masks that keep the two largest of each four weights along the input channels (Mishra et al. 2021)."""
    masks: dict[str, Tensor] = {}
    for name, (layer, param) in _layers(model, skip).items():
        weight = whole(param.detach()).abs().float()
        # The sparse kernels take no other number of input channels, and no transposed convolution.
        if isinstance(layer, _TRANSPOSED) or weight.shape[1] % 4:
            continue
        last = weight.movedim(1, -1)
        fours = last.reshape(-1, 4)
        # Of equal weights the first stay: sort() keeps their order where it is stable.
        order = fours.sort(dim=1, descending=True, stable=True).indices
        kept = torch.zeros_like(fours, dtype=torch.bool).scatter_(1, order[:, :2], True)
        masks[name] = kept.view(last.shape).movedim(-1, 1).contiguous()
    return masks


def channels(model: nn.Module, sparsity: float, *, skip: Sequence[str] = (), norms: bool = False) -> dict[str, Tensor]:
    """Masks that drop whole output channels, those of smallest L2 norm: round(sparsity · channels) of each Linear and
    convolution layer, one at least stays. The channel's bias goes too, so that it gives exactly zero and can be cut out
    later; with `norms` also what the BatchNorm that is registered right behind gives for it."""
    layers = _layers(model, skip)
    weights = {name: whole(param.detach()).float() for name, (_, param) in layers.items()}
    _check(sparsity, weights)
    behind = _norms_behind(model) if norms else {}
    masks: dict[str, Tensor] = {}
    for name, (layer, _) in layers.items():
        weight = weights[name]
        # (groups, output channels of a group, everything else). Those of a transposed convolution are on axis 1, group
        # by group on axis 0.
        if isinstance(layer, _TRANSPOSED):
            by_channel = weight.view(layer.groups, -1, *weight.shape[1:]).transpose(1, 2)
        else:
            by_channel = weight[None]
        norms_of = by_channel.flatten(2).norm(dim=2)
        kept = _keep(norms_of.flatten(), min(round(sparsity * norms_of.numel()), norms_of.numel() - 1))
        mask = kept.view(*norms_of.shape, *[1] * (by_channel.ndim - 2)).expand_as(by_channel)
        if isinstance(layer, _TRANSPOSED):
            mask = mask.transpose(1, 2)
        masks[name] = mask.reshape(weight.shape).contiguous()
        # A masked channel gives exactly zero only without its bias.
        if isinstance(layer.bias, nn.Parameter):
            masks[f"{name.rpartition('.')[0]}.bias".lstrip(".")] = kept
        norm_path, norm_channels = behind.get(layer, ("", 0))
        if norm_channels == len(kept):
            masks |= {f"{norm_path}.weight": kept, f"{norm_path}.bias": kept}
    return masks


def cubic(step: int, *, begin: int, end: int, final: float) -> float:
    """Sparsity at a step: s_f (1 - (1 - (t - t_0) / (t_1 - t_0))³) (Zhu & Gupta 2017, equation 1)."""
    # Fast at first, while there is much to spare, slow at the end: 0.4375 half-way to 0.5.
    if step >= end:
        return final
    left = 1.0 - max(step - begin, 0) / (end - begin)
    return final - final * left**3


@dataclass(frozen=True, kw_only=True)
class Gradual:
    """Masks that grow to `final` sparsity between two steps, chosen anew every `every` steps."""

    final: float
    begin: int
    end: int
    every: int = 100
    # magnitude in each "layer" or over all ("global"), whole "channels", or "2:4", chosen once
    method: Method = "layer"
    skip: tuple[str, ...] = ()  # glob patterns of parameter names that stay whole
    norms: bool = False  # see `channels`

    def __post_init__(self) -> None:
        _check_word("method", self.method, Method)
        if not 0 <= self.begin < self.end or self.every < 1:
            what = f"begins at {self.begin}, ends at {self.end}, every {self.every}"
            raise ConfigError(what, where="masks", hint="0 <= begin < end, every >= 1")
        if not 0 <= self.final < 1:
            raise ConfigError(f"grows to {self.final}", where="masks", hint="0 <= final < 1")

    def latest(self, step: int) -> int | None:
        """The last step up to accepted step number `step` at which masks are chosen; None before the first."""
        if step < self.begin:
            return None
        if step >= self.end:
            return self.end
        return step - (step - self.begin) % self.every

    def choose(self, model: nn.Module, step: int) -> dict[str, Tensor]:
        """The masks of that step."""
        share = cubic(step, begin=self.begin, end=self.end, final=self.final)
        if self.method == "2:4":
            return two_of_four(model, skip=self.skip)
        if self.method == "channels":
            return channels(model, share, skip=self.skip, norms=self.norms)
        return magnitude(model, share, scope=self.method, skip=self.skip)


def configured(model: nn.Module, config: Config) -> Gradual | None:
    """The masks that the section `pruning` asks for; None where it is off."""
    pruning = config.pruning
    if pruning.method is None:
        return None
    begin = pruning.start_step
    half = (config.scheduler.total_steps or 0) // 2
    end = pruning.end_step or max(half, begin + 1)
    method: Method = "layer"
    if pruning.method != "magnitude":
        method = pruning.method
    # It is chosen once: the pattern has one share.
    if method == "2:4":
        end = begin + 1
    skip = pruning.skip
    if method == "channels" and not skip:
        skip = tuple(_layers(model))[-1:]  # its channels are the model's outputs
    return Gradual(final=pruning.share, begin=begin, end=end, every=pruning.every, method=method, skip=skip,
                   norms=method == "channels")  # fmt: skip


def _norms_behind(model: nn.Module) -> dict[nn.Module, tuple[str, int]]:
    """Path and channels of the BatchNorm that is registered right behind a module."""
    paths = first_paths(model)
    # Registered order stands for the order in the network, as in Sequential.
    leaves = [module for module in paths if not module._modules]
    behind: dict[nn.Module, tuple[str, int]] = {}
    for module, after in pairwise(leaves):
        if isinstance(after, nn.modules.batchnorm._BatchNorm) and after.affine:
            behind[module] = paths[after], after.num_features
    return behind


def _layers(
    model: nn.Module, skip: Sequence[str] = ()
) -> dict[str, tuple[nn.Linear | nn.modules.conv._ConvNd, nn.Parameter]]:
    """The layers with weights to prune, by the name of the weight; a tied weight once."""
    layers: dict[str, tuple[nn.Linear | nn.modules.conv._ConvNd, nn.Parameter]] = {}
    names = named(model)
    for name, param in names.params.items():
        owner = names.owners[name]
        if not isinstance(owner, nn.Linear | nn.modules.conv._ConvNd) or param is not owner.weight:
            continue
        if not any(fnmatchcase(name, pattern) for pattern in skip):
            layers[name] = owner, param
    return layers


def _keep(scores: Tensor, drop: int) -> Tensor:
    """True for all but the `drop` smallest; of equal ones the first are dropped."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    if drop:
        # kthvalue() takes one pass; of equal scores at the bound the first ones are dropped until the count is right.
        bound = scores.kthvalue(drop).values
        smaller = scores < bound
        keep &= ~smaller
        equal = (scores == bound).nonzero().flatten()
        keep[equal[: drop - int(smaller.sum())]] = False
    return keep


def _check_word(what: str, word: str, words: Any) -> None:
    if word not in get_args(words):
        hint = did_you_mean(str(word), get_args(words)) or f"one of {', '.join(get_args(words))}"
        raise ConfigError(f"no {what} is called {word!r}", where="masks", hint=hint)


def _check(sparsity: float, weights: Mapping[str, Tensor]) -> None:
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"a sparsity of {sparsity}", where="masks", hint="it is a share, 0 to 1")
    if not weights:
        raise ConfigError("the model has no Linear or convolution layer", where="masks")
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise ConfigError("a weight that is not finite cannot be ranked", where=name)
