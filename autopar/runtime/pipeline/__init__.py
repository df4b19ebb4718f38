"""Runs stages under a pipeline schedule."""
