"""Questions about a graph: shapes, bounds, order, types, rounding. Nothing here changes a graph."""
