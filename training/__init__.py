"""Training as a policy layer around anyone's loop: ModelOptimizer and what it is made of."""
