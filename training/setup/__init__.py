"""ModelOptimizer, and what its configuration brings in, refuses and plans."""
