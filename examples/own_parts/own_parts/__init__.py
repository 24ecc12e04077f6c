"""A stage and a backend for Layerline. pyproject.toml registers both under entry points."""
