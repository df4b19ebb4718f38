"""How long do capture, partitioning and planning take?"""
