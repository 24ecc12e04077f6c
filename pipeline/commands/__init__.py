"""What commands do besides running stages: past results, comparisons, resuming, upkeep."""
