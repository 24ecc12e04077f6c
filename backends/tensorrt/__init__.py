"""TensorRT and TensorRT-RTX: checks before a build, profiles, the builder, its messages, engines and CUDA memory."""
