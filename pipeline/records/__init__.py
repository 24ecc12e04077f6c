"""What a run leaves: artifacts, records, locks, and their upkeep."""
