"""Chooses strategies: a CP-SAT model per candidate, an enumeration of candidates, and proofs of
optimality. Never imports torch.
"""
