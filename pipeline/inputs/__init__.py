"""What hooks and files from outside give, bounded and checked: arrays, batches, metrics."""
