"""Checks that the search finds the best plan, against enumeration and against plans that others
would make.
"""
