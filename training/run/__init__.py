"""The training of the `train` stage, and what its result ships."""
