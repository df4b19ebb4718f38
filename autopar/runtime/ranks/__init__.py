"""Processes: how they start, group, and agree."""
