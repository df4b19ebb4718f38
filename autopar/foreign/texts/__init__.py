"""Values in the texts of jobs: shell scripts and Python files are read, and nothing is run."""
