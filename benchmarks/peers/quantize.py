"""Quantises one ONNX file with one other tool, in whatever environment has the tool.

    python benchmarks/peers/quantize.py TOOL FORMAT MODEL CALIBRATION RESULT [--batched]

TOOL is quantize_static (onnxruntime), nncf or modelopt, FORMAT int8, fp8 or int4 (weights alone, in blocks of 32).
CALIBRATION is an .npz of samples by input name; with --batched each of its rows is a whole feed. Every tool has its
defaults, but for this: int8 and fp8 weights have a scale for each output channel, and the layers that stay float stay
float32. Prints the seconds as its last line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

Feed = dict[str, np.ndarray]


def quantize_static(model: str, result: str, feeds: list[Feed], fmt: str) -> None:
    if fmt == "int4":
        import onnx
        from onnxruntime.quantization import QuantFormat, matmul_nbits_quantizer

        config = matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig(
            block_size=32, is_symmetric=True, quant_format=QuantFormat.QDQ
        )
        blocks = matmul_nbits_quantizer.MatMulNBitsQuantizer(onnx.load(model), algo_config=config)
        blocks.process()
        blocks.model.save_model_to_file(result)
        return
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as quantize

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self.feeds, None)

    fields: dict[str, Any] = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
    if fmt == "fp8":
        # Of its calibrators only this one takes float8.
        fields = {"activation_type": QuantType.QFLOAT8E4M3FN, "weight_type": QuantType.QFLOAT8E4M3FN,
                  "calibrate_method": CalibrationMethod.Distribution}  # fmt: skip
    quantize(model, result, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **fields)


def nncf(model: str, result: str, feeds: list[Feed], fmt: str) -> None:
    import nncf as tool
    import onnx

    if fmt == "int4":
        weights = tool.CompressWeightsMode.INT4_SYM
        # A layer whose summed size is no multiple of the block stays as it is, as with ours.
        others = tool.AdvancedCompressionParameters(group_size_fallback_mode=tool.GroupSizeFallbackMode.IGNORE)
        compressed = tool.compress_weights(
            onnx.load(model), mode=weights, ratio=1.0, group_size=32, all_layers=True, advanced_parameters=others
        )
        onnx.save(compressed, result)
        return
    quantized = tool.quantize(onnx.load(model), tool.Dataset(feeds), subset_size=len(feeds))
    onnx.save(quantized, result)


def modelopt(model: str, result: str, feeds: list[Feed], fmt: str) -> None:
    from modelopt.onnx.quantization import quantize
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rewind()

        def get_next(self) -> Feed | None:
            return next(self.feeds, None)

        def get_first(self) -> Feed:
            return feeds[0]

        def rewind(self) -> None:
            self.feeds: Iterator[Feed] = iter(feeds)

    blocks = {"block_size": 32} if fmt == "int4" else {}
    quantize(
        model, quantize_mode=fmt, calibration_data_reader=Reader(), calibration_eps=["cpu"], output_path=result,
        high_precision_dtype="fp32", log_level="ERROR", **blocks,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    tools = {tool.__name__: tool for tool in (quantize_static, nncf, modelopt)}
    parser.add_argument("tool", choices=tools)
    parser.add_argument("format", choices=["int8", "fp8", "int4"])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("result")
    parser.add_argument("--batched", action="store_true")
    options = parser.parse_args()
    arrays = dict(np.load(options.calibration))
    feeds: list[Feed] = []
    for index in range(len(next(iter(arrays.values())))):
        rows = index if options.batched else slice(index, index + 1)
        feeds.append({name: array[rows] for name, array in arrays.items()})
    started = time.perf_counter()
    tools[options.tool](options.model, options.result, feeds, options.format)
    print(round(time.perf_counter() - started, 1))


if __name__ == "__main__":
    main()
