"""Lowerings: ops that compute differently when they are sharded."""
