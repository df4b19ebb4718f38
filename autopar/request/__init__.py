"""The user's request to the planner: pins, software, arguments."""
