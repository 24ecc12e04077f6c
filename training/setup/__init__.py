"""What a configuration brings in, refuses and plans."""
