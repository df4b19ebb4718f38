"""Tracing: from a model to a graph in segments."""
