"""The fields below `quantize.qat`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from layerline.pipeline.config.field_types import Fields


class QatOptions(Fields):
    """How mode qat trains."""

    format: Literal["int8", "fp8"] = "int8"
    """What it trains for."""
    epochs: PositiveInt = 3
    """Passes over the training data."""
    steps: PositiveInt | None = None
    """Optimizer steps; overrides epochs."""
    batch_size: PositiveInt = 64
    """Samples a batch; batches that come ready-made keep their size."""
    lr: PositiveFloat = 1e-4
    """Greatest learning rate of the weights: a tenth to a hundredth of that of the training before."""
    learned_scales: bool = True
    """Train the scales too; otherwise those of activations stay, and those of weights follow their largest elements."""
    scale_lr: PositiveFloat = 1e-2
    """The same for the scales: the share by which a step of the optimizer changes a scale at most."""
    freeze_after: float = Field(default=0.75, ge=0, le=1)
    """Share of the steps after which learned scales stay as they are."""
    distill: float = Field(default=0.0, ge=0, le=1)
    """Share of a second loss, with the float model as its teacher."""
    distill_loss: Literal["classes", "outputs"] = "classes"
    """classes: compares the softened probabilities of the first output. outputs: compares all float outputs, by the
    mean square of their difference over the teacher's variance."""
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the average of weights and scales that ships; 0: the last ones ship."""
    keep: Literal["better", "trained"] = "better"
    """better: the model from before the training, where its metric (without one, its outputs) is better. trained: the
    trained model in any case."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Start of every random draw: order of samples, and what loss() draws."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a CUDA device where there is one."""
