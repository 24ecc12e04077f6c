"""ONNX files from elsewhere: which inputs and sizes they take."""
