"""Training policies around a loop of your own: ModelOptimizer and its parts."""
