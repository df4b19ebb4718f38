"""Checks that a parallel program computes the same as one device, for losses, models, plans and
damaged programs.
"""
