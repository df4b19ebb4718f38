"""The definition of costs: what a placement costs under a schedule."""
