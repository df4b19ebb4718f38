"""Finds the stages of a pipeline, and what each layer recomputes."""
