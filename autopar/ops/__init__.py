"""What autopar knows of each op: the letters of its dims, its strategies, what drops and what runs again."""
