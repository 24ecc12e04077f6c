"""ONNX in, ONNX out: canonical load and save, rewrites, half precision, Q/DQ."""
