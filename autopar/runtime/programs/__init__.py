"""How the segments of a program run: recomputed, compiled."""
