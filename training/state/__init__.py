"""Checkpoints: what is written, how it is read, and weights that somebody else wrote."""
