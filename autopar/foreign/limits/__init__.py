"""What other frameworks can run, and what software they have: all that planning needs of them."""
