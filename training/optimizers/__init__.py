"""Optimizers by name, parameter groups, schedules."""
