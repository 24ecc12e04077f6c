"""What comes from outside, bounded and checked: text, numbers, arrays, data files, batches, metrics."""
