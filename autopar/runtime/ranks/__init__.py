"""Processes: starting them, forming groups, and agreeing."""
