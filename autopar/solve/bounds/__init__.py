"""Lower bounds on the step time of candidates."""
