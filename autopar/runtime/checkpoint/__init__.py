"""Saves and loads checkpoints that any plan can read."""
