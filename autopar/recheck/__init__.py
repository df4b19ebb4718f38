"""A plan priced again by code that shares nothing with the solver."""
