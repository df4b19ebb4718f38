"""Runs the program of a rank: state, batches, pipeline, checkpoints, metrics."""
