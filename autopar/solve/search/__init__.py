"""The search over candidates, best bound first."""
