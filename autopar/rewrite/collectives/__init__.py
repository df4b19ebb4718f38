"""Layout changes: collectives and local ops, each with an explicit backward."""
