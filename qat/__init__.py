"""Quantisation-aware training on the fused ONNX graph, by the plan that calibration made."""
