"""What a stage depends on: canonical encoding, fingerprints of the user's code and of ours, the environment."""
