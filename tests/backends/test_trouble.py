"""TensorRT's messages, as they come, made into sentences."""

from __future__ import annotations

import pytest

from layerline.backends.trouble import plain

USAGE = "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error "
DRIVER = (
    "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at /_src/common/x.cpp:250 "
    "(cudaError 35: CUDA driver version is insufficient for CUDA runtime version))"
)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            USAGE + "(Dynamic input tensor b is missing dimensions in profile 0. In validate at /_src/n.cpp:4046)",
            "Dynamic input tensor b is missing dimensions in profile 0",
        ),
        (
            "Assertion failed: resolvedWeights(axesWeights): Axis input must resolve to a build-time constant!",
            "Axis input must resolve to a build-time constant!",
        ),
        (
            'convertDtype(onnxType, &newType) && "Unsupported data type for the Cast operator!"',
            "Unsupported data type for the Cast operator!",
        ),
        (
            f"Invalid Node - B\n{USAGE}(B: input has type Int32. In f at /_src/n.cpp:4)\n{DRIVER}",
            "B: input has type Int32",
        ),
        (
            "onnxOpImporters.cpp:1980: TensorRT supports UINT8 zero_point only on DLA.",
            "TensorRT supports UINT8 zero_point only on DLA.",
        ),
        (
            "[graphScope.cpp::analyze::463] Error Code 2: Internal Error (Assertion x failed.  In f at /_src/g.cpp:4)",
            "Assertion x failed",
        ),
        ("Unused Input: e", "Unused Input: e"),
    ],
)
def test_what_is_left_is_the_sentence(said, told) -> None:
    assert plain(said) == told


def test_the_drivers_complaint_is_kept_when_it_is_all_there_is() -> None:
    assert "cudaError 35" in plain(DRIVER)
