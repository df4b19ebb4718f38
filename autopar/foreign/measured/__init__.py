"""Fits a cluster to one measured run: a trace of torch's profiler, or the log of a framework."""
