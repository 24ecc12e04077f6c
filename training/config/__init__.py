"""The configuration of training: typed sections, and the other ways to write them."""
