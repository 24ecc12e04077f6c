"""What each runtime takes: formats by operator, zero points, types of biases, and where it wants Q/DQ.

Placement reads these tables and has no branches by runtime. Sources: NVIDIA TensorRT documentation, "Working with
Quantized Types"; onnxruntime's QDQ node selectors; OpenVINO's low precision transformations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerline.pipeline.config.quantize_fields import CAPABILITIES, older


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the operands of a layer are stored."""

    weight: str  # element type of weights, in ONNX's name for it
    activation: str = ""  # element type of activations; "" where they stay float.
    opset: int = 13  # least opset that has the types
    # elements along the summed axis of a weight that share a scale; 0 for a scale for each output channel.
    block: int = 0


FORMATS: Mapping[str, Format] = {
    "int8": Format(weight="int8", activation="int8"),
    "fp8": Format(weight="float8e4m3fn", activation="float8e4m3fn", opset=19),
    "int4": Format(weight="int4", opset=21, block=32),
    "nvfp4": Format(weight="float4e2m1", opset=23, block=16),
}
# The format of a layer, by the element type of its weight or of its inputs.
OF_TYPE = {"uint8": "int8", **{entry.weight: name for name, entry in FORMATS.items()}}


def lacking(capabilities: Sequence[str], dtype: str) -> str:
    """Which of these compute capabilities ("8.9") lack an element type, in words; empty where none does."""
    name = OF_TYPE.get(dtype, "")
    without = older(capabilities, name)
    if not without:
        return ""
    major, minor = CAPABILITIES[name]
    return f"compute capability {', '.join(without)} has no {name}: {major}.{minor} is the first that has it"


_RECURRENT = "it sums over time in float, with no Q/DQ inside"
_LOOKUP = "it looks numbers up and multiplies none"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One runtime."""

    # by operator, the formats that it takes. Operators that are missing stay float.
    formats: Mapping[str, tuple[str, ...]]
    asymmetric: bool = False  # activations of int8 layers are uint8 with a zero point
    # biases of int8 Conv and Gemm are int32, in steps of the input's scale times the weight's
    integer_bias: bool = False
    concat_shares: bool = True  # inputs and output of a Concat have one scale
    # inputs of a residual Add that are quantised: 1, the skip input, for an Add that fuses into the Conv before it; 2
    # for one with a kernel of its own.
    add_inputs: int = 1
    # operators whose output is quantised too, behind an activation function, for a kernel to write it
    outputs: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # by operator without a format, why it stays float


WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
POOLS = ("AveragePool", "GlobalAveragePool")
# Operators that have a rule for some format and target.
OPS = (*WEIGHTED, "Add", "Concat", *POOLS)

_EIGHT_BITS = ("int8", "fp8")
_REASONS = {**dict.fromkeys(("LSTM", "GRU", "RNN"), _RECURRENT), "Gather": _LOOKUP}
TARGETS: Mapping[str, Target] = {
    "tensorrt": Target(
        formats={
            **dict.fromkeys((*WEIGHTED, "Add", "Concat"), _EIGHT_BITS),
            **dict.fromkeys(("Gemm", "MatMul"), tuple(FORMATS)),
            **dict.fromkeys(POOLS, ("int8",)),
        },
        reasons=_REASONS,
    ),
    "onnxruntime": Target(
        formats={
            **dict.fromkeys(("Conv", "Add", "Concat", *POOLS), ("int8",)),
            **dict.fromkeys(("Gemm", "MatMul"), ("int8", "int4")),
        },
        asymmetric=True,
        integer_bias=True,
        concat_shares=False,
        add_inputs=2,
        outputs=("Conv", "Add", *POOLS),
        reasons=_REASONS,
    ),
    "openvino": Target(
        formats={
            **dict.fromkeys(("Conv", "ConvTranspose", "Add", "Concat", *POOLS), ("int8",)),
            **dict.fromkeys(("Gemm", "MatMul"), ("int8", "int4")),
        },
        asymmetric=True,
        reasons=_REASONS,
    ),
}
