"""Where a NaN comes from, and whether accumulation equals the big batch."""
