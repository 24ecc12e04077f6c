"""Several ranks: they join, compare, reduce and watch each other."""
