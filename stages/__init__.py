"""The stages, one file each: configuration fields and a short run()."""
