"""Metrics of a step, and its profile."""
