"""Stages of a pipeline, and what each layer recomputes."""
