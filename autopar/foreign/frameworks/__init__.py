"""Each framework: its options, how a job is read and written, and what it refuses."""
