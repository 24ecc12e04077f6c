"""pipe.yaml: read within bounds, checked, and mistakes told by line and field."""
