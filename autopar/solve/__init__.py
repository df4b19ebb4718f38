"""Choosing strategies: one CP-SAT model per candidate, an enumeration over candidates, and the proofs of both.  Never imports torch."""
