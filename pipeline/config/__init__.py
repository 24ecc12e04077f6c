"""pipe.yaml: read within bounds and checked. Errors name the line and the field."""
