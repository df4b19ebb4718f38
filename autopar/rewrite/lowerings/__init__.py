"""Ops that compute otherwise where they are sharded."""
