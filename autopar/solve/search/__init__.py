"""The best-first search over candidates."""
