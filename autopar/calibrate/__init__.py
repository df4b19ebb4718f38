"""Measure the machine that this runs on and write it down as a cluster file."""
