"""Saving and loading, under any plan."""
