"""The fields of quantize, what is checked of them before anything runs, and what they mean together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from layerline.pipeline.config.budgets import MaxDrop
from layerline.pipeline.config.qat_options import QatOptions
from layerline.pipeline.report import RESCALED
from layerline.pipeline.stage import Stage

FORMATS = ("int8", "fp8", "int4", "nvfp4")
"""The modes that quantise: the formats of graph/quantization/targets.py."""
HALF_TYPES = ("fp16", "bf16")
Repair: TypeAlias = Literal["equalize", "smooth", "awq", "adaround", "gptq"]
Selection: TypeAlias = Literal["even", "stratified", "coverage"]
TARGETS: Mapping[str, tuple[str, ...]] = {
    "tensorrt": FORMATS,
    "onnxruntime": ("int8", "int4"),
    "openvino": ("int8", "int4"),
}
"""The formats that any operator of a target takes; graph/quantization/targets.py has those of each operator."""
CAPABILITIES: Mapping[str, tuple[int, int]] = {"fp8": (8, 9), "nvfp4": (10, 0)}
"""The least compute capability that has the types of a format; any has those of the others."""
SEARCH_DROP, SEARCH_DB = "0.5%", 25.0
"""The budget of a search where pipe.yaml sets none."""


class QuantizeFields(Stage):
    """The configuration of quantize."""

    mode: Literal["int8", "fp8", "int4", "nvfp4", "qat", "fp16", "bf16", "none"] = "int8"
    """int8, fp8: Q/DQ around layers with weights; fp8 needs compute capability 8.9. int4, nvfp4: weights of Gemm and
    MatMul alone, in blocks; nvfp4 needs 10.0. qat: int8 or fp8, trained under fake quantisation. fp16, bf16: half
    precision wherever it is safe. none: passed on as is."""
    target: Literal["tensorrt", "onnxruntime", "openvino"] = "tensorrt"
    """The runtime whose rules say which layers are quantised, and how. The engine stage takes tensorrt alone."""
    rest: Literal["fp32", "fp16", "bf16"] = "fp32"
    """In modes that quantise, the type of what stays float: TensorRT runs it as it is written."""
    calibrator: Literal["auto", "entropy", "percentile", "minmax", "mse"] = "auto"
    """How the clipping threshold is chosen. auto takes, for each value, the one of the four others with the smallest
    error at the layers that read it, or one for all values where the outputs keep clearly more with it. Ranges are
    those of all samples. Of eight samples and more some are held out, and choices are judged on these. fp8 takes the
    greatest value, or the percentile where that is set."""
    percentile: float = Field(default=99.99, gt=0, le=100)
    """For calibrator percentile: per cent of the non-zero values that stay inside the range."""
    samples: PositiveInt = 512
    """Calibration samples at most."""
    selection: Selection = "even"
    """Which samples calibrate. even: spread evenly over the data. stratified: the same number of each `slice`, or else
    of each label. coverage: those whose activations differ most, for rare inputs that must not be clipped."""
    stop_early: PositiveFloat | None = None
    """Stop calibrating when the samples doubled twice and no range moved by more than this, in per cent."""
    batch_size: PositiveInt = 16
    """Samples a run, where the data does not come in batches; more takes more memory."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a calibration sample that holds or gives NaN or Inf does, in every format: stop and name it, or leave the
    sample out of ranges, repairs and gates and say which."""
    per_channel: bool = True
    """One scale for each output channel of a weight."""
    bias_correction: bool = False
    """Take what quantisation adds to a channel on average off the bias of its layer, if the outputs gain by it."""
    repairs: tuple[Repair, ...] = ()
    """What is tried before any training to lose less; each stays where the outputs gain on samples that it was not
    fitted on. For int8 layers: equalize evens out the channels of neighbouring layers, smooth those behind
    normalisations (SmoothQuant), adaround rounds weights by the error of their layer's output. For int4 and nvfp4
    layers: awq scales large inputs down and their weights up, gptq lets later weights make up for the error."""
    attention: bool = False
    """Also quantise matrix products of two activations."""
    ops: tuple[str, ...] | None = None
    """Operators to quantise; all that have a rule when left out."""
    skip: tuple[str, ...] = ()
    """What stays float32: value or node names, module paths with everything below them, or globs."""
    layers: dict[str, Literal["int8", "fp8", "int4", "nvfp4", "fp16", "bf16", "fp32", "skip"]] = Field(
        default_factory=dict
    )
    """The format of single layers, by the name of a module with everything below it, of a value, a weight or a node,
    or by a glob: `{"encoder.*.fc2": fp16, head: skip}`. skip is fp32. Of several patterns the last decides."""
    block_size: Literal[16, 32, 64, 128] = 32
    """Numbers of an int4 weight that share a scale; nvfp4 always has 16."""
    dynamic: bool = False
    """Layers in nvfp4 also read activations in nvfp4, quantised in blocks while running. Only TensorRT runs that."""
    max_drop: MaxDrop | None = None
    """Greatest loss of any metric on eval_data() that passes, in the metric's own units; `0.5%` is that part of the
    float model's value. Or by metric: `{accuracy: 0.5%, mse: {rise: 5%}}`, and the others are only shown."""
    min_db: float = Field(default=10.0)
    """Least SQNR of an output, in dB over samples of eval_data(), else of calibration, that passes where no metric was
    measured; 25 with search. Of class indices and truth values the elements that differ are counted: 10 dB is one in
    ten. Below 20 dB a warning is given in any case."""
    min_cosine: float | None = Field(default=None, ge=-1, le=1)
    """Least cosine between an output and the float model's, where no metric was measured."""
    search: bool = False
    """Find the cheapest formats that keep max_drop (0.5% of each metric, if it is not set), or min_db without a metric,
    after bias_correction and repairs were tried. `pipe tune` sets it."""

    try_fp8: bool = False
    """In a search of mode int8, what the budget keeps from int8 is tried in fp8 before fp16. `pipe tune` sets it where
    engine.targets has nothing older than 8.9."""

    qat: QatOptions | None = None
    """For mode qat, how it trains."""

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: str, info: ValidationInfo) -> str:
        mode = info.data.get("mode", "int8")
        if mode == "qat" and target != "tensorrt":
            raise ValueError("expected tensorrt with mode qat")
        if mode in FORMATS and mode not in TARGETS[target]:
            raise ValueError(f"expected a target that takes {mode}; {target} takes {', '.join(TARGETS[target])}")
        return target

    @field_validator("block_size", "dynamic", "qat", "bias_correction", "repairs", "search", "try_fp8")
    @classmethod
    def _fits_the_mode(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses an option that is set where the mode has no use for it, so that the error has its line."""
        mode = info.data.get("mode", "int8")
        formats = (mode, *info.data.get("layers", {}).values())
        searched = (mode, info.data.get("target", "tensorrt"), info.data.get("search", False))
        quantises = f"mode: {' or '.join(FORMATS)}"
        # Each option: whether the rest of the configuration has a use for it, and what would have.
        fits, needed = {
            "block_size": ("int4" in formats, "int4 as the mode or in layers"),
            "dynamic": ("nvfp4" in formats, "nvfp4 as the mode or in layers"),
            "qat": (mode == "qat", "mode: qat"),
            "bias_correction": (mode in FORMATS, quantises),  # in mode qat training moves the biases
            "repairs": (mode in (*FORMATS, "qat"), f"{quantises} or qat"),
            "search": (mode in FORMATS, quantises),
            "try_fp8": (searched == ("int8", "tensorrt", True), "search: true, mode: int8 and target: tensorrt"),
        }[str(info.field_name)]
        if value and not fits:
            raise ValueError(f"expected {needed} with it; the mode is {mode}")
        return value

    @field_validator("skip")
    @classmethod
    def _name_originals(cls, skip: tuple[str, ...]) -> tuple[str, ...]:
        """A report names a value that a repair scaled otherwise than the float model does."""
        return tuple(pattern.removesuffix(RESCALED) for pattern in skip)

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, layers: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        """Refuses formats that the mode does not have, and two half types in one model."""
        mode, rest = info.data.get("mode", "int8"), info.data.get("rest", "fp32")
        allowed = {"fp16", "bf16", "fp32", "skip"}
        if mode == "qat":
            allowed |= {"int8", "fp8"}
        elif mode in FORMATS:
            allowed |= set(TARGETS[info.data.get("target", "tensorrt")])
        else:
            allowed = {mode, "fp32", "skip"}
        for pattern, wanted in layers.items():
            if mode == "none" or wanted not in allowed:
                raise ValueError(f"expected a format that mode {mode} has for {pattern}")
        half_types = {wanted for wanted in (*layers.values(), rest) if wanted in HALF_TYPES}
        if len(half_types) > 1:
            raise ValueError("expected one half type, fp16 or bf16, in layers and rest together")
        return {pattern.removesuffix(RESCALED): wanted for pattern, wanted in layers.items()}

    @property
    def format(self) -> str:
        """The mode, or the format that it trains."""
        return self.training.format if self.mode == "qat" else self.mode

    @property
    def training(self) -> QatOptions:
        """How mode qat trains."""
        return self.qat or QatOptions()

    @property
    def budget(self) -> MaxDrop | None:
        """The budget of the metrics; that of a search where none is set."""
        if self.search and self.max_drop is None:
            return SEARCH_DROP
        return self.max_drop

    @property
    def least_db(self) -> float:
        """The least SQNR of an output; that of a search where none is set."""
        if self.search and "min_db" not in self.model_fields_set:
            return SEARCH_DB
        return self.min_db


def older(capabilities: Sequence[str], format_name: str) -> list[str]:
    """Which of these compute capabilities ("8.9") lack the types of a format."""
    without: list[str] = []
    for text in capabilities:
        major, _, minor = text.partition(".")
        # What is no number is refused by the builder.
        if major.isdigit() and minor.isdigit() and (int(major), int(minor)) < CAPABILITIES.get(format_name, (0, 0)):
            without.append(text)
    return without


def takes_fp8(stages: Sequence[Stage]) -> bool:
    """Whether a search may choose fp8: quantize has a mode for it, and engine names devices that all have fp8."""
    modes = {(stage.mode, stage.target) for stage in stages if isinstance(stage, QuantizeFields)}
    targets: list[str] = []
    for stage in stages:
        targets += getattr(stage, "targets", ())
    return modes == {("int8", "tensorrt")} and bool(targets) and not older(targets, "fp8")
