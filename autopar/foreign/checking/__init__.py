"""Answers about training jobs of other frameworks."""
