"""Verifies exactness on CPU processes: `autopar verify`."""
