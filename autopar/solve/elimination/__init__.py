"""Bucket elimination over tables of costs."""
