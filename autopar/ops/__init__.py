"""Facts about each op: the letters of its dims, its strategies, which ops drop, and which are
recomputed.
"""
