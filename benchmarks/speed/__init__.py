"""Measures how long capture, partitioning and planning take."""
