"""The pipeline: keys, artifacts, store, ledger, runner and reports. Imports no torch, no onnx."""
