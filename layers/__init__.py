"""Who is who and how far apart: identity, taps, comparison graphs, search."""
