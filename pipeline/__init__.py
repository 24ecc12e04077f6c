"""What runs when, and what it leaves: keys, artifacts, store, ledger, runner, reports. Imports no torch, no onnx."""
