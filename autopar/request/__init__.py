"""What a user asks of the planner."""
