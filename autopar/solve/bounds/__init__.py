"""Lower bounds of candidates."""
