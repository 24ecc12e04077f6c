"""The random state of a process: as data, and put back."""
