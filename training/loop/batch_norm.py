"""BatchNorm under accumulation, the layer for which micro-batches are not the big batch: warned of, and converted."""

from __future__ import annotations

from torch import nn

from layerline.training.model.canonical_names import modules, unwrap

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


def batch_norms(model: nn.Module) -> list[str]:
    """Canonical paths of the layers that normalise by the statistics of the batch they see; a shared layer counts once.
    A layer in eval mode uses its running statistics and is not among them, unless it has none."""
    paths: dict[nn.Module, str] = {}
    for path, module in modules(model):
        # InstanceNorm is of another class: it normalises each sample by itself.
        if isinstance(module, _BATCH_NORM) and (module.training or module.running_mean is None):
            paths.setdefault(module, path)
    return list(paths.values())


def warning(model: nn.Module, steps: int) -> str:
    """The sentence about BatchNorm for `steps` micro-batches a step; empty where there is nothing to say."""
    names = batch_norms(model)
    if steps < 2 or not names:
        return ""
    layers = names[0]
    if len(names) > 1:
        layers += f" and {len(names) - 1} more"
    return (
        f"BatchNorm (layer {layers}) sees each micro-batch alone, so {steps} of them are not one big batch there; "
        "layerline.training.loop.batch_norm.to_group_norm(model) replaces the layers"
    )


def to_group_norm(model: nn.Module, groups: int = 32) -> list[str]:
    """Replaces every BatchNorm by GroupNorm (Wu & He 2018), in place; returns their paths. It normalises each sample
    by itself, so any split of a batch gives the same gradient. Scale and shift stay the same parameters; running
    statistics have no counterpart, so train on afterwards. The number of groups is the greatest divisor of the
    channels up to `groups`."""
    converted: dict[nn.Module, nn.Module] = {}
    names = []
    for path, parent in list(modules(unwrap(model))):
        for name, child in list(parent._modules.items()):  # a shared layer under each of its names
            if isinstance(child, _BATCH_NORM) and not isinstance(child, nn.SyncBatchNorm):
                if child not in converted:
                    converted[child] = _group_norm(child, groups)
                setattr(parent, name, converted[child])
                names.append(f"{path}.{name}".lstrip("."))
    return names


def _group_norm(norm: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    count = min(groups, channels)
    # GroupNorm takes a number of groups that divides the channels alone.
    while channels % count:
        count -= 1
    new = nn.GroupNorm(count, channels, norm.eps, norm.affine)
    if norm.affine:
        new.weight, new.bias = norm.weight, norm.bias
    return new.train(norm.training)
