"""The training of the `train` stage, what its result ships, and the second process of a proof."""
