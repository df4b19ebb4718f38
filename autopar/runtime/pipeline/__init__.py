"""Stages that run by a schedule."""
