"""INT8 and half precision in a graph: where Q/DQ belongs, ranges, bias correction, mixed precision."""
