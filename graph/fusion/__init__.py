"""Rewriting a graph: rules, the machine that applies them, and the numeric proof of each rewrite."""
