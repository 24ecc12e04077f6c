"""Whether an exported model computes what the module computes: probe inputs, float64 reference, verdicts."""
