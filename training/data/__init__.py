"""Batches, losses and reference outputs."""
