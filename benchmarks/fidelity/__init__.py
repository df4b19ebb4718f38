"""Compares predicted times with real runs, and the engine with hand-written code."""
