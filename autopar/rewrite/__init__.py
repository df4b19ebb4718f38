"""From a plan to the program of one rank."""
