"""The definition: what a placement costs in a schedule."""
