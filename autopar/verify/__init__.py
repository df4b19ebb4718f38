"""Exactness shown on CPU processes."""
