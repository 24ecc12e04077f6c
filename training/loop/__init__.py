"""The step: accumulation, finite checks, clipping, averages, masks, monitors."""
