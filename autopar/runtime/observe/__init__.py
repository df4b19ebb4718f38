"""Metrics and profiles of training steps."""
