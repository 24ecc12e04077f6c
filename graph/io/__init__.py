"""Reading and writing ONNX files in canonical form, and what has to be put right in a foreign one."""
