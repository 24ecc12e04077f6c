"""From a torch module to ONNX: the traced call, dynamic axes, names that stay, and errors that say what to change."""
