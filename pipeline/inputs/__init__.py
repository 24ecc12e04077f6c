"""What comes from outside, bounded and checked: text, numbers, arrays, batches, metrics."""
