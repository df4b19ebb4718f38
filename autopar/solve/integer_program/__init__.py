"""The integer program of one candidate, its relaxation and its solution."""
