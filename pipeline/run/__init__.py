"""A run: what each stage's key says, what is checked first, and the runner itself."""
