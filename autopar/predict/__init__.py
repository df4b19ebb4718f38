"""Scoring the cost models against runs that other people measured: `autopar predict RUNS.csv`."""
