"""Puts a task's model into training mode; frozen parts keep their mode."""

from __future__ import annotations

from torch import nn


def train_mode(model: nn.Module) -> list[str]:
    """Puts a model into training mode, except for parts that the task left in eval mode on purpose.

    A part in eval mode keeps it where the model itself is in training mode, or where none of the part's parameters is
    trained: its running statistics and dropout stay as they were.

    Returns:
        A warning, where the whole model came in eval mode.
    """
    whole_in_eval = not model.training
    kept: list[nn.Module] = []
    names: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        # In eval mode on purpose: the rest is not, or none of its parameters is trained.
        frozen = [not param.requires_grad for param in module.parameters()]
        on_purpose = not whole_in_eval or (frozen and all(frozen))
        if not module.training and name and on_purpose:
            kept.append(module)
            names.append(name)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}".lstrip("."), child)

    visit("", model)
    modes = [(part, part.training) for root in kept for part in root.modules()]
    model.train()
    for part, training in modes:
        part.training = training
    if not whole_in_eval:
        return []
    text = "model() returned a model in eval mode: training puts it into training mode"
    if names:
        text += f", except for what is frozen: {', '.join(names[:5])}"
        if len(names) > 5:
            text += f" and {len(names) - 5} more"
    return [text]
