"""Prices a plan again with code that shares nothing with the solver."""
