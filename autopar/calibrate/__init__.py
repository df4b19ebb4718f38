"""Measures this machine and writes it as a cluster file."""
