"""Other frameworks: how each writes a training job, what it can run, and what it refuses."""
