"""Compares the cost models with published measurements: `autopar predict RUNS.csv`."""
