"""Rewrites a traced model into the program of one rank, following a plan."""
